"""Parts of the reward and other numbers of `info`, summed over episodes; vector rewards weighted into one."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from palestra.errors import UsageError

KEY = "components"  # of the info of an episode's last step
REWARD = "reward"  # names the parts of a vector reward


class Components(gym.Wrapper):
    """Sums entries of `info` over an episode, arrays by entry; with `weights` the reward is their product with it."""

    def __init__(self, env: gym.Env, names: Sequence[str], weights: Sequence[float] | None):
        super().__init__(env)
        self.names, self.weights, self.totals = tuple(names), weights, {}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: all sums are zero."""
        self.totals = {}
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the info of the last step has the sums."""
        obs, given, terminated, truncated, info = self.env.step(action)
        reward: Any = given
        if self.weights is not None:
            if np.shape(reward) != (len(self.weights),):
                count = f"{len(self.weights)} weights, and the reward is of shape {np.shape(reward)}"
                raise UsageError(f"env.reward_weights: {count}")
            info = {**info, REWARD: reward}
            reward = float(np.dot(reward, self.weights))
        for name in self.names:
            if name in info:
                values = np.atleast_1d(np.asarray(info[name], float)).ravel()
                keys = [name] if len(values) == 1 else [f"{name}/{i}" for i in range(len(values))]
                for key, value in zip(keys, values.tolist(), strict=True):
                    self.totals[key] = self.totals.get(key, 0.0) + value
        if terminated or truncated:
            absent = [n for n in self.names if not any(key.partition("/")[0] == n or key == n for key in self.totals)]
            if absent:
                known = ", ".join(sorted(info)) or "nothing"
                raise UsageError(f"env.components: a whole episode gave no info[{absent[0]!r}]; its last step: {known}")
            info = {**info, KEY: dict(self.totals)}
        return obs, reward, terminated, truncated, info
