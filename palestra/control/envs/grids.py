"""MiniGrid's environments with observations that a network takes: what the agent sees, each cell one-hot.

env: {id: "palestra.control.envs.grids:Grid", kwargs: {id: MiniGrid-Empty-5x5-v0}}
"""

from typing import Any

import gymnasium as gym
import numpy as np

from palestra.errors import UsageError, needs_extra

KINDS = (11, 6, 4)  # of objects, colors and states that the numbers of a cell stand for


class Grid(gym.ObservationWrapper):
    """An environment of MiniGrid by its id; the text of its mission, which is the same in all of these, is left out."""

    metadata = {"render_modes": ["rgb_array", "human"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, id: str, render_mode: str | None = None, **kwargs: Any):
        with needs_extra(f"the environment {id}", "minigrid"):
            import minigrid  # noqa: F401  registers them
        super().__init__(gym.make(id, render_mode=render_mode, **kwargs))
        image = self.env.observation_space["image"] if isinstance(self.env.observation_space, gym.spaces.Dict) else None
        if image is None or image.shape is None:
            raise UsageError(f"env.kwargs.id: {id} is not an environment of MiniGrid: it observes no image")
        self.observation_space = gym.spaces.Box(0, 1, (int(np.prod(image.shape[:2])) * sum(KINDS),), np.float32)

    def observation(self, observation: dict[str, Any]) -> np.ndarray:
        """The cells' objects, colors and states, one-hot side by side."""
        cells = observation["image"]
        return np.concatenate(
            [np.eye(count, dtype=np.float32)[cells[..., i]] for i, count in enumerate(KINDS)], -1
        ).ravel()
