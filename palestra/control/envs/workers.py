"""Workers that step some of the copies of an environment: in this process, or in one of their own over shared memory.

Both run an `EnvBlock`, which steps its copies one after the other and writes their results into rows of arrays. A
worker process has its rows in shared memory, so that only a few bytes per step go through a pipe; an environment that
hangs or dies is named in the error.
"""

import contextlib
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from palestra.control.envs.snapshot import Snapshot
from palestra.control.envs.stepping import EnvironmentFailed
from palestra.control.envs.watchdog import EnvWatchdog, Patience, hung

Make = Callable[[], Snapshot]

DOING = ("nothing", "step", "reset", "being made")
STEP, RESET, MAKE = 1, 2, 3
# The infos that are passed on. Gathering all of them costs more than a step of MuJoCo, and nothing reads the others.
PASSED_ON = ("action_mask", "game_over", "components")
STACK_SECONDS = 2.0  # that a hanging process has to write its stack


@dataclass
class Arrays:
    """Results and actions of N copies, one row each."""

    obs: np.ndarray
    final_obs: np.ndarray  # of those whose episode ended in the last step
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    actions: np.ndarray
    calls: np.ndarray  # resets and steps started
    doing: np.ndarray  # the call in progress: an index of DOING

    @classmethod
    def of(cls, num_envs: int, obs: spaces.Box, actions: gym.Space, *, shared: bool) -> "Arrays":
        """Arrays of zeros, if `shared` in memory that processes forked later write to."""
        assert actions.shape is not None
        assert actions.dtype is not None

        def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            if not shared:
                return np.zeros((num_envs, *shape), dtype)
            count, bytes_each = int(np.prod((num_envs, *shape))), np.dtype(dtype).itemsize
            # Anonymous: it has no name that a killed run could leave behind.
            memory = mmap.mmap(-1, max(1, count * bytes_each))
            return np.frombuffer(memory, dtype, count).reshape(num_envs, *shape)

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
        """Record that copy i is called now, for the watchdog."""
        self.calls[i] += 1
        self.doing[i] = doing

    def progress(self) -> tuple[int, int, str]:
        """How many calls were started, the copy of the last one, and what it was; copies are called in order."""
        doing = self.doing.tolist()  # at once: another thread or process keeps writing
        env = max((i for i, call in enumerate(doing) if call), default=0)
        return int(self.calls.sum()), env, DOING[doing[env]]

    def rows(self, which: slice) -> "Arrays":
        """Some of the rows, in the same memory."""
        return Arrays(**{name: array[which] for name, array in vars(self).items()})


