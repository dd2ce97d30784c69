"""Environments that hang, die or count, for the tests of copies; `module:Class` in a spec."""

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Hanging(gym.Env):
    """Hangs in the call number `at` of the kind `when`, in the copy whose seed is `seed`; else it counts its steps."""

    palestra_state = ("steps", "calls", "mine")

    def __init__(self, when: str = "reset", at: int = 1, seed: int = -1, how: str = "sleep", length: int = 5):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.when, self.at, self.seed, self.how, self.length = when, at, seed, how, length
        self.calls, self.steps, self.mine = 0, 0, seed == -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.mine = self.mine or seed == self.seed
        self.steps = 0
        self._maybe("reset")
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        self._maybe("step")
        return self._obs(), float(action), False, self.steps == self.length, {}

    def _obs(self) -> np.ndarray:
        return np.array([self.steps, self.np_random.random()], np.float32)

    def _maybe(self, call: str) -> None:
        if call != self.when or not self.mine:
            return
        self.calls += 1
        if self.calls != self.at:
            return
        if self.how == "sleep":
            time.sleep(1000)
        elif self.how == "die":
            os._exit(3)
        elif self.how == "raise":
            raise ValueError("the door is stuck")
        while self.how == "loop":
            pass


class Lives(gym.Env):
    """A game of three lives of four steps: with `episodic` each lost life ends an episode and the game goes on."""

    palestra_state = ("steps",)

    def __init__(self, episodic: bool = True):
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.episodic, self.steps = episodic, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self.steps == 12:
            self.steps = 0
        return np.array([self.steps], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        over = self.steps == 12
        lost = over or (self.episodic and self.steps % 4 == 0)
        return np.array([self.steps], np.float32), -2.0, lost, False, {"game_over": over, "lives": 0}


class Masked(gym.Env):
    """Allows one action a step, another each time."""

    palestra_state = ("steps",)

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._obs()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert action == self.steps % 3
        self.steps += 1
        obs, info = self._obs()
        return obs, 1.0, self.steps == 7, False, info

    def _obs(self) -> tuple[np.ndarray, dict]:
        mask = np.zeros(3, np.int8)
        mask[self.steps % 3] = 1
        return np.array([self.steps], np.float32), {"action_mask": mask}


class Wrapped(gym.Wrapper):
    """A user's class that wraps an environment: its `metadata` is a property, until one is made."""

    def __init__(self, length: int = 5):
        super().__init__(Hanging(at=-1, length=length))
