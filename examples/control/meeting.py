"""A small parallel environment in PettingZoo's form, for ppo_meeting.yaml; it needs no other package."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Meeting:
    """Agents on a square who are paid for coming together: a small parallel environment, in PettingZoo's form.

    An agent sees where it is and where the others are from it. It stays or goes a tenth in one of four directions. All
    get minus the mean distance between two of them.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    MOVES = np.array([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]) / 10

    def __init__(self, agents: int = 3, steps: int = 25, render_mode: str | None = None):
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.agents, self.steps, self.t, self.render_mode = self.possible_agents, steps, 0, render_mode
        self.places, self.random = np.zeros((agents, 2)), np.random.default_rng()

    def observation_space(self, agent: str) -> gym.Space:
        """Own place, and where each other agent is from there."""
        return spaces.Box(-2, 2, (2 * len(self.possible_agents),), np.float32)

    def action_space(self, agent: str) -> gym.Space:
        """Stay, or one of four directions."""
        return spaces.Discrete(5)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, dict]]:
        """All agents at random places."""
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.t, self.places = 0, self.random.uniform(-1, 1, self.places.shape)
        return self._seen(), {agent: {} for agent in self.possible_agents}

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        """All move at once."""
        moves = self.MOVES[[int(actions[agent]) for agent in self.possible_agents]]
        self.t, self.places = self.t + 1, np.clip(self.places + moves, -1, 1)
        apart = np.linalg.norm(self.places[:, None] - self.places[None], axis=-1)
        count = len(self.possible_agents)
        reward = -float(apart.sum() / max(1, count * (count - 1)))
        agents, over = self.possible_agents, self.t >= self.steps
        rewards, terminated, truncated = (dict.fromkeys(agents, value) for value in (reward, False, over))
        return self._seen(), rewards, terminated, truncated, {agent: {} for agent in agents}

    def render(self) -> np.ndarray:
        """The square from above, a dot for each agent."""
        picture = np.full((128, 128, 3), 255, np.uint8)
        for i, (x, y) in enumerate(((self.places + 1.1) / 2.2 * 128).astype(int)):
            picture[y - 4 : y + 4, x - 4 : x + 4] = ((220, 60, 60), (60, 140, 60), (60, 60, 220))[i % 3]
        return picture

    def close(self) -> None: ...

    def _seen(self) -> dict[str, np.ndarray]:
        seen = {}
        for i, agent in enumerate(self.possible_agents):
            others = np.delete(self.places, i, axis=0) - self.places[i]
            seen[agent] = np.concatenate([self.places[i], others.ravel()]).astype(np.float32)
        return seen
