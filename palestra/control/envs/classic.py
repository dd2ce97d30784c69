"""Classic control environments stepped as NumPy arrays, number for number equal to Gymnasium's single ones."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from palestra.errors import UsageError


class NumpyVector(VectorEnv):
    """The frame of a vectorised environment: step counters, time limit, a generator each, SAME_STEP autoreset.

    A subclass allocates the state, float64 of shape (variables, N), advances it in `_step`, draws one environment's
    first state in `_draw`, and turns all of it into a fresh array of observations in `_observe`.
    """

    def __init__(
        self,
        state: np.ndarray,
        max_episode_steps: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
    ):
        num_envs = state.shape[1]
        if num_envs < 1 or max_episode_steps < 1:
            raise UsageError(
                f"{type(self).__name__} needs at least one environment and one step an episode, "
                f"got num_envs={num_envs} and max_episode_steps={max_episode_steps}."
            )
        self.num_envs = num_envs
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
        """Advance every environment one step in `self._state`; give fresh arrays of rewards and terminations."""
        raise NotImplementedError

    def _draw(self, i: int) -> None:
        """Draw the first state of environment i from its generator, as Gymnasium's reset does."""
        raise NotImplementedError

    def _observe(self) -> np.ndarray:
        """Give the observations of the current state in a fresh array of shape (N, …)."""
        raise NotImplementedError

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments; those that ended are reset at once and their last observation is in `final_obs`."""
        if not self._generators:
            raise UsageError(f"{type(self).__name__}.step was called before reset.")
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
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start episodes in all environments or in those of `options["reset_mask"]`; environment i gets `seed + i`."""
        unknown = set(options or {}) - {"reset_mask"}
        if unknown:
            raise UsageError(f"{type(self).__name__}.reset knows the option reset_mask only, got {sorted(unknown)}.")
        mask = np.ones(self.num_envs, dtype=bool) if not options else np.asarray(options["reset_mask"])
        if mask.shape != self._shape or mask.dtype != bool or not mask.any():
            raise UsageError(
                f"reset_mask must be a boolean array of shape {self._shape} with at least one True, got {mask!r}."
            )
        if seed is None:
            seeds: Sequence[int | None] = [None] * self.num_envs
        else:
            seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if len(seeds) != self.num_envs:
            raise UsageError(f"A list of seeds needs one for each of {self.num_envs} environments, got {len(seeds)}.")
        if not self._generators:
            if not mask.all():
                raise UsageError(f"The first reset of {type(self).__name__} must be of all environments.")
            self._generators = [seeding.np_random(one)[0] for one in seeds]
        else:
            for i in mask.nonzero()[0].tolist():
                if seeds[i] is not None:
                    self._generators[i] = seeding.np_random(seeds[i])[0]
        self._begin(mask.nonzero()[0])
        return self._observe(), {}

    def _begin(self, which: np.ndarray) -> None:
        """Start an episode in the environments of these indices."""
        self._elapsed[which] = 0
        for i in which.tolist():
            self._draw(i)

    def get_state(self) -> dict[str, Any]:
        """Give all that the next steps depend on, as plain data."""
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
                "resume with the number of environments that the run began with."
            )
        self._state[:] = state["state"]
        self._elapsed[:] = state["elapsed"]
        self._generators = [seeding.np_random(0)[0] for _ in state["generators"]]
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.bit_generator.state = saved


def discrete_actions(env: NumpyVector, actions: np.ndarray, choices: int, meaning: str) -> np.ndarray:
    """The actions of N environments with so many choices, checked."""
    actions = np.asarray(actions)
    whole = actions.shape == (env.num_envs,) and actions.dtype.kind in "iu"
    if not whole or actions.min() < 0 or actions.max() >= choices:
        raise UsageError(
            f"The actions of {type(env).__name__} are {env.num_envs} integers from 0 to {choices - 1} ({meaning}), "
            f"got {actions!r} of type {actions.dtype}."
        )
    return actions


def continuous_actions(env: NumpyVector, actions: np.ndarray) -> np.ndarray:
    """The actions of N environments with one number each, checked: single precision, (N,)."""
    actions = np.asarray(actions)
    if actions.shape != (env.num_envs, 1) or actions.dtype.kind != "f" or not np.isfinite(actions).all():
        raise UsageError(
            f"The actions of {type(env).__name__} are finite floats of shape ({env.num_envs}, 1), "
            f"got {actions!r} of type {actions.dtype}."
        )
    return actions[:, 0].astype(np.float32)


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
        mass_pole, total_mass, half_length = 0.1, 0.1 + 1.0, 0.5
        row = np.ones(num_envs)
        self._gravity = 9.8 * row
        self._half_length = half_length * row
        self._four_thirds = 4.0 / 3.0 * row
        self._mass_pole = mass_pole * row
        self._total_mass = total_mass * row
        self._pole_moment = mass_pole * half_length * row
        self._seconds = np.full((4, num_envs), 0.02)
        self._limits = np.array([self.X_LIMIT, self.ANGLE_LIMIT])[:, None] * row
        self._forces = np.array([-10.0, 10.0])
        self._reward = row
        self._sin, self._cos, self._push, self._inertia, self._scratch = np.empty((5, num_envs))
        self._change = np.empty((4, num_envs))
        self._distance = np.empty((2, num_envs))
        self._beyond = np.empty((2, num_envs), dtype=bool)

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = np.asarray(actions)
        # All of them are 0 or 1 exactly when their bitwise or is.
        if (
            actions.shape != self._shape
            or actions.dtype.kind not in "iu"
            or np.bitwise_or.reduce(actions) not in (0, 1)
        ):
            raise UsageError(
                f"CartPole's actions are {self.num_envs} integers, 0 (push left) or 1 (push right), "
                f"got {actions!r} of type {actions.dtype}."
            )
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

    def _draw(self, i: int) -> None:
        self._by_env[i] = self._generators[i].uniform(-0.05, 0.05, (2, 2))

    def _observe(self) -> np.ndarray:
        return self._by_env.astype(np.float32, "C").reshape(self.num_envs, 4)
