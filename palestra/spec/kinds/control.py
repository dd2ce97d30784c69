"""The spec of kind `control`: deep RL in Gymnasium environments, its networks and algorithms."""

from math import isqrt
from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from palestra.spec.base import Conflict, Every, ExperimentSpec, Module
from palestra.spec.model import Cadence, CountCadence, Execution, Model
from palestra.spec.schedule import Bounds, Schedule, ScheduleSpec, warmup_problems


class EnvSpec(Model):
    """The environment and how many of it run side by side."""

    id: str = Field(min_length=1)
    """The Gymnasium id, for example CartPole-v1; or `module:Class`, imported and made."""
    num_envs: int = Field(default=4, ge=1)
    """How many copies are stepped together (N)."""
    vectorize: Literal["auto", "vector", "sync", "async"] = "auto"
    """How they run: the environment's own vectorized form, one after the other, in processes, or the best there is."""
    kwargs: dict[str, JsonValue] = Field(default={})
    """Arguments for gymnasium.make."""
    module: Module | None = None
    """A module imported first, so that it can register environments."""
    frame_stack: int | None = Field(default=None, ge=2)
    """Give the policy so many of the last observations, one after the other on a new first dimension."""
    normalize_obs: bool = False
    """Bring observations to mean 0 and standard deviation 1, by running statistics that the policy carries with it."""
    clip_obs: float = Field(default=10.0, gt=0)
    """How far a normalized observation may be from 0."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return; logged returns stay raw."""
    clip_reward: float | None = Field(default=None, gt=0)
    """How far a reward that is learned from may be from 0, after normalization; null does not clip."""
    reset_timeout: float = Field(default=60.0, gt=0)
    """Seconds after which an environment that does not answer is taken for hung and named."""


Width = Annotated[int, Field(ge=1)]


class RecurrentSpec(Model):
    """A recurrent layer after the hidden ones; its state is carried through the rollout and cleared at episode ends."""

    cell: Literal["lstm", "gru"] = "lstm"
    """The kind of cell."""
    size: int = Field(default=64, ge=1)
    """The width of its state."""


class GraphSpec(Model):
    """A trunk of your own: layers of torch.nn by name, and how they are joined."""

    layers: dict[str, dict[str, dict[str, JsonValue]]]
    """Name of the layer: {class of torch.nn: its arguments}, for example {first: {LazyLinear: {out_features: 64}}}."""
    join: dict[str, list[str]] = Field(default={})
    """For a layer that does not take the one before it: those it takes, concatenated; `obs` is the observation."""


class NetSpec(Model):
    """The networks of policy and value."""

    trunk: Literal["auto", "mlp", "nature", "impala"] = "auto"
    """What reads observations: hidden layers, or convolutions before them; auto: nature for images from 36 × 36 on."""
    hidden: list[Width] = Field(default=[64, 64])
    """The widths of the hidden layers; after convolutions one of 512 is usual."""
    critic_hidden: list[Width] | None = None
    """The widths of the critic's hidden layers where they are not the policy's."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """The nonlinearity between layers."""
    layer_norm: bool = False
    """Layer normalization before the nonlinearity of each hidden layer."""
    shared: bool = False
    """Whether policy and value share the hidden layers."""
    orthogonal: bool = True
    """Orthogonal initial weights, with gain 0.01 at the policy's and 1 at the value's output."""
    log_std: float = 0.0
    """What the logarithm of the standard deviation of continuous actions begins with, in units of half their range."""
    recurrent: RecurrentSpec | None = None
    """A recurrent layer after the hidden ones."""
    graph: GraphSpec | None = None
    """A trunk of your own instead of `trunk` and `hidden`."""


Rate = Annotated[ScheduleSpec, Bounds(at_least=0)]


def constant(value: float) -> Schedule:
    """A schedule that does not move."""
    return Schedule(shape="constant", start=value)


class SelfImitationSpec(Model):
    """Self-imitation learning (Oh et al. 2018): learn again from what turned out better than expected."""

    buffer: int = Field(default=100_000, ge=1)
    """Transitions remembered, of whole episodes."""
    batch: int = Field(default=512, ge=1)
    """Transitions in one of its gradient steps."""
    updates: int = Field(default=4, ge=1)
    """Its gradient steps after each policy improvement."""
    coef: float = Field(default=0.1, gt=0)
    """The weight of its policy loss."""
    value_coef: float = Field(default=0.01, ge=0)
    """The weight of its value loss."""
    alpha: float = Field(default=0.6, ge=0)
    """How strongly transitions that beat their value most are preferred; 0 draws uniformly."""
    beta: float = Field(default=0.1, ge=0, le=1)
    """How much of that preference the weights undo."""


class OnPolicySpec(Model):
    """What all of them have."""

    gamma: float = Field(default=0.99, ge=0, le=1)
    """The discount factor γ."""
    entropy: Rate = constant(0.0)
    """The weight of the entropy bonus."""
    lr: Rate = constant(3e-4)
    """The learning rate."""
    horizon: int = Field(default=128, ge=1)
    """Transitions collected from each environment before learning from them (T)."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """The norm to which gradients are clipped; null does not clip."""
    adam_eps: float = Field(default=1e-5, gt=0)
    """ε of Adam, added to the root of the second moment."""
    distribution: Literal["gaussian", "beta"] = "gaussian"
    """How continuous actions are drawn: a Gaussian whose samples are clipped to the bounds, or a Beta within them."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps in one policy improvement."""
        return 1


