"""What an algorithm is built from, and what the trainer asks of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from palestra.control.envs.stepping import Stepper
from palestra.control.episodes import Episodes
from palestra.control.nets.actor_critic import Actor
from palestra.control.nets.heads import ActionHead
from palestra.control.policy import Policy, observation_shape
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.schedule import in_fractions


@dataclass(frozen=True)
class AlgorithmParts:
    """What an algorithm is built from."""

    spec: ControlSpec
    """The whole spec; warm-ups of `spec.algorithm` are fractions of the run."""
    stepper: Stepper
    """The environments to train in."""
    generator: torch.Generator
    """All its random numbers come from here: it is in the checkpoint."""
    device: torch.device
    compile: bool
    """Whether the update is worth compiling."""

    @classmethod
    def of(
        cls, spec: ControlSpec, stepper: Stepper, seed: int, device: torch.device, *, compile: bool
    ) -> "AlgorithmParts":
        """The parts for one seed of a spec."""
        spec = spec.model_copy(update={"algorithm": in_fractions(spec.algorithm, spec.steps)})
        return cls(spec, stepper, torch.Generator().manual_seed(seed), device, compile)

    @property
    def obs_shape(self) -> tuple[int, ...]:
        """The shape of one observation."""
        return observation_shape(self.stepper.env.single_observation_space)

    @property
    def head(self) -> ActionHead:
        """The policy's end of the action space."""
        return ActionHead.of(self.stepper.env.single_action_space)


class Algorithm(ABC):
    """One learner. `step` is one policy improvement: collect, then learn."""

    supports: ClassVar[Sequence[str]]
    """The types of action space it can act in, as `ActionHead` calls them."""
    policy: Policy
    episodes: Episodes
    updates: int = 0
    """Gradient steps so far."""
    folder: Path | None = None
    """The session's folder, for what is too large to be in every checkpoint; None: all goes into `state()`."""

    def __init__(self, parts: AlgorithmParts):
        self.generator = parts.generator
        self.span: Callable[[str], AbstractContextManager] = lambda name: nullcontext()
        """Timings, if anyone wants them: `with self.span("learn"):`."""

    @classmethod
    @abstractmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> Actor:
        """A new network that acts, for these spaces: what training begins with and what a checkpoint is loaded into."""

    @abstractmethod
    def step(self, progress: float) -> dict[str, float]:
        """Collect `horizon` vector steps and learn; its metrics, with `updates` among them.

        `progress` in [0, 1], the share of the run's frames that lie before this step, drives the schedules.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that the next step depends on, `policy` among it; the generator's state is kept by the trainer.

        Plain data and tensors, copied. Taking it changes nothing.
        """

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