class EnvBlock:
    """Some of the copies, and their rows of the arrays."""

    def __init__(self, envs: list[Snapshot], arrays: Arrays):
        self.envs, self.arrays = envs, arrays

    def make(self, makers: Sequence[Make]) -> None:
        for i, make in enumerate(makers):
            self.arrays.begin(i, MAKE)
            self.envs.append(make())
        self.arrays.doing[:] = 0

    def reset(self, seeds: Sequence[int | None]) -> list[dict[str, Any]]:
        """Begin episodes; the infos that are passed on, by copy."""
        infos = []
        for i, (env, seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self.arrays.begin(i, RESET)
            self.arrays.obs[i], info = env.reset(seed=seed)
            infos.append(_passed_on(info))
        self.arrays.doing[:] = 0
        return infos

    def step(self) -> list[dict[str, Any]]:
        """Step all with their actions; those that end are reset at once."""
        arrays, infos = self.arrays, []
        actions = arrays.actions.copy()  # an environment may keep the one it is given
        for i, env in enumerate(self.envs):
            arrays.begin(i, STEP)
            obs, arrays.rewards[i], terminated, truncated, info = env.step(actions[i])
            arrays.terminated[i], arrays.truncated[i] = terminated, truncated
            passed_on = _passed_on(info)
            if terminated or truncated:
                arrays.final_obs[i] = obs
                arrays.begin(i, RESET)
                obs, info = env.reset()
                # The mask is of the new episode; whether a game is over, and the sums, were in the last step's info.
                final = {"final_info": passed_on} if "action_mask" in passed_on else {}
                passed_on = {k: v for k, v in passed_on.items() if k != "action_mask"} | final | _passed_on(info)
            arrays.obs[i] = obs
            infos.append(passed_on)
        arrays.doing[:] = 0
        return infos

    def get_states(self) -> list[dict[str, Any]]:
        return [env.get_state() for env in self.envs]

    def set_states(self, states: Sequence[dict[str, Any]]) -> list[bool]:
        """Continue from states; which copies had to begin a new episode, whose observation is then in the arrays."""
        restarted = [not env.set_state(state) for env, state in zip(self.envs, states, strict=True)]
        for i in np.flatnonzero(restarted):
            self.arrays.obs[i] = self.envs[i].restart
        return restarted

    def exactness(self) -> list[str | None]:
        return [env.exactness for env in self.envs]

    def close(self) -> None:
        for env in self.envs:
            env.close()


class LocalWorker:
    """A block in this process, watched."""

    def __init__(self, name: str, envs: list[Snapshot], arrays: Arrays, seconds: float):
        self.rows = slice(0, len(envs))
        self._block = EnvBlock(envs, arrays)
        self._watchdog = EnvWatchdog(name, seconds, arrays.progress)

    def start(self, command: str, *arguments: Any) -> None:
        """Note the command: `finish` runs it."""
        self._command = command, arguments

    def finish(self) -> Any:
        """Run the command."""
        command, arguments = self._command
        with self._watchdog:
            return getattr(self._block, command)(*arguments)

    def close(self) -> None:
        """Close the environments, unless one hangs."""
        self._watchdog.close()
        if self._watchdog.error is None:
            self._block.close()


class ProcessWorker:
    """A block in a process of its own."""

    def __init__(self, name: str, makers: Sequence[Make], rows: slice, arrays: Arrays, seconds: float, others: list):
        self.name, self.rows, self.seconds = name, rows, seconds
        self._arrays = arrays.rows(rows)
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115  where the process writes its stack on SIGUSR1
        self._doing = "being made"
        # Forked: an environment may be made by a function that no other process could import.
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        arguments = (makers[rows], self._arrays, theirs, [*others, self.pipe], self._stack)
        self._process = context.Process(target=_serve, args=arguments, name=f"{name} {rows.start}", daemon=True)
        self._process.start()
        theirs.close()

    def start(self, command: str, *arguments: Any) -> None:
        """Send the command."""
        self._doing = command
        try:
            self.pipe.send((command, arguments))
        except OSError as error:
            raise self._died() from error

    def finish(self) -> Any:
        """The command's result, or raise its error; a process that hangs is killed."""
        patience = Patience(self.seconds)
        while not self.pipe.poll(patience.interval):
            now = self._arrays.progress()
            if patience.over(now):
                raise self._hangs(*now)
        try:
            kind, value = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if kind == "raised":
            error, trace = value
            error.add_note(f"in a worker process:\n{trace}")
            raise error
        return value

    def close(self) -> None:
        """End the process, by force if necessary."""
        with contextlib.suppress(OSError):
            self.pipe.send(("close", ()))
        self._process.join(5)
        self._kill()

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self.pipe.close()
        self._stack.close()

    def _hangs(self, _: int, env: int, doing: str) -> EnvironmentFailed:
        pid = self._process.pid
        stack = ""
        if pid is not None:
            os.kill(pid, signal.SIGUSR1)
            until = time.monotonic() + STACK_SECONDS
            while not stack and time.monotonic() < until:
                time.sleep(0.1)
                self._stack.seek(0)
                stack = self._stack.read().decode(errors="replace")
        self._kill()
        return hung(self.name, self.rows.start + env, doing, self.seconds, stack)

    def _died(self) -> EnvironmentFailed:
        self._process.join(5)
        code = self._process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        last = self.rows.stop - 1
        which = f"environment {last}" if last == self.rows.start else f"environments {self.rows.start} to {last}"
        return EnvironmentFailed(f"the worker process of {self.name} with {which} died ({how}) during {self._doing}")


def _serve(makers: Sequence[Make], arrays: Arrays, pipe: Connection, others: list[Connection], stack: IO) -> None:
    """The worker process: runs commands until `close`, or until the trainer is gone."""
    # Forked with the run's signal handlers: with them SIGTERM would not end it, and a Ctrl-C at the terminal, which is
    # for the run to handle, would reach it too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    for other in others:  # the trainer's ends: open here they would outlive it
        other.close()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    block, command, arguments = EnvBlock([], arrays), "make", (makers,)
    while True:
        try:
            reply = "done", getattr(block, command)(*arguments)
        except (Exception, SystemExit) as error:
            reply = "raised", (portable(error), traceback.format_exc())
        if command == "close":
            return
        try:
            pipe.send(reply)
            command, arguments = pipe.recv()
        except (EOFError, OSError):
            return


def portable(error: BaseException) -> Exception:
    """The error where it pickles, else a RuntimeError with its message."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if isinstance(copy, Exception):
            return copy
    except Exception:  # an exception may refuse in any way
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _passed_on(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in PASSED_ON if name in info}
