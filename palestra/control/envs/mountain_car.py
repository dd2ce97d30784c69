"""MountainCar-v0 and MountainCarContinuous-v0 stepped as NumPy arrays, number for number equal to Gymnasium's.

Both take the cosine of the slope from the C library, so we do too: the one of NumPy may differ in the last bit.
Rows of the state: position and velocity.
"""

import math

import numpy as np
from gymnasium import spaces

from palestra.control.envs.classic import NumpyVector, continuous_actions, discrete_actions

LEFT, RIGHT, FASTEST = -1.2, 0.6, 0.07


class MountainCarVector(NumpyVector):
    """MountainCar-v0: push left, not at all or right; -1 a step until the goal at 0.5."""

    def __init__(self, num_envs: int, max_episode_steps: int = 200):
        super().__init__(np.full((2, num_envs), np.nan), max_episode_steps, _space(), spaces.Discrete(3))
        self._rewards = np.full(num_envs, -1.0)

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = discrete_actions(self, actions, 3, "push left, none or right")
        position, velocity = self._state
        velocity += (actions.astype(np.int64) - 1) * 0.001 + _cosines(position) * -0.0025
        np.clip(velocity, -FASTEST, FASTEST, velocity)
        position += velocity
        np.clip(position, LEFT, RIGHT, position)
        velocity[(position == LEFT) & (velocity < 0)] = 0.0
        return self._rewards.copy(), (position >= 0.5) & (velocity >= 0)

    def _draw(self, i: int) -> None:
        self._state[:, i] = self._generators[i].uniform(-0.6, -0.4), 0.0

    def _observe(self) -> np.ndarray:
        return self._state.T.astype(np.float32, "C")


class MountainCarContinuousVector(NumpyVector):
    """MountainCarContinuous-v0: push with -1 to 1; the effort costs, the goal at 0.45 brings 100.

    Gymnasium keeps the first state of an episode in double precision and all later ones in single, and computes in the
    precision of the state.
    """

    def __init__(self, num_envs: int, max_episode_steps: int = 999):
        push = spaces.Box(-1.0, 1.0, (1,), np.float32)
        super().__init__(np.full((2, num_envs), np.nan), max_episode_steps, _space(), push)

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pushes = continuous_actions(self, actions)
        position, velocity, reached = _moved(self._state.astype(np.float32), pushes)
        begun = self._elapsed == 0
        if begun.any():
            position[begun], velocity[begun], reached[begun] = _moved(self._state[:, begun], pushes[begun])
        self._state[0], self._state[1] = position, velocity
        effort = [math.pow(push, 2) * 0.1 for push in pushes.tolist()]
        return np.where(reached, 100.0, 0.0) - effort, reached

    def _draw(self, i: int) -> None:
        self._state[:, i] = self._generators[i].uniform(-0.6, -0.4), 0.0

    def _observe(self) -> np.ndarray:
        return self._state.T.astype(np.float32, "C")


def _moved(state: np.ndarray, pushes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, velocities and whether the goal is reached, in the precision of the state."""
    position, velocity = state
    slope = 0.0025 * _cosines(position)
    # A push within bounds is a number in single precision, one beyond is replaced by a bound in double.
    within = pushes * np.float32(0.0015) - slope.astype(np.float32)
    beyond = np.where(pushes > 0, 0.0015, -0.0015) - slope
    change = np.where(np.abs(pushes) <= 1, within.astype(np.float64), beyond)
    velocity = (velocity + change.astype(state.dtype)).clip(-FASTEST, FASTEST)
    position = (position + velocity).clip(LEFT, RIGHT)
    # Comparisons with Python numbers are in the array's own precision, as Gymnasium's are.
    velocity[(position == LEFT) & (velocity < 0)] = 0.0
    return position, velocity, (position >= 0.45) & (velocity >= 0)


def _cosines(position: np.ndarray) -> np.ndarray:
    return np.fromiter(map(math.cos, (3 * position).tolist()), np.float64, len(position))


def _space() -> spaces.Box:
    return spaces.Box(np.array([LEFT, -FASTEST], np.float32), np.array([RIGHT, FASTEST], np.float32), dtype=np.float32)
