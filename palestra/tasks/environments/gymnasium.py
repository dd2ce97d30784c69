"""Any environment of Gymnasium with text observations and text actions."""

import random
import re
from typing import Any

from palestra.errors import UsageError, needs_extra
from palestra.tasks.environments.environment import EnvironmentTask, Turn
from palestra.tasks.task import Problem

ACTIONS = {
    "Acrobot": "left none right", "Blackjack": "stick hit", "CartPole": "left right",
    "CliffWalking": "up right down left", "FrozenLake": "left down right up", "FrozenLake8x8": "left down right up",
    "MountainCar": "left none right", "Taxi": "south north east west pickup dropoff",
}  # fmt: skip
"""Names of discrete actions, by the environment's name without its version."""
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


class Gymnasium(EnvironmentTask):
    """An environment of Gymnasium, as `gymnasium:<id>`; the reward of every step is that of a turn."""

    source, extra = "gymnasium", "train"

    @classmethod
    def names(cls) -> dict[str, str]:
        """The registered ids, each with the extra that it needs."""
        with needs_extra("a task of Gymnasium", "train"):
            import gymnasium
        extras = {"box2d": "the extra box2d", "mujoco": "the extra mujoco"}
        listed = {}
        for id, spec in gymnasium.registry.items():
            where = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__name__", "")
            if not re.match(r"(phys2d|tabular|GymV)", id):  # the same ones on JAX, and wrappers of the old package
                listed[id] = next((needs for part, needs in extras.items() if f".{part}." in where), "")
                if re.search(r"mujoco_py|pusher_v4", where):
                    listed[id] = "an old MuJoCo, unlike -v5"
        return listed


class TextEnv:
    """An environment of Gymnasium as an `Environment`; `actions` names its discrete actions."""

    def __init__(self, id: str, *, actions: list[str] | None = None, **config: Any):
        with needs_extra("a task of Gymnasium", "train"):
            import gymnasium
        try:
            modes = gymnasium.spec(id).make().metadata.get("render_modes", ()) if "render_mode" not in config else ()
            options: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in modes else {}
            self._env = gymnasium.make(id, **options, **config)
        except (gymnasium.error.Error, TypeError, ImportError) as error:
            raise UsageError(f"gymnasium:{id} cannot be made with {config}: {error}") from error
        space = self._env.action_space
        named = actions or ACTIONS.get(re.sub(r"-v\d+$", "", id), "").split()
        self._discrete = isinstance(space, gymnasium.spaces.Discrete)
        if not self._discrete and not isinstance(space, gymnasium.spaces.Box):
            raise UsageError(f"gymnasium:{id} has actions of {space}; expected a Discrete or a Box space")
        self._names = tuple(name.lower() for name in named) if self._discrete else ()

    def reset(self, seed: int, problem: Problem) -> Turn:
        observation, _ = self._env.reset(seed=seed)
        self._env.action_space.seed(seed)
        return Turn(f"{self._rules()}\n{self._text(observation)}")

    def step(self, action: str) -> Turn:
        chosen = self._parsed(action)
        if chosen is None:
            return Turn(f"Invalid action. {self._rules()}")
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        return Turn(self._text(observation), {0: float(reward)}, bool(terminated or truncated))

    def sample(self, chance: random.Random) -> str:
        """A random action."""
        self._env.action_space.seed(chance.getrandbits(31))
        return _numbers(self._env.action_space.sample())

    def close(self) -> None:
        self._env.close()

    def _rules(self) -> str:
        space: Any = self._env.action_space
        if self._names:
            return f"Actions: {', '.join(self._names)}."
        if self._discrete:
            return f"Actions: {space.start} to {space.start + space.n - 1}."
        return f"Actions: {space.low.size} numbers from {_numbers(space.low.min())} to {_numbers(space.high.max())}."

    def _text(self, observation: Any) -> str:
        if self._env.render_mode != "ansi":
            return _numbers(observation)
        # A color marks a place.
        return re.sub(r"\x1b\[[\d;]*m(.)\x1b\[0m", r"[\1]", str(self._env.render())).strip()

    def _parsed(self, action: str) -> Any:
        import numpy as np

        space: Any = self._env.action_space
        if self._discrete:
            words = [word for word in re.findall(r"[a-z_]+", action.lower()) if word in self._names]
            numbers = re.findall(r"\d+", action)
            chosen = self._names.index(words[-1]) + space.start if words else int(numbers[-1]) if numbers else None
            return chosen if chosen is not None and space.contains(np.int64(chosen)) else None
        values = [float(value) for value in re.findall(NUMBER, action)]
        if len(values) != space.low.size:
            return None
        return np.clip(np.array(values, space.dtype).reshape(space.shape), space.low, space.high)


def _numbers(value: Any) -> str:
    """Numbers to four digits, in the order of the array, tuple or dictionary."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_numbers(one)}" for name, one in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_numbers, value))
    if hasattr(value, "ravel"):
        return " ".join(_numbers(one.item()) for one in value.ravel())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
