"""Copies of one environment that step together, in this process or in several, with the same numbers either way.

Seeds, order and states are by copy, so a run may be resumed with another number of processes.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from palestra.control.envs.goals import Goals, goals_of
from palestra.control.envs.workers import Arrays, LocalWorker, Make, ProcessWorker
from palestra.errors import UsageError


class Worker(Protocol):
    """Steps some of the copies."""

    rows: slice

    def start(self, command: str, *arguments: Any) -> None:
        """Begin a command of an `EnvBlock`."""

    def finish(self) -> Any:
        """Its result, with the rows of the arrays written."""

    def close(self) -> None:
        """Close the copies."""


class Copies(VectorEnv):
    """N copies of an environment that step together and reset themselves in the same step."""

    def __init__(self, name: str, workers: Sequence[Worker], arrays: Arrays, single: gym.Env):
        self.name, self._workers, self._arrays = name, workers, arrays
        self.num_envs = len(arrays.rewards)
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        obs, actions = single.observation_space, single.action_space
        self.single_observation_space, self.single_action_space = obs, actions
        self.observation_space = batch_space(obs, self.num_envs)
        self.action_space = batch_space(actions, self.num_envs)
        self.goals: Goals | None = goals_of(single)
        """Of a goal environment, what relabels its transitions."""

    @property
    def processes(self) -> int:
        """The number of worker processes; 0: all copies are in this one."""
        return sum(isinstance(worker, ProcessWorker) for worker in self._workers)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode in each; copy i gets `seed + i`."""
        if options is not None:
            raise UsageError(f"{self.name}: reset takes no options, got {options}")
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        infos = self._infos(self._all("reset", lambda rows: (seeds[rows],)))
        return self._arrays.obs.copy(), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all; the last observation of an episode that ended is in `final_obs`."""
        if np.shape(actions) != self.action_space.shape:
            raise UsageError(f"{self.name} takes actions of shape {self.action_space.shape}, got {np.shape(actions)}")
        arrays = self._arrays
        arrays.actions[...] = actions
        infos = self._infos(self._all("step"))
        ended = arrays.terminated | arrays.truncated
        if ended.any():
            infos |= {"final_obs": arrays.final_obs.copy(), "_final_obs": ended}
        return arrays.obs.copy(), arrays.rewards.copy(), arrays.terminated.copy(), arrays.truncated.copy(), infos

    def get_state(self) -> list[dict[str, Any]]:
        """The state of each copy."""
        return self._all("get_states")

    def set_state(self, states: Sequence[dict[str, Any]]) -> np.ndarray | None:
        """Continue from `get_state`; which copies restarted (see `observations`), bool (N,), or None."""
        if len(states) != self.num_envs:
            raise UsageError(
                f"This state is of {len(states)} environments, not of {self.num_envs}: "
                "resume with the number of environments that the run began with."
            )
        restarted = np.array(self._all("set_states", lambda rows: (states[rows],)), bool)
        return restarted if restarted.any() else None

    @property
    def observations(self) -> np.ndarray:
        """The latest observations of all copies."""
        return self._arrays.obs.copy()

    def exactness(self) -> str | None:
        """One sentence when episodes cannot continue after a resume, None when they can."""
        return next((sentence for sentence in self._all("exactness") if sentence is not None), None)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments and end their processes."""
        for worker in self._workers:
            worker.close()

    def _all(self, command: str, arguments: Callable[[slice], tuple] = lambda rows: ()) -> list[Any]:
        for worker in self._workers:
            worker.start(command, *arguments(worker.rows))
        return [result for worker in self._workers for result in worker.finish()]

    def _infos(self, by_copy: Sequence[dict[str, Any]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for i, info in enumerate(by_copy):
            if info:
                infos = self._add_info(infos, info, i)
        return infos


def shares(num_envs: int, workers: int) -> list[slice]:
    """The copies of each worker, as even as they can be; no more workers than copies."""
    count = min(workers, num_envs)
    bounds = [round(i * num_envs / count) for i in range(count + 1)]
    return [slice(first, end) for first, end in pairwise(bounds)]


def copies(name: str, makers: Sequence[Make], processes: int, seconds: float, *, here: bool = False) -> Copies:
    """Copies spread evenly over `processes` worker processes; with `here`, and with none, this one has the first share.

    `seconds` is `env.reset_timeout`.
    """
    here = here or processes == 0
    rows = shares(len(makers), processes + here)
    envs = [makers[0]()]
    obs = envs[0].observation_space
    assert isinstance(obs, spaces.Box)
    arrays = Arrays.of(len(makers), obs, envs[0].action_space, shared=processes > 0)
    if not here:
        envs[0].close()
    workers: list[ProcessWorker] = []
    try:
        for which in rows[here:]:
            pipes = [worker.pipe for worker in workers]
            workers.append(ProcessWorker(name, makers, which, arrays, seconds, pipes))
        if here:
            envs += [make() for make in makers[rows[0]][1:]]
        for worker in workers:
            worker.finish()
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    # The one that runs in this process is told first and asked first: meanwhile the others work.
    local = [LocalWorker(name, envs, arrays.rows(rows[0]), seconds)] if here else []
    return Copies(name, [*local, *workers], arrays, envs[0])
