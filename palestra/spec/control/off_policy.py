"""The algorithms that learn from a memory of transitions."""

from typing import Annotated, Literal

from pydantic import Field

from palestra.spec.control.on_policy import Rate, constant
from palestra.spec.model import Model
from palestra.spec.schedule import Bounds, Schedule, ScheduleSpec


class PrioritisedSpec(Model):
    """Prioritised replay (Schaul et al. 2016): what surprised most is seen more often."""

    alpha: float = Field(default=0.6, ge=0, le=1)
    """How strongly; 0 draws uniformly."""
    beta: Annotated[ScheduleSpec, Bounds(at_least=0)] = Schedule(shape="linear", start=0.4, end=1.0)
    """How much of the preference the importance weights undo; 1 undoes it wholly."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to every error, so that none is never seen again."""


class DistributionalSpec(Model):
    """Quantile regression (Dabney et al. 2018): the network predicts a distribution of returns instead of its mean."""

    quantiles: int = Field(default=32, ge=2)
    """How many quantiles of it."""


class OffPolicySpec(Model):
    """What all of them have."""

    gamma: float = Field(default=0.99, ge=0, le=1)
    """The discount factor γ."""
    lr: Rate = constant(3e-4)
    """The learning rate of Adam."""
    batch: int = Field(default=256, ge=1)
    """Transitions in one gradient step."""
    buffer: int = Field(default=1_000_000, ge=1)
    """Transitions remembered, over all environments; the oldest make room."""
    start: int = Field(default=1000, ge=1)
    """Frames collected before the first gradient step, with random actions."""
    replay_ratio: float = Field(default=1.0, gt=0)
    """Gradient steps for each frame, whatever the number of environments."""
    update_every: int = Field(default=1, ge=1)
    """Vector steps between learning: then replay_ratio × num_envs × update_every gradient steps are made at once."""
    horizon: int = Field(default=256, ge=1)
    """Vector steps in what is called a step here: after it comes what is due of logging, evaluation, checkpoints."""
    n_step: int = Field(default=1, ge=1)
    """Rewards added up before the value of what follows them is taken."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """The norm to which gradients are clipped; null does not clip."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """ε of Adam, added to the root of the second moment."""

    def updates_at_once(self, num_envs: int) -> int:
        """Gradient steps made every `update_every` vector steps."""
        return round(self.replay_ratio * num_envs * self.update_every)

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps between two chances to log, after `start`."""
        return self.horizon // self.update_every * self.updates_at_once(num_envs)


class DQNSpec(OffPolicySpec):
    """Deep Q-learning (Mnih et al. 2015) with what was added to it since."""

    name: Literal["dqn"]
    """The algorithm."""
    lr: Rate = constant(1e-3)
    """The learning rate of Adam."""
    batch: int = Field(default=128, ge=1)
    """Transitions in one gradient step."""
    epsilon: Annotated[ScheduleSpec, Bounds(at_least=0)] = Schedule(shape="linear", start=1.0, end=0.05, finish=0.2)
    """The share of random actions, drawn for each environment by itself."""
    temperature: Rate | None = None
    """Draw actions by softmax(Q / temperature) instead of ε-greedily."""
    target_every: int | None = Field(default=None, ge=1)
    """Gradient steps after which the target network becomes a copy of the learning one; null follows it by `tau`."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """How far the target network moves towards the learning one after each gradient step; 1 is no target network."""
    double: bool = True
    """Let the learning network choose the action whose value the target network gives (van Hasselt et al. 2016)."""
    dueling: bool = False
    """Value and advantages in streams of their own (Wang et al. 2016)."""
    prioritised: PrioritisedSpec | None = None
    """See surprising transitions more often."""
    distributional: DistributionalSpec | None = None
    """Predict the distribution of returns."""
    max_grad_norm: float | None = Field(default=10.0, gt=0)
    """The norm to which gradients are clipped; null does not clip."""


class ActorCriticSpec(OffPolicySpec):
    """What SAC, TD3 and CrossQ have."""

    critic_lr: Rate | None = None
    """The critics' learning rate where it is not `lr`."""
    policy_delay: int = Field(default=1, ge=1)
    """Gradient steps of the critics for each of the policy."""


class SACSpec(ActorCriticSpec):
    """Soft actor-critic (Haarnoja et al. 2018); for Discrete actions with exact expectations (Christodoulou 2019)."""

    name: Literal["sac"]
    """The algorithm."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """How far the target critics move towards the critics after each gradient step."""
    alpha: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """The weight of the entropy; auto tunes it towards `target_entropy`."""
    target_entropy: float | Literal["auto"] = "auto"
    """The entropy aimed at in nats; auto is −dim(A), in units of half the range, or 0.6 · log n for n Discrete ones."""
    alpha_lr: Rate | None = None
    """The learning rate of the entropy's weight where it is not `lr`."""


class TD3Spec(ActorCriticSpec):
    """Twin delayed DDPG (Fujimoto et al. 2018)."""

    name: Literal["td3"]
    """The algorithm."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """How far the target networks move towards the others after each gradient step of the policy."""
    policy_delay: int = Field(default=2, ge=1)
    """Gradient steps of the critics for each of the policy and of the targets."""
    noise: Rate = constant(0.1)
    """The standard deviation of what is added to actions to explore, in units of half the action range."""
    target_noise: float = Field(default=0.2, ge=0)
    """The standard deviation of what is added to the target policy's actions."""
    noise_clip: float = Field(default=0.5, ge=0)
    """How far that may be from 0."""


class CrossQSpec(ActorCriticSpec):
    """CrossQ (Bhatt et al. 2024): SAC without target networks, with batch renormalisation in the critics."""

    name: Literal["crossq"]
    """The algorithm."""
    lr: Rate = constant(1e-3)
    """The learning rate of Adam."""
    policy_delay: int = Field(default=3, ge=1)
    """Gradient steps of the critics for each of the policy."""
    alpha: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """The weight of the entropy; auto tunes it towards `target_entropy`."""
    target_entropy: float | Literal["auto"] = "auto"
    """The entropy aimed at in nats; auto is −dim(A), in units of half the range, or 0.6 · log n for n Discrete ones."""
    alpha_lr: Rate | None = None
    """The learning rate of the entropy's weight where it is not `lr`."""
    beta1: float = Field(default=0.5, ge=0, lt=1)
    """β₁ of Adam."""
    renorm_momentum: float = Field(default=0.01, gt=0, le=1)
    """How fast the running statistics of batch renormalisation follow."""
    renorm_warmup: int = Field(default=10_000, ge=0)
    """Gradient steps over which plain batch normalisation turns into batch renormalisation."""
