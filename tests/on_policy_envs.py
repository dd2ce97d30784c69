"""Environments for memory, masks, credit and pictures, whose right answers are known."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Cue(gym.Env):
    """Shows 1 or -1 once, then nothing for `wait` steps; the last action is right if it is the one that was shown.

    Who acts on what is seen alone gets 0 on average, who remembers 1.
    """

    palestra_state = ("shown", "at")

    def __init__(self, wait: int = 3):
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.wait, self.shown, self.at = wait, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.shown, self.at = int(self.np_random.integers(2)), 0
        return np.array([2 * self.shown - 1, 0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.at += 1
        over = self.at > self.wait
        reward = (1.0 if int(action) == self.shown else -1.0) if over else 0.0
        return np.array([0, self.at == self.wait], np.float32), reward, over, False, {}


class Forbidding(gym.Env):
    """Pays for the highest allowed choice of each part of an action and raises at a forbidden one; shows the mask.

    `form` is how the mask is given: "flat", "tuple" (one array a part), or "sometimes" (every other step none).
    """

    palestra_state = ("allowed", "at")

    def __init__(self, sizes: tuple[int, ...] = (4,), form: str = "flat", length: int = 5):
        self.sizes, self.form, self.length = list(sizes), form, length
        self.observation_space = spaces.Box(0, 1, (sum(sizes),), np.float32)
        self.action_space = spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(self.sizes)
        self.allowed, self.at = np.ones(sum(sizes), bool), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.at = 0
        return self._show()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        parts = np.split(self.allowed, np.cumsum(self.sizes)[:-1])
        chosen = np.atleast_1d(action)
        for part, choice in zip(parts, chosen, strict=True):
            assert part[choice], "a forbidden action"
        reward = np.mean([choice == np.flatnonzero(part)[-1] for part, choice in zip(parts, chosen, strict=True)])
        self.at += 1
        over = self.at == self.length
        obs, info = self._show()
        if over:
            info["action_mask"] = self._formed(np.zeros_like(self.allowed))  # the game is over: nothing can be done
        return obs, float(reward), over, False, info

    def _show(self) -> tuple[np.ndarray, dict]:
        draw = [self.np_random.random(size) < 0.4 for size in self.sizes]
        for part, size in zip(draw, self.sizes, strict=True):
            part[self.np_random.integers(size)] = True
        self.allowed = np.concatenate(draw)
        if self.form == "sometimes" and self.at % 2 == 1:
            self.allowed = np.ones_like(self.allowed)
            return self.allowed.astype(np.float32), {}
        return self.allowed.astype(np.float32), {"action_mask": self._formed(self.allowed)}

    def _formed(self, mask: np.ndarray) -> Any:
        return tuple(np.split(mask, np.cumsum(self.sizes)[:-1])) if self.form == "tuple" else mask.astype(np.int8)


class TwoStep(gym.Env):
    """Two choices; the second pays 1 where it equals the first, less 0.5 for a first choice of 0."""

    palestra_state = ("first",)

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.first: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.first = None
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.first is None:
            self.first = int(action)
            return np.array([2.0 * self.first - 1], np.float32), 0.0, False, False, {}
        reward = float(int(action) == self.first) - 0.5 * (self.first == 0)
        return np.zeros(1, np.float32), reward, True, False, {}


class Target(gym.Env):
    """One step: pays 0 for half of what is shown, in the units of a Box of ±2, and less around it."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.shown = float(self.np_random.uniform(-1, 1))
        return np.array([self.shown], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(np.asarray(action, np.float32))
        return np.zeros(1, np.float32), -float((action[0] - self.shown / 2) ** 2), True, False, {}
