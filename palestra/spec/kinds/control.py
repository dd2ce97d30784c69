"""The spec of kind `control`: deep RL in Gymnasium environments."""

from math import isqrt
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from palestra.spec.base import Conflict, Every, ExperimentSpec, Module
from palestra.spec.cadence import Cadence, CountCadence
from palestra.spec.model import Model
from palestra.spec.schedule import Bounds, Schedule, ScheduleSpec, warmup_problems


class EnvSpec(Model):
    """The environment and how many of it run side by side."""

    id: str = Field(min_length=1)
    """The Gymnasium id, for example CartPole-v1."""
    num_envs: int = Field(default=4, ge=1)
    """How many copies are stepped together (N)."""
    vectorize: Literal["auto", "vector", "sync", "async"] = "auto"
    """How they run: the environment's own vectorised form, one after the other, in processes, or the best there is."""
    kwargs: dict[str, JsonValue] = Field(default={})
    """Arguments for gymnasium.make."""
    module: Module | None = None
    """A module imported first, so that it can register environments."""


class PPOSpec(Model):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    name: Literal["ppo"]
    """The algorithm."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """The discount factor γ."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    clip: Annotated[ScheduleSpec, Bounds(above=0)] = Schedule(shape="constant", start=0.2)
    """How far the probability ratio may move from 1 before its gradient stops (ε)."""
    clip_value: float | None = Field(default=None, gt=0)
    """How far a value may move from its old prediction; null does not clip values."""
    entropy: Annotated[ScheduleSpec, Bounds(at_least=0)] = Schedule(shape="constant", start=0.0)
    """The weight of the entropy bonus."""
    value_coef: float = Field(default=0.5, ge=0)
    """The weight of the value loss."""
    lr: Annotated[ScheduleSpec, Bounds(at_least=0)] = Schedule(shape="constant", start=3e-4)
    """The learning rate of Adam."""
    horizon: int = Field(default=128, ge=1)
    """Transitions collected from each environment before learning from them (T)."""
    minibatch: int = Field(default=128, ge=1)
    """Transitions in one gradient step; divides horizon × num_envs."""
    epochs: int = Field(default=4, ge=1)
    """Passes over the collected transitions."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """The norm to which gradients are clipped; null does not clip."""
    normalise_advantages: bool = True
    """Bring the advantages of each minibatch to mean 0 and standard deviation 1."""
    target_kl: float | None = Field(default=None, gt=0)
    """Stop the passes of a step once the approximate KL to the collecting policy is above this; null never stops."""
    adam_eps: float = Field(default=1e-5, gt=0)
    """ε of Adam, added to the root of the second moment."""


AlgorithmSpec = PPOSpec
"""The algorithms, told apart by `name`. A second one: `Annotated[PPOSpec | NewSpec, Field(discriminator="name")]`."""


class NetSpec(Model):
    """The networks of policy and value."""

    hidden: list[Annotated[int, Field(ge=1)]] = Field(default=[64, 64])
    """The widths of the hidden layers."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """The nonlinearity between layers."""
    shared: bool = False
    """Whether policy and value share the hidden layers."""
    orthogonal: bool = True
    """Orthogonal initial weights, with gain 0.01 at the policy's and 1 at the value's output."""


class TrainSpec(Model):
    """How long and how to train."""

    frames: int = Field(ge=1)
    """Environment transitions to train for, over all copies; rounded up to whole steps."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the gradient step to one graph; auto does when the run is long enough to pay for it."""


class EvalSpec(Model):
    """Evaluation with the most likely actions, in environments of its own."""

    episodes: int = Field(default=100, ge=1)
    """Episodes in one evaluation."""
    num_envs: int = Field(default=20, ge=1)
    """How many of them run side by side at most."""


class ControlEvery(Every):
    """How often things happen; a step is one policy improvement (collect, then learn), a frame one transition."""

    eval: CountCadence | None = Cadence(25, "steps")
    """When to evaluate besides at the end; null evaluates only at the end."""


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

    @property
    def minibatches_per_step(self) -> int:
        """Gradient steps in one policy improvement, if `target_kl` stops none."""
        return self.algorithm.epochs * self.frames_per_step // self.algorithm.minibatch

    @property
    def updates(self) -> int:
        """Gradient steps in the whole run, if `target_kl` stops none."""
        return self.steps * self.minibatches_per_step

    def conflicts(self) -> list[Conflict]:
        """Minibatches that the collected transitions cannot fill, warm-ups longer than the run."""
        warmups = warmup_problems(self.algorithm, self.steps)
        return self._minibatch_conflicts() + [Conflict(("algorithm", *path), reason) for path, reason in warmups]

    def _minibatch_conflicts(self) -> list[Conflict]:
        size, batch, at = self.algorithm.minibatch, self.frames_per_step, ("algorithm", "minibatch")
        product = f"horizon × num_envs = {self.algorithm.horizon} × {self.env.num_envs} = {batch}"
        if size > batch:
            return [Conflict(at, f"expected at most {product}, got {size}")]
        if batch % size:
            near = sorted({max(d for d in _divisors(batch) if d < size), min(d for d in _divisors(batch) if d > size)})
            return [Conflict(at, f"expected a divisor of {product}, such as {near[0]} or {near[1]}; got {size}")]
        if size == 1 and self.algorithm.normalise_advantages:
            return [Conflict(at, "expected at least 2, because one advantage cannot be normalised")]
        return []

    def derived(self) -> dict[str, int | float | str]:
        """Frames a step, steps, minibatches a step and gradient steps in all."""
        return {
            "frames per step": self.frames_per_step,
            "steps": self.steps,
            "frames in all": self.steps * self.frames_per_step,
            "minibatches per step": self.minibatches_per_step,
            "gradient steps in all": self.updates,
        }


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in small]