class ReinforceSpec(OnPolicySpec):
    """REINFORCE (Williams 1992): Monte-Carlo returns of whole episodes, no critic."""

    name: Literal["reinforce"]
    """The algorithm."""
    normalize_returns: bool = True
    """Bring the returns of a step to mean 0 and standard deviation 1."""


class A2CSpec(OnPolicySpec):
    """Synchronous advantage actor-critic (Mnih et al. 2016)."""

    name: Literal["a2c"]
    """The algorithm."""
    lr: Rate = constant(7e-4)
    """The learning rate."""
    lam: float | None = Field(default=0.95, ge=0, le=1)
    """λ of generalized advantage estimation; null takes n-step returns up to the horizon (λ = 1)."""
    value_coef: float = Field(default=0.5, ge=0)
    """The weight of the value loss."""
    horizon: int = Field(default=16, ge=1)
    """Transitions collected from each environment before learning from them (T)."""
    normalize_advantages: bool = False
    """Bring the advantages of a step to mean 0 and standard deviation 1."""
    self_imitation: SelfImitationSpec | None = None
    """Learn again from what turned out better than expected."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps in one policy improvement."""
        return 1 + (0 if self.self_imitation is None else self.self_imitation.updates)


class PPOSpec(OnPolicySpec):
    """Proximal policy optimization (Schulman et al. 2017)."""

    name: Literal["ppo"]
    """The algorithm."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """λ of generalized advantage estimation."""
    clip: Annotated[ScheduleSpec, Bounds(above=0)] = constant(0.2)
    """How far the probability ratio may move from 1 before its gradient stops (ε)."""
    clip_value: float | None = Field(default=None, gt=0)
    """How far a value may move from its old prediction; null does not clip values."""
    value_coef: float = Field(default=0.5, ge=0)
    """The weight of the value loss."""
    minibatch: int = Field(default=128, ge=1)
    """Transitions in one gradient step; divides horizon × num_envs."""
    epochs: int = Field(default=4, ge=1)
    """Passes over the collected transitions."""
    normalize_advantages: bool = True
    """Bring the advantages of each minibatch to mean 0 and standard deviation 1."""
    target_kl: float | None = Field(default=None, gt=0)
    """Stop the passes of a step once the approximate KL to the collecting policy is above this; null never stops."""
    self_imitation: SelfImitationSpec | None = None
    """Learn again from what turned out better than expected."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps in one policy improvement, if `target_kl` stops none."""
        imitation = 0 if self.self_imitation is None else self.self_imitation.updates
        return self.epochs * self.horizon * num_envs // self.minibatch + imitation


class SARSASpec(Model):
    """SARSA (Rummery & Niranjan 1994) with a network: learns the values of the policy that explores."""

    name: Literal["sarsa"]
    """The algorithm."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """The discount factor γ."""
    epsilon: Annotated[ScheduleSpec, Bounds(at_least=0)] = Schedule(shape="linear", start=1.0, end=0.05, finish=0.5)
    """The share of random actions, drawn for each environment by itself."""
    temperature: Rate | None = None
    """Draw actions by softmax(Q / temperature) instead of ε-greedily."""
    lam: float = Field(default=0.0, ge=0, le=1)
    """λ of the returns learned towards; 0 is one reward and the value of what follows it."""
    lr: Rate = constant(1e-3)
    """The learning rate."""
    horizon: int = Field(default=32, ge=1)
    """Transitions collected from each environment before learning from them (T)."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """The norm to which gradients are clipped; null does not clip."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """ε of Adam, added to the root of the second moment."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps in one policy improvement."""
        return 1


