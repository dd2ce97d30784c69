"""Environments stepped by EnvPool, in C++ threads, by its own ids, many of which are Gymnasium's.

EnvPool resets an ended episode in the step after its end, which ignores the action: Gymnasium's NEXT_STEP. Its
environments are other programs than Gymnasium's: the same rules, other random numbers. Their states cannot be saved.
"""

import importlib
import warnings
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from palestra.control.envs.snapshot import restarts
from palestra.control.seeding import stream
from palestra.errors import UsageError

OURS = {
    "env_type": "Palestra reads Gymnasium's form",
    "num_envs": "set env.num_envs",
    "batch_size": "all copies step together",
    "seed": "seeds come from the run's",
    "episodic_life": "it starts a new game at each lost life, so that no game is ever played to its end",
    "reward_clip": "set env.clip_reward, which leaves the score as it is",
}
"""Keywords of EnvPool that a spec cannot set, and why."""


class Pool(VectorEnv):
    """N environments of EnvPool. Its seed is fixed when a pool is made, so a reset with a seed makes a new one."""

    def __init__(self, id: str, num_envs: int, threads: int, kwargs: dict[str, Any]):
        for name in OURS.keys() & kwargs.keys():
            raise UsageError(f"env.kwargs: {name} cannot be set for EnvPool: {OURS[name]}")
        self._library = importlib.import_module("envpool")
        if id not in self._library.list_all_envs():
            hint = f" It has {id[4:]}, preprocessed by itself." if id.startswith("ALE/") else ""
            raise UsageError(f"env.id: EnvPool has no environment {id!r}.{hint} envpool.list_all_envs() has all ids")
        self.name, self.num_envs, self._steps = id, num_envs, 0
        self._made = {"num_threads": min(threads, num_envs), **kwargs, "env_type": "gymnasium", "num_envs": num_envs}
        self._make(0)
        obs, actions = self._spaces
        if (mode := self._pool.metadata["autoreset_mode"]) is not AutoresetMode.NEXT_STEP:
            raise UsageError(f"EnvPool {self._library.__version__} resets by {mode}: NEXT_STEP was expected")
        self.metadata = {"render_modes": [], "autoreset_mode": mode}
        if not isinstance(obs, spaces.Box):
            raise UsageError(f"env.id: {id} of EnvPool observes {obs}: expected a Box")
        self.single_observation_space, self.single_action_space = obs, actions
        self.observation_space, self.action_space = batch_space(obs, num_envs), batch_space(actions, num_envs)

    def _make(self, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the precision of bounds, when its spaces are first read
            self._seed, self._pool = seed, self._library.make(self.name, seed=seed, **self._made)
            self._spaces = self._pool.observation_space, self._pool.action_space  # of one environment

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode in each; copy i gets `seed + i`."""
        if options is not None:
            raise UsageError(f"{self.name}: reset takes no options, got {options}")
        if seed is not None:
            self._pool.close()
            self._make(seed)
        return self._pool.reset()[0], {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all; those that ended in the last step are reset instead."""
        if np.shape(actions) != self.action_space.shape:  # EnvPool would read past their end
            raise UsageError(f"{self.name} takes actions of shape {self.action_space.shape}, got {np.shape(actions)}")
        self._steps += 1
        actions = np.ascontiguousarray(actions, self.action_space.dtype)
        obs, rewards, terminated, truncated, _ = self._pool.step(actions)
        return obs, rewards.astype(np.float64), terminated, truncated, {}

    def get_state(self) -> dict[str, int]:
        """What the episodes after a resume depend on; the running ones cannot be saved."""
        return {"seed": self._seed, "steps": self._steps}

    def set_state(self, state: dict[str, int]) -> np.ndarray:
        """Begin an episode in each, by a seed that follows from the state: not the ones that the run began with."""
        self._steps = state["steps"]
        self.observations, _ = self.reset(seed=stream(state["seed"], "resumed", self._steps))
        return np.ones(self.num_envs, bool)

    def exactness(self) -> str:
        """One sentence: episodes cannot continue after a resume."""
        return restarts(f"{self.name} of EnvPool")

    def close_extras(self, **kwargs: Any) -> None:
        """End its threads."""
        self._pool.close()
