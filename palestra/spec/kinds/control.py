"""The spec of kind `control`: deep RL in Gymnasium environments."""

from math import isqrt
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from palestra.spec.base import Conflict, Every, ExperimentSpec
from palestra.spec.cadence import Cadence, CountCadence
from palestra.spec.control.env import EnvSpec
from palestra.spec.control.net import NetSpec
from palestra.spec.control.off_policy import ActorCriticSpec, CrossQSpec, DQNSpec, OffPolicySpec, SACSpec, TD3Spec
from palestra.spec.control.on_policy import A2CSpec, PPOSpec, ReinforceSpec, SARSASpec
from palestra.spec.execution import Execution
from palestra.spec.model import Model
from palestra.spec.schedule import warmup_problems

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
        if size == 1 and algorithm.normalise_advantages:
            return [Conflict(at, "expected at least 2, because one advantage cannot be normalised")]
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
