"""A task that only a memory solves: the T-maze."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from palestra.errors import UsageError


class TMaze(gym.Env):
    """A corridor whose start shows which way to turn at its end (Bakker 2001).

    The observation is (the sign, shown at the start alone; whether this is the junction). Actions are forward, left and
    right; left and right do nothing in the corridor. The right turn pays 1, the wrong one −1, and both end the episode;
    so does a time limit of three times the way. Who forgets the sign gets 0 on average, whatever they do.
    """

    palestra_state = ("sign", "place", "at")

    def __init__(self, length: int = 5):
        if length < 1:
            raise UsageError(f"env.kwargs.length: expected at least 1, got {length}")
        self.length, self.sign, self.place, self.at = length, 1, 0, 0
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Another sign."""
        super().reset(seed=seed)
        self.sign, self.place, self.at = int(self.np_random.integers(2)) * 2 - 1, 0, 0
        return self._show(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Forward, left or right."""
        self.at += 1
        turned = self.place == self.length and action != 0
        reward = 0.0 if not turned else 1.0 if action == (1 if self.sign < 0 else 2) else -1.0
        if action == 0:
            self.place = min(self.place + 1, self.length)
        return self._show(), reward, bool(turned), not turned and self.at >= 3 * (self.length + 1), {}

    def _show(self) -> np.ndarray:
        return np.array([self.sign if self.place == 0 else 0, self.place == self.length], np.float32)
