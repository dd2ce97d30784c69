"""Your functions in the training of control: `on_step` after every vector step, `on_episode` at every episode's end."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.control.envs.stepping import Transition
from palestra.control.episodes import Episodes
from palestra.control.policy import Policy
from palestra.runs.recorder import HookFailed
from palestra.spec.imports import load_named
from palestra.spec.kinds.control import ControlSpec


@dataclass
class StepContext:
    """The argument of `on_step`: one step of all N training environments. Copy arrays to keep them."""

    frame: int
    """Environment transitions so far."""
    actions: np.ndarray
    """As the environments took them, (N, ...)."""
    obs: np.ndarray
    """What the policy acts on next, (N, ...): where an episode ended, the first observation of the next one."""
    rewards: np.ndarray
    """As the environments gave them, (N,)."""
    terminated: np.ndarray
    truncated: np.ndarray
    policy: Policy
    folder: Path
    """Of the session."""
    stop: bool = False
    """Set it to True to end the run after the current step of training, as if it were the last."""


@dataclass
class EpisodeContext:
    """The argument of `on_episode`: a training episode that has ended."""

    frame: int
    """Environment transitions so far."""
    env: int
    """Which of the N environments it was in."""
    total: float
    """Its return: the undiscounted sum of rewards as the environment gave them."""
    length: int
    components: dict[str, float]
    """The sums of `env.components`."""
    policy: Policy
    folder: Path
    """Of the session."""
    stop: bool = False
    """Set it to True to end the run after the current step of training, as if it were the last."""


class Hooks:
    """Calls the functions of a spec, and averages the numbers they return until the next row of metrics."""

    def __init__(self, spec: ControlSpec, policy: Policy, folder: Path):
        self.policy, self.folder, self.stop = policy, folder, False
        self.on_step = {name: load_named(name, "on_step") for name in spec.on_step}
        self.on_episode = {name: load_named(name, "on_episode") for name in spec.on_episode}
        self._sums: dict[str, list[float]] = {}  # by metric: sum and count since the last row

    def listen(self, episodes: Episodes) -> None:
        """Be called by the training environments; without functions their steps cost nothing more."""
        if self.on_step or self.on_episode:
            episodes.listener = self

    def __call__(self, episodes: Episodes, actions: np.ndarray, transition: Transition) -> None:
        """After a vector step."""
        if self.on_step:
            _, rewards, terminated, truncated, _, _, _ = transition
            seen = (episodes.frame, actions, episodes.now, rewards, terminated, truncated)
            self._call(self.on_step, StepContext(*seen, self.policy, self.folder))
        for env, total, length in episodes.just_finished if self.on_episode else ():
            components = episodes.components_of.get(env, {})
            context = EpisodeContext(episodes.frame, env, total, length, components, self.policy, self.folder)
            self._call(self.on_episode, context)

    def metrics(self) -> dict[str, float]:
        """Means of the numbers returned since the last call."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        self._sums = {}
        return means

    def state(self) -> dict[str, list[float]]:
        """What the next row will average."""
        return {name: list(pair) for name, pair in self._sums.items()}

    def load_state(self, state: Mapping[str, list[float]]) -> None:
        """Continue from `state()`."""
        self._sums = {name: list(pair) for name, pair in state.items()}

    def _call(self, functions: dict[str, Any], context: StepContext | EpisodeContext) -> None:
        for name, function in functions.items():
            try:
                numbers = {metric: float(value) for metric, value in (function(context) or {}).items()}
            except Exception as error:
                raised = f"raised {type(error).__name__} at frame {context.frame}: {error}"
                raise HookFailed(f"the hook {name} {raised}") from error
            for metric, value in numbers.items():
                total, count = self._sums.get(metric, (0.0, 0))
                self._sums[metric] = [total + value, count + 1]
        self.stop |= context.stop
