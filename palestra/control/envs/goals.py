"""Goal environments: what hindsight needs to know of any, and `BitFlip`, which random exploration does not solve.

A goal environment shows `observation`, `achieved_goal` and `desired_goal`, and has
`compute_reward(achieved, desired, info)`, which takes batches; here `info` is empty. One whose episodes end at the goal
also has `compute_terminated` of the same arguments; without it a relabeled transition keeps its flag.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from palestra.control.spaces import PackedBox, Part
from palestra.errors import UsageError

OfGoals = Callable[[np.ndarray, np.ndarray, Any], Any]


class Goals(NamedTuple):
    """Where the goals are in an observation, and what is known of reaching them."""

    achieved: Part
    desired: Part
    reward: OfGoals
    terminated: OfGoals | None


def goals_of(env: gym.Env) -> Goals | None:
    """The goals of an environment as `make_single` gives it; None where it has none."""
    space, core = env.observation_space, env.unwrapped
    parts = {tuple(part.path): part for part in space.parts} if isinstance(space, PackedBox) else {}
    achieved, desired = parts.get(("achieved_goal",)), parts.get(("desired_goal",))
    if achieved is None or desired is None or not hasattr(core, "compute_reward"):
        return None
    return Goals(achieved, desired, core.compute_reward, getattr(core, "compute_terminated", None))


def check_goals(goals: Goals | None, name: str) -> Goals:
    """The goals, or an error that says what a goal environment has."""
    if goals is None:
        raise UsageError(
            f"algorithm.her: {name} is not a goal environment: its observations must be a Dict with achieved_goal and "
            "desired_goal, and it must have compute_reward(achieved, desired, info)"
        )
    if goals.achieved.sizes is not None or goals.achieved.shape != goals.desired.shape:
        raise UsageError(
            f"algorithm.her: {name} must show achieved_goal and desired_goal as a Box or MultiBinary of one shape"
        )
    return goals


class BitFlip(gym.Env):
    """Flip one of n bits a step until they are those of the goal (Andrychowicz et al. 2017, §3.1).

    The reward is −1, and 0 at the goal, where the episode ends; it is truncated after n steps. Of 2ⁿ states a random
    policy reaches one in a million of 20 bits, so that without hindsight nothing is ever learned.
    """

    palestra_state = ("bits", "goal", "at")

    def __init__(self, bits: int = 20):
        if bits < 1:
            raise UsageError(f"env.kwargs.bits: expected at least 1, got {bits}")
        self.n, self.at = bits, 0
        self.bits, self.goal = np.zeros((2, bits), np.int8)
        names = ("observation", "achieved_goal", "desired_goal")
        parts: dict[str, gym.Space] = {name: spaces.MultiBinary(bits) for name in names}
        self.observation_space, self.action_space = spaces.Dict(parts), spaces.Discrete(bits)

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
        """0 where all bits are right, else −1, of one pair or of a batch."""
        return np.where(self.compute_terminated(achieved, desired, info), 0.0, -1.0)

    def compute_terminated(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
        """Whether all bits are right."""
        return (np.asarray(achieved) == desired).all(axis=-1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        """Other bits and another goal, which differ."""
        super().reset(seed=seed)
        self.at = 0
        self.bits, self.goal = self.np_random.integers(0, 2, (2, self.n), np.int8)
        if (self.bits == self.goal).all():
            self.goal[self.np_random.integers(self.n)] ^= 1
        return self._show(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        """Flip a bit."""
        self.at += 1
        self.bits[action] ^= 1
        reached = bool(self.compute_terminated(self.bits, self.goal, {}))
        over = not reached and self.at >= self.n
        return self._show(), 0.0 if reached else -1.0, reached, over, {"is_success": reached}

    def _show(self) -> dict[str, np.ndarray]:
        bits = self.bits.copy()
        return {"observation": bits, "achieved_goal": bits, "desired_goal": self.goal.copy()}
