"""The interface of an algorithm and what all of them share: policy, environments, reward scale, state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from palestra.control.envs.stepping import Stepper
from palestra.control.episodes import Episodes
from palestra.control.graphs import Graphed
from palestra.control.nets.actor_critic import Actor, Recurrent
from palestra.control.nets.agents import SeparateAgents
from palestra.control.nets.heads import ActionHead
from palestra.control.optim import compiled, rule_of
from palestra.control.policy import Policy
from palestra.control.scaling import ObsScale, Rewards, obs_scale
from palestra.control.spaces import ObsShape, observation_shape
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

    def compiled(self, method: Callable, compiles: bool = True, kept: int = 0) -> Callable:
        """A method that updates, faster where the spec wants that: compiled on a CPU, as a CUDA graph on a GPU.

        The tensors of its first `kept` arguments are the same in every call.
        """
        if self.device.type == "cuda":
            graphed = self.spec.train.compile != "off" and self.spec.net.recurrent is None
            return Graphed(method, kept) if graphed else method
        return compiled(method, self.compiles and compiles)

    @property
    def compiles(self) -> bool:
        """Whether updates are compiled: the steps of a recurrent network as one graph would take minutes."""
        return self.compile and self.spec.net.recurrent is None

    @property
    def obs_shape(self) -> ObsShape:
        """The shape of one observation, and its parts."""
        return observation_shape(self.stepper.env.single_observation_space)

    @property
    def head(self) -> ActionHead:
        """The policy's end of the action space."""
        return ActionHead.of(self.stepper.env.single_action_space)


class Algorithm(ABC):
    """One learner: a policy, the environments it is trained in, and `step`, one policy improvement."""

    supports: ClassVar[Sequence[str]]
    """The types of action space it can act in, as `ActionHead` calls them."""
    network: ClassVar[Callable[..., Actor]]
    """The class of the network that acts, where it is not recurrent."""
    net: Any
    """The network that acts."""
    spec: Any
    """`spec.algorithm`, of the algorithm's own type."""
    updates: int = 0
    """Gradient steps so far."""
    folder: Path | None = None
    """For what is too large to be in every checkpoint; None: everything is in `state()`."""

    def __init__(self, parts: AlgorithmParts):
        self.spec, self.generator, self.device = parts.spec.algorithm, parts.generator, parts.device
        self.rule = rule_of(self.spec)
        self.span: Callable[[str], AbstractContextManager] = lambda name: nullcontext()
        """Timings, where they are recorded: `with self.span("learn"):`."""
        self.net = self.actor(parts.spec, parts.obs_shape, parts.head)
        self.policy = Policy(parts.obs_shape, self.net, parts.device)
        self.episodes = Episodes(parts.stepper)
        self.rewards = Rewards(parts.spec.env, self.episodes.num_envs, self.spec.gamma, parts.device)
        self.obs_scale = next((module for module in self.net.modules() if isinstance(module, ObsScale)), None)

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> Actor:
        """A new network that acts, for these spaces: training starts from it, a checkpoint is loaded into it."""
        head = head.with_family(getattr(spec.algorithm, "distribution", head.family))
        network = cls.network if spec.net.recurrent is None else Recurrent
        if spec.env.policies > 1:
            network = partial(SeparateAgents, agents=spec.env.policies)
        return network(obs_shape, head, spec.net, obs_scale(spec.env, obs_shape))

    def begin_from(self, given: Mapping[str, Any]) -> None:
        """Start from the weights of a trained `policy`, and of what else there is of critics and targets."""
        self.policy.load_state({"weights": given["policy"]})

    @abstractmethod
    def step(self, progress: float) -> dict[str, float]:
        """Collect `horizon` vector steps and learn; returns metrics, `updates` among them.

        `progress` in [0, 1], the fraction of the run's frames before this step, drives the schedules.
        """

    def state(self) -> dict[str, Any]:
        """All that the next step depends on but the generator, whose state the trainer saves.

        Plain data and tensors, copied. Taking it changes nothing. A subclass adds its own.
        """
        return {
            "policy": self.policy.state(),
            "updates": self.updates,
            "episodes": self.episodes.state(),
            "rewards": self.rewards.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.policy.load_state(state["policy"])
        self.updates = state["updates"]
        self.rewards.load_state(state["rewards"])
        restarted = self.episodes.load_state(state["episodes"])
        if restarted is not None:
            self.cut(restarted)

    def cut(self, rows: np.ndarray) -> None:
        """The environments of these rows, bool (N,), started new episodes outside of a step."""
        self.rewards.cut(rows)
