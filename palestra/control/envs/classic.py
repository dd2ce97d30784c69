"""Classic control environments stepped as NumPy arrays, bit for bit equal to Gymnasium's single ones.

Gymnasium computes with NumPy scalars. Their sines and cosines have the same bits as those of arrays, their powers do
not: x**2 of a scalar is the C library's pow, and of an array x·x or a vectorized pow. `np.float_power` is C's pow for
arrays of doubles; in single precision it takes the scalars themselves.
"""

import math
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from palestra.errors import UsageError


class NumpyVector(VectorEnv):
    """The common part: step counters, time limit, one generator per environment, SAME_STEP autoreset.

    A subclass allocates the state, float64 of shape (variables, N), advances it in `_step`, samples one environment's
    first state in `_start`, and turns all of it into a fresh array of observations in `_observe`.
    """

    def __init__(
        self, state: np.ndarray, max_episode_steps: int, observation_space: spaces.Space, action_space: spaces.Space
    ):
        num_envs = self.num_envs = state.shape[1]
        self.max_episode_steps = max_episode_steps
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self._shape = (num_envs,)
        self._state = state
        # The constants are arrays: a ufunc need not convert a Python number at each step.
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._one_step = np.ones(num_envs, dtype=np.int64)
        self._limit = np.full(num_envs, max_episode_steps, dtype=np.int64)
        self._generators: list[np.random.Generator] = []

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Advance every environment one step in `self._state`; returns fresh arrays of rewards and terminations."""
        raise NotImplementedError

    def _start(self, i: int) -> None:
        """Sample the first state of environment i from its generator, as Gymnasium's reset does."""
        raise NotImplementedError

    def _observe(self) -> np.ndarray:
        """The observations of the current state in a fresh array of shape (N, …)."""
        raise NotImplementedError

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments; those that ended are reset at once and their last observation is in `final_obs`."""
        if not self._generators:
            raise UsageError(f"{type(self).__name__}.step was called before reset")
        rewards, terminated = self._step(actions)
        np.add(self._elapsed, self._one_step, self._elapsed)
        truncated = np.greater_equal(self._elapsed, self._limit)
        observations = self._observe()
        # Searching the bytes of the booleans costs a tenth of `any`.
        if b"\x01" not in terminated.tobytes() and b"\x01" not in truncated.tobytes():
            return observations, rewards, terminated, truncated, {}
        ended = terminated | truncated
        self._begin(ended.nonzero()[0])
        return self._observe(), rewards, terminated, truncated, {"final_obs": observations, "_final_obs": ended}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start episodes in all environments; environment i gets `seed + i`."""
        if options:
            raise UsageError(f"{type(self).__name__}: reset takes no options, got {options}")
        if seed is not None or not self._generators:
            seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
            self._generators = [seeding.np_random(each)[0] for each in seeds]
        self._begin(np.arange(self.num_envs))
        return self._observe(), {}

    def _begin(self, which: np.ndarray) -> None:
        """Start an episode in the environments of these indices."""
        self._elapsed[which] = 0
        for i in which.tolist():
            self._start(i)

    def get_state(self) -> dict[str, Any]:
        """All that the next steps depend on, as plain data."""
        return {
            "state": self._state.copy(),
            "elapsed": self._elapsed.copy(),
            "generators": [generator.bit_generator.state for generator in self._generators],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` gave."""
        if np.shape(state["state"]) != self._state.shape:
            raise UsageError(
                f"This state is of {np.shape(state['state'])[-1]} environments, not of {self.num_envs}: "
                "resume with the number of environments that the run began with"
            )
        self._state[:] = state["state"]
        self._elapsed[:] = state["elapsed"]
        self._generators = [seeding.np_random(0)[0] for _ in state["generators"]]
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved


def discrete_actions(env: NumpyVector, actions: np.ndarray, choices: int, meaning: str) -> np.ndarray:
    """The actions of N environments, checked to be integers below `choices`."""
    actions = np.asarray(actions)
    whole = actions.shape == (env.num_envs,) and actions.dtype.kind in "iu"
    if not whole or actions.min() < 0 or actions.max() >= choices:
        raise UsageError(
            f"The actions of {type(env).__name__} are {env.num_envs} integers from 0 to {choices - 1} ({meaning}), "
            f"got {actions!r} of type {actions.dtype}."
        )
    return actions


def continuous_actions(env: NumpyVector, actions: np.ndarray) -> np.ndarray:
    """The actions of N environments, checked: finite, float32, of the shape of their space."""
    actions, shape = np.asarray(actions), env.action_space.shape
    if actions.shape != shape or actions.dtype.kind != "f" or not np.isfinite(actions).all():
        raise UsageError(
            f"The actions of {type(env).__name__} are finite floats of shape {shape}, "
            f"got {actions!r} of type {actions.dtype}."
        )
    return actions.astype(np.float32)


class CartPoleVector(NumpyVector):
    """CartPole-v1: the arithmetic of Gymnasium's CartPoleEnv, operation by operation, over arrays of N poles.

    Rows of the state: cart position x in m, pole angle θ in rad, then their velocities ẋ and θ̇.
    """

    X_LIMIT = 2.4
    ANGLE_LIMIT = 12 * 2 * math.pi / 360

    def __init__(self, num_envs: int, max_episode_steps: int = 500):
        high = np.array([self.X_LIMIT * 2, np.inf, self.ANGLE_LIMIT * 2, np.inf], dtype=np.float32)
        # The state and the two accelerations in one array: rows 0–3 are the state, rows 2–5 its derivative.
        motion = np.full((6, num_envs), np.nan)
        observation_space = spaces.Box(-high, high, dtype=np.float32)
        super().__init__(motion[:4], max_episode_steps, observation_space, spaces.Discrete(2))
        self._rates, self._positions, self._angle, self._spin = motion[2:], motion[:2], motion[1], motion[3]
        self._cart_acceleration, self._pole_acceleration = motion[4], motion[5]
        # seen as (N, x or θ, value or velocity): the order of Gymnasium's observation
        self._by_env = self._state.reshape(2, 2, num_envs).transpose(2, 1, 0)
        # cart 1 kg, pole 0.1 kg with half its length 0.5 m, push 10 N, 20 ms a step
        self._gravity, self._half_length, self._four_thirds = np.array([[9.8], [0.5], [4.0 / 3.0]]).repeat(num_envs, 1)
        self._mass_pole, self._total_mass, self._pole_moment = np.array([[0.1], [1.1], [0.1 * 0.5]]).repeat(num_envs, 1)
        self._seconds = np.full((4, num_envs), 0.02)
        self._limits = np.array([[self.X_LIMIT], [self.ANGLE_LIMIT]]).repeat(num_envs, 1)
        self._forces, self._reward = np.array([-10.0, 10.0]), np.ones(num_envs)
        self._sin, self._cos, self._push, self._inertia, self._scratch = np.empty((5, num_envs))
        self._change = np.empty((4, num_envs))
        self._distance = np.empty((2, num_envs))
        self._beyond = np.empty((2, num_envs), dtype=bool)

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = np.asarray(actions)
        # All of them are 0 or 1 exactly when their bitwise or is: cheaper than the minimum and the maximum.
        whole = actions.shape == self._shape and actions.dtype.kind in "iu"
        if not whole or np.bitwise_or.reduce(actions) not in (0, 1):
            discrete_actions(self, actions, 2, "push left or right")
        sin, cos, push, inertia, scratch = self._sin, self._cos, self._push, self._inertia, self._scratch
        multiply, divide, subtract, total_mass = np.multiply, np.divide, np.subtract, self._total_mass
        np.sin(self._angle, sin)
        np.cos(self._angle, cos)
        # push = (force + moment · θ̇² · sin θ) / total mass; products and quotients left to right, as Gymnasium rounds
        np.square(self._spin, push)
        multiply(self._pole_moment, push, push)
        multiply(push, sin, push)
        self._forces.take(actions, None, scratch, "clip")  # "clip" only because it needs no buffer
        np.add(scratch, push, push)
        divide(push, total_mass, push)
        # θ̈ = (g sin θ − cos θ · push) / (half length · (4/3 − pole mass · cos² θ / total mass))
        np.square(cos, inertia)
        multiply(self._mass_pole, inertia, inertia)
        divide(inertia, total_mass, inertia)
        subtract(self._four_thirds, inertia, inertia)
        multiply(self._half_length, inertia, inertia)
        multiply(self._gravity, sin, sin)
        multiply(cos, push, scratch)
        subtract(sin, scratch, scratch)
        divide(scratch, inertia, self._pole_acceleration)
        # ẍ = push − moment · θ̈ · cos θ / total mass
        multiply(self._pole_moment, self._pole_acceleration, scratch)
        multiply(scratch, cos, scratch)
        divide(scratch, total_mass, scratch)
        subtract(push, scratch, self._cart_acceleration)
        # explicit Euler: positions move with the old velocities
        multiply(self._seconds, self._rates, self._change)
        np.add(self._state, self._change, self._state)
        np.abs(self._positions, self._distance)
        np.greater(self._distance, self._limits, self._beyond)
        return self._reward.copy(), np.logical_or(self._beyond[0], self._beyond[1])

    def _start(self, i: int) -> None:
        self._by_env[i] = self._generators[i].uniform(-0.05, 0.05, (2, 2))

    def _observe(self) -> np.ndarray:
        return self._by_env.astype(np.float32, "C").reshape(self.num_envs, 4)


LEFT, RIGHT, FASTEST = -1.2, 0.6, 0.07


class Car(NumpyVector):
    """What both mountain cars share. Rows of the state: position and velocity."""

    def __init__(self, num_envs: int, max_episode_steps: int, actions: spaces.Space):
        low, high = np.array([LEFT, -FASTEST], np.float32), np.array([RIGHT, FASTEST], np.float32)
        box = spaces.Box(low, high, dtype=np.float32)
        super().__init__(np.full((2, num_envs), np.nan), max_episode_steps, box, actions)

    def _start(self, i: int) -> None:
        self._state[:, i] = self._generators[i].uniform(-0.6, -0.4), 0.0

    def _observe(self) -> np.ndarray:
        return self._state.T.astype(np.float32, "C")


class MountainCarVector(Car):
    """MountainCar-v0: push left, not at all or right; -1 per step until the goal at 0.5."""

    def __init__(self, num_envs: int, max_episode_steps: int = 200):
        super().__init__(num_envs, max_episode_steps, spaces.Discrete(3))
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


class MountainCarContinuousVector(Car):
    """MountainCarContinuous-v0: push with -1 to 1; effort has a cost, the goal at 0.45 a reward of 100.

    Gymnasium keeps the first state of an episode in double precision and all later ones in single, and computes in the
    precision of the state.
    """

    def __init__(self, num_envs: int, max_episode_steps: int = 999):
        super().__init__(num_envs, max_episode_steps, spaces.Box(-1.0, 1.0, (1,), np.float32))

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pushes = continuous_actions(self, actions)[:, 0]
        position, velocity, reached = _moved(self._state.astype(np.float32), pushes)
        begun = self._elapsed == 0
        if begun.any():
            position[begun], velocity[begun], reached[begun] = _moved(self._state[:, begun], pushes[begun])
        self._state[0], self._state[1] = position, velocity
        effort = [math.pow(push, 2) * 0.1 for push in pushes.tolist()]
        return np.where(reached, 100.0, 0.0) - effort, reached


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
    # Of the C library, as Gymnasium's: NumPy's may differ in the last bit.
    return np.fromiter(map(math.cos, (3 * position).tolist()), np.float64, len(position))


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

    def _start(self, i: int) -> None:
        self._state[:, i] = self._generators[i].uniform(-0.1, 0.1, 4).astype(np.float32)

    def _observe(self) -> np.ndarray:
        observations = self._shown(self._state)
        begun = self._elapsed == 0
        if begun.any():
            # A first state is in single precision, and Gymnasium takes its sines in it.
            observations[begun] = self._shown(self._state[:, begun].astype(np.float32))
        return observations

    @staticmethod
    def _shown(state: np.ndarray) -> np.ndarray:
        (sin1, sin2), (cos1, cos2) = np.sin(state[:2]), np.cos(state[:2])
        return np.stack((cos1, sin1, cos2, sin2, *state[2:]), axis=1).astype(np.float32)


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
        torque = continuous_actions(self, actions)[:, 0].clip(-2.0, 2.0)
        angle, velocity = self._state
        upright = (angle + math.pi) % (2 * math.pi) - math.pi
        from_upright, speed = np.float_power((upright, velocity), self._two)
        effort = np.array([0.001 * u**2 for u in torque])  # in single precision: see above
        costs = from_upright + 0.1 * speed + effort
        moved = velocity + (3 * 10.0 / (2 * 1.0) * np.sin(angle) + 3.0 * torque) * 0.05
        np.clip(moved, -8, 8, self._state[1])
        np.add(angle, self._state[1] * 0.05, self._state[0])
        return -costs, self._never.copy()

    def _start(self, i: int) -> None:
        self._state[:, i] = self._generators[i].uniform(-self._highest, self._highest)

    def _observe(self) -> np.ndarray:
        angle, velocity = self._state
        return np.stack((np.cos(angle), np.sin(angle), velocity), axis=1).astype(np.float32)