class PrioritizedSpec(Model):
    """Prioritized replay (Schaul et al. 2016): what surprised most is seen more often."""

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
    prioritized: PrioritizedSpec | None = None
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
    """CrossQ (Bhatt et al. 2024): SAC without target networks, with batch renormalization in the critics."""

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
    """How fast the running statistics of batch renormalization follow."""
    renorm_warmup: int = Field(default=10_000, ge=0)
    """Gradient steps over which plain batch normalization turns into batch renormalization."""


AlgorithmSpec = Annotated[
    ReinforceSpec | SARSASpec | A2CSpec | PPOSpec | DQNSpec | SACSpec | TD3Spec | CrossQSpec,
    Field(discriminator="name"),
]
"""The algorithms, told apart by `name`."""


class TrainSpec(Model):
    """How long and how to train."""

    frames: int = Field(ge=1)
    """Environment transitions to train for, over all copies; rounded up to whole steps."""
    compile: Execution[Literal["auto", "on", "off"]] = "auto"
    """Compile the gradient step to one graph; auto does when the run is long enough to pay for it."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the factors of matrix products; bf16 is several times as fast for wide networks on a CPU with AMX."""


AUTO_EVALUATIONS = 20  # at most, in a run whose `every.eval` is auto
EVALUATED_SHARE = 10  # one frame of evaluation for that many of training, where `every.eval` is auto


class EvalSpec(Model):
    """Evaluation with the most likely actions, in environments of its own."""

    episodes: int = Field(default=10, ge=1)
    """Episodes in one evaluation."""
    num_envs: int = Field(default=20, ge=1)
    """How many of them run side by side at most."""


# Told apart before either is validated, so that a bad cadence is refused with the words of cadences.
AutoCadence = Annotated[
    Annotated[CountCadence, Tag("cadence")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if value == "auto" else "cadence"),
]


class ControlEvery(Every):
    """How often things happen; a step is one policy improvement (collect, then learn), a frame one transition."""

    eval: AutoCadence | None = "auto"  # pyrefly: ignore[bad-override]
    """When to evaluate besides at the end: auto up to 20 times, within a tenth of the frames; null only at the end."""


