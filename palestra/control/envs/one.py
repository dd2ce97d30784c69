"""One environment of those that only step as vectors, as Gymnasium's single environments are: to watch, to evaluate."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv


class OneOf(gym.Env):
    """A vector of one environment, of any autoreset mode; it draws no pictures."""

    def __init__(self, vector: VectorEnv):
        self.metadata = {"render_modes": []}
        self.vector = vector
        self.observation_space, self.action_space = vector.single_observation_space, vector.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        obs, _ = self.vector.reset(seed=seed)
        return obs[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, rewards, terminated, truncated, infos = self.vector.step(np.asarray(action)[None])
        over = bool(terminated[0] or truncated[0])
        # In the other autoreset modes the observation is the final one itself.
        last = infos["final_obs"][0] if over and "final_obs" in infos else obs[0]
        return last, float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def close(self) -> None:
        self.vector.close()
