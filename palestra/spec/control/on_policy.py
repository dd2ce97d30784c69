"""The algorithms that learn from what the policy of the moment collected, and throw it away."""

from typing import Annotated, Literal

from pydantic import Field

from palestra.spec.model import Model
from palestra.spec.schedule import Bounds, Schedule, ScheduleSpec

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
    normalise_returns: bool = True
    """Bring the returns of a step to mean 0 and standard deviation 1."""


class A2CSpec(OnPolicySpec):
    """Synchronous advantage actor-critic (Mnih et al. 2016)."""

    name: Literal["a2c"]
    """The algorithm."""
    lr: Rate = constant(7e-4)
    """The learning rate."""
    lam: float | None = Field(default=0.95, ge=0, le=1)
    """λ of generalised advantage estimation; null takes n-step returns up to the horizon (λ = 1)."""
    value_coef: float = Field(default=0.5, ge=0)
    """The weight of the value loss."""
    horizon: int = Field(default=16, ge=1)
    """Transitions collected from each environment before learning from them (T)."""
    normalise_advantages: bool = False
    """Bring the advantages of a step to mean 0 and standard deviation 1."""
    self_imitation: SelfImitationSpec | None = None
    """Learn again from what turned out better than expected."""

    def updates_per_step(self, num_envs: int) -> int:
        """Gradient steps in one policy improvement."""
        return 1 + (0 if self.self_imitation is None else self.self_imitation.updates)


class PPOSpec(OnPolicySpec):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    name: Literal["ppo"]
    """The algorithm."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
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
    normalise_advantages: bool = True
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
