"""Copies of one environment that step together: one after the other here, or in processes, with the same numbers.

Both ways are made of the same parts. A `Block` steps some of the copies and writes what they give into rows of arrays.
Here there is one block over ordinary arrays; in processes there is one in each, over its rows of shared memory, and
only a few bytes a step go through a pipe. Seeds, order and states are by copy, so a run may be resumed the other way.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from palestra.control.envs.snapshot import Snapshot
from palestra.control.envs.watchdog import EnvWatchdog
from palestra.errors import UsageError

Make = Callable[[], Snapshot]

DOING = ("nothing", "step", "reset", "being made")
STEP, RESET, MAKE = 1, 2, 3

# What is passed on of the infos. Gathering all of them costs more than a step of MuJoCo, and nothing reads the others.
KEPT = ("action_mask", "game_over")


@dataclass
class Arrays:
    """What N copies give and take, a row each."""

    obs: np.ndarray
    final_obs: np.ndarray  # of those whose episode ended in the last step
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    actions: np.ndarray
    calls: np.ndarray  # how many resets and steps were begun
    doing: np.ndarray  # what is being done now: an index of DOING

    @classmethod
    def of(cls, num_envs: int, obs: spaces.Box, actions: gym.Space, *, shared: bool) -> "Arrays":
        """Arrays of zeros, if `shared` in memory that processes forked later write to as well."""
        assert actions.shape is not None
        assert actions.dtype is not None

        def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            if not shared:
                return np.zeros((num_envs, *shape), dtype)
            size = int(np.prod((num_envs, *shape))) * np.dtype(dtype).itemsize
            # Anonymous: it has no name that a killed run could leave behind.
            return np.frombuffer(mmap.mmap(-1, max(1, size)), dtype, size // np.dtype(dtype).itemsize).reshape(
                num_envs, *shape
            )

        return cls(
            obs=zeros(obs.shape, obs.dtype),
            final_obs=zeros(obs.shape, obs.dtype),
            rewards=zeros((), np.float64),
            terminated=zeros((), np.bool_),
            truncated=zeros((), np.bool_),
            actions=zeros(actions.shape, actions.dtype),
            calls=zeros((), np.int64),
            doing=zeros((), np.int8),
        )

    def begin(self, i: int, doing: int) -> None:
        """Say that copy i is called now, for whoever watches."""
        self.calls[i] += 1
        self.doing[i] = doing

    def progress(self) -> tuple[int, int, str]:
        """How many calls were begun, and which copy the last one was of, doing what; calls go through them in turn."""
        doing = self.doing.tolist()  # at once: another thread or process goes on writing
        env = max((i for i, one in enumerate(doing) if one), default=0)
        return int(self.calls.sum()), env, DOING[doing[env]]

    def rows(self, which: slice) -> "Arrays":
        """Some of the rows, in the same memory."""
        return Arrays(**{name: array[which] for name, array in vars(self).items()})


class EnvBlock:
    """Some of the copies, and their rows of the arrays."""

    def __init__(self, envs: Sequence[Snapshot], arrays: Arrays):
        self.envs, self.arrays = envs, arrays

    def reset(self, seeds: Sequence[int | None]) -> list[dict[str, Any]]:
        """Begin episodes; what is kept of the infos, by copy."""
        infos = []
        for i, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self.arrays.begin(i, RESET)
            self.arrays.obs[i], info = env.reset(seed=seed)
            infos.append(_kept(info))
        self.arrays.doing[:] = 0
        return infos

    def step(self) -> list[dict[str, Any]]:
        """Step all with their actions; those that end begin anew at once."""
        arrays, infos = self.arrays, []
        actions = arrays.actions.copy()  # an environment may keep the one it is given
        for i, env in enumerate(self.envs):
            arrays.begin(i, STEP)
            obs, arrays.rewards[i], terminated, truncated, info = env.step(actions[i])
            arrays.terminated[i], arrays.truncated[i] = terminated, truncated
            kept = _kept(info)
            if terminated or truncated:
                arrays.final_obs[i] = obs
                arrays.begin(i, RESET)
                obs, info = env.reset()
                # What the policy acts on next is of the new episode; whether a game is over was said by the last step.
                kept = {name: value for name, value in kept.items() if name == "game_over"} | _kept(info)
            arrays.obs[i] = obs
            infos.append(kept)
        arrays.doing[:] = 0
        return infos

    def get_states(self) -> list[dict[str, Any]]:
        """The state of each."""
        return [env.get_state() for env in self.envs]

    def set_states(self, states: Sequence[dict[str, Any]]) -> list[bool]:
        """Continue from states; which had to begin a new episode, whose observation is then in the arrays."""
        for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            env.snapshot = state
            if env.restart is not None:
                self.arrays.obs[i] = env.restart
        return [env.restart is not None for env in self.envs]

    def exactness(self) -> list[str | None]:
        """What is to be said of each: see `Snapshot.exactness`."""
        return [env.exactness for env in self.envs]

    def close(self) -> None:
        """Close all."""
        for env in self.envs:
            env.close()


class Hand(Protocol):
    """Who has a block: told what to do, then asked for what came of it."""

    rows: slice

    def start(self, command: str, *arguments: Any) -> None:
        """Begin."""

    def finish(self) -> Any:
        """What the command gave, or raise what it raised."""

    def close(self) -> None:
        """Close the environments."""


class Here:
    """A block in this process, watched."""

    def __init__(self, name: str, envs: Sequence[Snapshot], arrays: Arrays, seconds: float):
        self.rows = slice(0, len(envs))
        self._block = EnvBlock(envs, arrays)
        self._watchdog = EnvWatchdog(name, seconds, arrays.progress)

    def start(self, command: str, *arguments: Any) -> None:
        """Remember the command: `finish` does it."""
        self._command = command, arguments

    def finish(self) -> Any:
        """Do the command."""
        command, arguments = self._command
        with self._watchdog:
            return getattr(self._block, command)(*arguments)

    def close(self) -> None:
        """Close the environments, unless one hangs."""
        self._watchdog.close()
        if self._watchdog.error is None:
            self._block.close()


class Copies(VectorEnv):
    """N copies of an environment that step together and reset themselves in the same step."""

    def __init__(self, name: str, hands: Sequence[Hand], arrays: Arrays, obs: spaces.Box, actions: gym.Space):
        self.name, self._hands, self._arrays = name, hands, arrays
        self.num_envs = len(arrays.rewards)
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = obs, actions
        self.observation_space = batch_space(obs, self.num_envs)
        self.action_space = batch_space(actions, self.num_envs)

    @property
    def processes(self) -> int:
        """In how many processes they run; 0: in this one."""
        return 0 if isinstance(self._hands[0], Here) else len(self._hands)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode in each; copy i gets `seed + i`."""
        if options is not None:
            raise UsageError(f"copies of {self.name} are reset together: reset takes no options, got {options}")
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        infos = self._infos(self._all("reset", lambda rows: (seeds[rows],)))
        return self._arrays.obs.copy(), infos

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all; the last observation of an episode that ended is in `final_obs`."""
        if np.shape(actions) != self.action_space.shape:
            raise UsageError(f"{self.name} takes actions of shape {self.action_space.shape}, got {np.shape(actions)}")
        arrays = self._arrays
        arrays.actions[...] = actions
        infos = self._infos(self._all("step"))
        ended = arrays.terminated | arrays.truncated
        if ended.any():
            infos |= {"final_obs": arrays.final_obs.copy(), "_final_obs": ended}
        return arrays.obs.copy(), arrays.rewards.copy(), arrays.terminated.copy(), arrays.truncated.copy(), infos

    def get_states(self) -> list[dict[str, Any]]:
        """The state of each copy."""
        return self._all("get_states")

    def set_states(self, states: Sequence[dict[str, Any]]) -> np.ndarray:
        """Continue from `get_states`; which copies had to begin a new episode, bool (N,): see `observations`."""
        if len(states) != self.num_envs:
            raise UsageError(
                f"This state is of {len(states)} environments, not of {self.num_envs}: "
                "resume with the number of environments that the run began with."
            )
        return np.array(self._all("set_states", lambda rows: (states[rows],)), bool)

    @property
    def observations(self) -> np.ndarray:
        """What the copies showed last."""
        return self._arrays.obs.copy()

    def exactness(self) -> str | None:
        """One sentence when episodes cannot continue after a resume, None when they can."""
        return next((sentence for sentence in self._all("exactness") if sentence is not None), None)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments and end their processes."""
        for hand in self._hands:
            hand.close()

    def _all(self, command: str, arguments: Callable[[slice], tuple] = lambda rows: ()) -> list[Any]:
        for hand in self._hands:
            hand.start(command, *arguments(hand.rows))
        return [one for hand in self._hands for one in hand.finish()]

    def _infos(self, kept: Sequence[dict[str, Any]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for i, info in enumerate(kept):
            if info:
                infos = self._add_info(infos, info, i)
        return infos


def copies_here(name: str, makers: Sequence[Make], seconds: float) -> Copies:
    """Copies in this process, one after the other."""
    envs = [make() for make in makers]
    obs, actions = envs[0].observation_space, envs[0].action_space
    assert isinstance(obs, spaces.Box)
    arrays = Arrays.of(len(makers), obs, actions, shared=False)
    return Copies(name, [Here(name, envs, arrays, seconds)], arrays, obs, actions)


def _kept(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in KEPT if name in info}