class ControlSpec(ExperimentSpec):
    """Deep RL: one policy trained by one algorithm in copies of one environment."""

    kind: Literal["control"]
    """The kind of experiment."""
    env: EnvSpec
    """The environment."""
    algorithm: AlgorithmSpec
    """How the policy learns."""
    net: NetSpec = NetSpec()
    """The networks."""
    train: TrainSpec
    """How long to train."""
    eval: EvalSpec = EvalSpec()
    """How to evaluate."""
    every: ControlEvery = ControlEvery()
    """How often to checkpoint, evaluate and log."""

    @property
    def frames_per_step(self) -> int:
        """Transitions collected for one policy improvement (T × N)."""
        return self.algorithm.horizon * self.env.num_envs

    @property
    def steps(self) -> int:
        """Policy improvements in the whole run: enough for all of `train.frames`."""
        return -(-self.train.frames // self.frames_per_step)

    def affords(self, spent: int, one: float, seen: int) -> bool:
        """Whether auto allows an evaluation of `one` frames after `seen` of training, `spent` on earlier ones.

        The one at the end has its part of the whole budget; nothing here depends on the clock, so a resume repeats it.
        """
        now, whole = seen / EVALUATED_SHARE, self.train.frames / EVALUATED_SHARE
        return spent + one <= now and spent + 2 * one <= whole

    @property
    def evaluations(self) -> Cadence | None:
        """When an evaluation may be due: `every.eval`, in twentieths of the run where it is auto."""
        if self.every.eval != "auto":
            return self.every.eval
        return Cadence(max(1, self.train.frames // AUTO_EVALUATIONS), "frames")

    @property
    def updates(self) -> int:
        """Gradient steps in the whole run, if nothing ends one early."""
        if isinstance(self.algorithm, OffPolicySpec):
            learned = max(0, self.train.frames - self.algorithm.start)
            return learned * self.algorithm.updates_at_once(self.env.num_envs) // self._frames_between_updates
        return self.steps * self.algorithm.updates_per_step(self.env.num_envs)

    @property
    def _frames_between_updates(self) -> int:
        assert isinstance(self.algorithm, OffPolicySpec)
        return self.env.num_envs * self.algorithm.update_every

    def conflicts(self) -> list[Conflict]:
        """Sizes that do not fit together, warm-ups longer than the run, networks that an algorithm has no use for."""
        warmups = warmup_problems(self.algorithm, self.steps)
        found = [Conflict(("algorithm", *path), reason) for path, reason in warmups]
        if isinstance(self.algorithm, PPOSpec):
            found += self._minibatch_conflicts(self.algorithm)
        if isinstance(self.algorithm, OffPolicySpec):
            found += self._replay_conflicts(self.algorithm)
        if self.net.shared and isinstance(self.algorithm, ActorCriticSpec):
            reason = f"{self.algorithm.name} has no use for it: policy and critics have networks of their own"
            found.append(Conflict(("net", "shared"), reason))
        if self.net.recurrent is not None and not isinstance(self.algorithm, PPOSpec | A2CSpec):
            found.append(Conflict(("net", "recurrent"), f"{self.algorithm.name} has no use for it: use ppo or a2c"))
        return found + self._net_conflicts()

    def _net_conflicts(self) -> list[Conflict]:
        found, net, algorithm = [], self.net, self.algorithm
        if net.shared and net.critic_hidden is not None:
            found.append(
                Conflict(("net", "critic_hidden"), "the critic has no hidden layers of its own with net.shared")
            )
        if net.graph is not None and net.critic_hidden is not None:
            found.append(Conflict(("net", "critic_hidden"), "net.graph stands for all hidden layers: leave it out"))
        if net.recurrent is None:
            return found
        if isinstance(algorithm, PPOSpec) and algorithm.minibatch % algorithm.horizon:
            reason = (
                f"expected a multiple of the horizon ({algorithm.horizon}), because a recurrent policy learns from "
                f"whole sequences; got {algorithm.minibatch}"
            )
            found.append(Conflict(("algorithm", "minibatch"), reason))
        if isinstance(algorithm, PPOSpec | A2CSpec) and algorithm.self_imitation is not None:
            reason = "it learns from single steps, without what net.recurrent remembers: leave one of them out"
            found.append(Conflict(("algorithm", "self_imitation"), reason))
        return found

    def _minibatch_conflicts(self, algorithm: PPOSpec) -> list[Conflict]:
        size, batch, at = algorithm.minibatch, self.frames_per_step, ("algorithm", "minibatch")
        product = f"horizon × num_envs = {algorithm.horizon} × {self.env.num_envs} = {batch}"
        if size > batch:
            return [Conflict(at, f"expected at most {product}, got {size}")]
        if batch % size:
            near = sorted({max(d for d in _divisors(batch) if d < size), min(d for d in _divisors(batch) if d > size)})
            return [Conflict(at, f"expected a divisor of {product}, such as {near[0]} or {near[1]}; got {size}")]
        if size == 1 and algorithm.normalize_advantages:
            return [Conflict(at, "expected at least 2, because one advantage cannot be normalized")]
        return []

    def _replay_conflicts(self, algorithm: OffPolicySpec) -> list[Conflict]:
        found, n = [], self.env.num_envs
        exact = algorithm.replay_ratio * n * algorithm.update_every
        if algorithm.updates_at_once(n) < 1 or abs(exact - round(exact)) > 1e-6:
            reason = (
                f"expected a whole number of gradient steps, at least 1, every {algorithm.update_every} vector steps; "
                f"replay_ratio × num_envs × update_every is {exact:g}"
            )
            found.append(Conflict(("algorithm", "replay_ratio"), reason))
        if algorithm.horizon % algorithm.update_every:
            reason = f"expected a multiple of update_every ({algorithm.update_every}), got {algorithm.horizon}"
            found.append(Conflict(("algorithm", "horizon"), reason))
        if algorithm.buffer < max(algorithm.start, n * (algorithm.n_step + 1)):
            least = max(algorithm.start, n * (algorithm.n_step + 1))
            found.append(Conflict(("algorithm", "buffer"), f"expected at least {least}, got {algorithm.buffer}"))
        return found

    def derived(self) -> dict[str, int | float | str]:
        """Frames a step, steps and gradient steps, a step and in all; what evaluation comes to."""
        budget, when = self.train.frames // EVALUATED_SHARE, self.evaluations
        within = f" at most, within {budget:,} frames" if self.every.eval == "auto" else ""
        return {
            "frames per step": self.frames_per_step,
            "steps": self.steps,
            "frames in all": self.steps * self.frames_per_step,
            "gradient steps per step": self.algorithm.updates_per_step(self.env.num_envs),
            "gradient steps in all": self.updates,
            "evaluation": f"{self.eval.episodes} episodes {f'every {when}' if when else 'at the end'}{within}",
        }


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in small]
