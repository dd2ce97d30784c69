"""Environments for the tests, registered on import: one that fails on demand, and identity ones for every space."""

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

LENGTH = 20  # steps of an episode


class Faulty(gym.Env):
    """Wants the action it shows; after `at` steps it misbehaves once, as long as the file `while_there` exists.

    `fault` is what happens then: raise, nan_reward, nan_obs, or nan_final (in the last observation of an episode).
    """

    palestra_state = ("wanted", "steps", "in_episode")

    def __init__(self, at: int = 0, fault: str = "raise", while_there: str = "/", delay: float = 0.0):
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.at, self.fault, self.while_there, self.delay = at, fault, Path(while_there), delay
        self.wanted = self.steps = self.in_episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.in_episode = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        time.sleep(self.delay)
        self.steps += 1
        self.in_episode += 1
        reward = float(action == self.wanted)
        obs, over = self._show(), self.in_episode == LENGTH
        fault = self.fault if self.steps == self.at and self.while_there.exists() else None
        if fault == "raise":
            raise ValueError("the door is stuck")
        if fault == "nan_reward":
            reward = float("nan")
        if fault in ("nan_obs", "nan_final"):
            obs[0] = np.nan
        return obs, reward, False, over, {}

    def _show(self) -> np.ndarray:
        self.wanted = int(self.np_random.integers(2))
        return np.array([self.wanted, 1 - self.wanted], np.float32)


class Identity(gym.Env):
    """Shows what it wants done; the reward of a step is the share of it that was done, the best return is LENGTH."""

    SPACES = ("discrete", "discrete_from_1", "multi_discrete", "multi_binary", "box", "discrete_obs", "dict_obs")

    def __init__(self, kind: str = "discrete"):
        self.kind = kind
        self.sizes = [2, 3] if kind == "multi_discrete" else [3]
        self.observation_space = {
            "discrete_obs": spaces.Discrete(3),
            "dict_obs": spaces.Dict({"wanted": spaces.Discrete(3), "noise": spaces.Box(-1, 1, (2,), np.float32)}),
        }.get(kind, spaces.Box(-1, 1, (sum(self.sizes),), np.float32))
        self.action_space = {
            "discrete_from_1": spaces.Discrete(3, start=1),
            "multi_discrete": spaces.MultiDiscrete(self.sizes),
            "multi_binary": spaces.MultiBinary(3),
            "box": spaces.Box(-1, 1, (3,), np.float32),
        }.get(kind, spaces.Discrete(3))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.in_episode = 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        if self.kind == "box":
            done = 1 - float(np.abs(action - self.wanted).mean())
        else:
            done = float(np.mean(np.asarray(action) == self.wanted))
        self.in_episode += 1
        return self._show(), done, False, self.in_episode == LENGTH, {}

    def _show(self) -> Any:
        random = self.np_random
        match self.kind:
            case "box":
                self.wanted = random.uniform(-0.8, 0.8, 3).astype(np.float32)
                return self.wanted.copy()
            case "multi_binary":
                self.wanted = random.integers(2, size=3)
                return self.wanted.astype(np.float32)
        drawn = [int(random.integers(size)) for size in self.sizes]
        start = 1 if self.kind == "discrete_from_1" else 0
        self.wanted = np.array(drawn) if self.kind == "multi_discrete" else drawn[0] + start
        if self.kind == "discrete_obs":
            return drawn[0]
        if self.kind == "dict_obs":
            return {"wanted": drawn[0], "noise": random.uniform(-1, 1, 2).astype(np.float32)}
        return np.concatenate(
            [np.eye(size, dtype=np.float32)[one] for one, size in zip(drawn, self.sizes, strict=True)]
        )


gym.register("Faulty-v0", Faulty)
gym.register("Identity-v0", Identity)
