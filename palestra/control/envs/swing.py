"""Acrobot-v1 and Pendulum-v1 stepped as NumPy arrays, number for number equal to Gymnasium's single ones.

Gymnasium computes with NumPy scalars. Their sines and cosines have the same bits as those of arrays, their powers have
not: x**2 of a scalar is the C library's pow, and of an array x·x or a vectorised pow. `np.float_power` is C's pow for
arrays of doubles; for single precision only the scalars themselves will do.
"""

import math

import numpy as np
from gymnasium import spaces

from palestra.control.envs.classic import NumpyVector, continuous_actions, discrete_actions


class AcrobotVector(NumpyVector):
    """Acrobot-v1: the arithmetic of Gymnasium's AcrobotEnv, operation by operation, over arrays of N double pendulums.

    Rows of the state: the angles of both links in rad, then their velocities.
    """

    MAX_VELOCITIES = (4 * math.pi, 9 * math.pi)

    def __init__(self, num_envs: int, max_episode_steps: int = 500):
        high = np.array([1.0, 1.0, 1.0, 1.0, *self.MAX_VELOCITIES], dtype=np.float32)
        box = spaces.Box(-high, high, dtype=np.float32)
        super().__init__(np.full((4, num_envs), np.nan), max_episode_steps, box, spaces.Discrete(3))
        self._torques = np.array([-1.0, 0.0, 1.0])
        self._fastest = np.array(self.MAX_VELOCITIES)[:, None]
        self._two = np.full((2, num_envs), 2.0)

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        torque = self._torques[discrete_actions(self, actions, 3, "torque -1, 0 or 1")]
        start, dt = self._state, 0.2  # seconds a step; Runge-Kutta of order 4
        k1 = self._derivative(start, torque)
        k2 = self._derivative(start + dt / 2.0 * k1, torque)
        k3 = self._derivative(start + dt / 2.0 * k2, torque)
        k4 = self._derivative(start + dt * k3, torque)
        moved = start + dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = moved[:2]
        while (beyond := angles > math.pi).any():  # one turn at a time, as Gymnasium rounds
            np.subtract(angles, 2 * math.pi, angles, where=beyond)
        while (beyond := angles < -math.pi).any():
            np.add(angles, 2 * math.pi, angles, where=beyond)
        np.clip(moved[2:], -self._fastest, self._fastest, moved[2:])
        self._state[:] = moved
        terminated = -np.cos(moved[0]) - np.cos(moved[1] + moved[0]) > 1.0
        return np.where(terminated, 0.0, -1.0), terminated

    def _derivative(self, state: np.ndarray, torque: np.ndarray) -> np.ndarray:
        """The equations of motion of Sutton and Barto's book; links of 1 m and 1 kg, so that many factors are 1."""
        theta1, theta2, omega1, omega2 = state
        sin2, cos2 = np.sin(theta2), np.cos(theta2)
        square1, square2 = np.float_power(state[2:], self._two)
        d1 = 0.25 + (1.25 + cos2) + 1.0 + 1.0
        d2 = (0.25 + 0.5 * cos2) + 1.0
        phi2 = 0.5 * 9.8 * np.cos(theta1 + theta2 - math.pi / 2.0)
        phi1 = -0.5 * square2 * sin2 - omega2 * omega1 * sin2 + (0.5 + 1.0) * 9.8 * np.cos(theta1 - math.pi / 2) + phi2
        acceleration2 = (torque + d2 / d1 * phi1 - 0.5 * square1 * sin2 - phi2) / (
            1.25 - np.float_power(d2, self._two[0]) / d1
        )
        acceleration1 = -(d2 * acceleration2 + phi1) / d1
        return np.stack((omega1, omega2, acceleration1, acceleration2))

    def _draw(self, i: int) -> None:
        self._state[:, i] = self._generators[i].uniform(-0.1, 0.1, 4).astype(np.float32)

    def _observe(self) -> np.ndarray:
        observations = np.empty((self.num_envs, 6), np.float32)
        self._show(self._state, observations)
        begun = self._elapsed == 0
        if begun.any():
            # A first state is in single precision, and Gymnasium takes its sines in it.
            first = observations[begun]
            self._show(self._state[:, begun].astype(np.float32), first)
            observations[begun] = first
        return observations

    @staticmethod
    def _show(state: np.ndarray, observations: np.ndarray) -> None:
        sines, cosines = np.sin(state[:2]), np.cos(state[:2])
        observations[:, 0:4:2], observations[:, 1:4:2], observations[:, 4:] = cosines.T, sines.T, state[2:].T


class PendulumVector(NumpyVector):
    """Pendulum-v1: the arithmetic of Gymnasium's PendulumEnv, operation by operation, over arrays of N pendulums.

    Rows of the state: the angle in rad and its velocity.
    """

    def __init__(self, num_envs: int, max_episode_steps: int = 200):
        high = np.array([1.0, 1.0, 8.0], dtype=np.float32)
        box, torque = spaces.Box(-high, high, dtype=np.float32), spaces.Box(-2.0, 2.0, (1,), np.float32)
        super().__init__(np.full((2, num_envs), np.nan), max_episode_steps, box, torque)
        self._two = np.full((2, num_envs), 2.0)
        self._highest = np.array([math.pi, 1.0])
        self._never = np.zeros(num_envs, dtype=bool)

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        torque = continuous_actions(self, actions).clip(-2.0, 2.0)
        angle, velocity = self._state
        upright = (angle + math.pi) % (2 * math.pi) - math.pi
        from_upright, speed = np.float_power((upright, velocity), self._two)
        effort = np.array([0.001 * u**2 for u in torque])  # in single precision: see above
        costs = from_upright + 0.1 * speed + effort
        moved = velocity + (3 * 10.0 / (2 * 1.0) * np.sin(angle) + 3.0 * torque) * 0.05
        np.clip(moved, -8, 8, self._state[1])
        np.add(angle, self._state[1] * 0.05, self._state[0])
        return -costs, self._never.copy()

    def _draw(self, i: int) -> None:
        self._state[:, i] = self._generators[i].uniform(-self._highest, self._highest)

    def _observe(self) -> np.ndarray:
        observations = np.empty((self.num_envs, 3), np.float32)
        observations[:, 0], observations[:, 1] = np.cos(self._state[0]), np.sin(self._state[0])
        observations[:, 2] = self._state[1]
        return observations
