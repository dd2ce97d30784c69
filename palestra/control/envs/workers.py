"""Copies of an environment in processes, several in each, over shared memory; one that hangs or dies is named."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import IO, Any

from gymnasium import spaces

from palestra.control.envs.stepping import EnvironmentFailed
from palestra.control.envs.vector import MAKE, Arrays, Copies, EnvBlock, Make
from palestra.control.envs.watchdog import Patience, hung

STACK_SECONDS = 2.0  # that a process has to say where it hangs


class There:
    """A block in a process of its own."""

    def __init__(self, name: str, makers: Sequence[Make], rows: slice, arrays: Arrays, seconds: float, others: list):
        self.name, self.rows, self.seconds = name, rows, seconds
        self._arrays = arrays.rows(rows)
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115  where the process writes its stack when asked
        self._doing = "being made"
        # Forked: what makes an environment may be a function that no other process could import.
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        given = (makers[rows], self._arrays, theirs, [*others, self._pipe], self._stack)
        self._process = context.Process(target=_serve, args=given, name=f"{name} {rows.start}", daemon=True)
        self._process.start()
        theirs.close()
        self.pipe = self._pipe

    def start(self, command: str, *arguments: Any) -> None:
        """Send the command."""
        self._doing = command
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise self._died() from error

    def finish(self) -> Any:
        """What the command gave, or raise what it raised; a process that hangs is killed."""
        patience = Patience(self.seconds)
        while not self._pipe.poll(patience.interval):
            now = self._arrays.progress()
            if patience.over(now):
                raise self._hangs(*now)
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if kind == "raised":
            error, trace = value
            error.add_note(f"in a process of its own:\n{trace}")
            raise error
        return value

    def close(self) -> None:
        """End the process; by force if it does not end by itself."""
        with contextlib.suppress(OSError):
            self._pipe.send(("close", ()))
        self._process.join(5)
        self._kill()

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()
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
        return EnvironmentFailed(f"the process of {self.name} with {which} ended ({how}) in {self._doing}")


def copies_in_processes(name: str, makers: Sequence[Make], processes: int, seconds: float) -> Copies:
    """Copies in that many processes, as evenly as it goes."""
    probe = makers[0]()
    obs, actions = probe.observation_space, probe.action_space
    probe.close()
    assert isinstance(obs, spaces.Box)
    arrays = Arrays.of(len(makers), obs, actions, shared=True)
    count = min(processes, len(makers))
    cuts = [round(i * len(makers) / count) for i in range(count + 1)]
    hands: list[There] = []
    try:
        for first, end in pairwise(cuts):
            pipes = [hand.pipe for hand in hands]
            hands.append(There(name, makers, slice(first, end), arrays, seconds, pipes))
        for hand in hands:
            hand.finish()
    except BaseException:
        for hand in hands:
            hand.close()
        raise
    return Copies(name, hands, arrays, obs, actions)


def _serve(makers: Sequence[Make], arrays: Arrays, pipe: Connection, others: list[Connection], stack: IO) -> None:
    """The process: do as told until told to close, or until the trainer is gone."""
    # Forked with the run's own handlers: with them SIGTERM would not end it, and a Ctrl-C at the terminal, which is for
    # the run to answer, would reach it too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    for other in others:  # the trainer's ends: held open here they would outlive it
        other.close()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    block: EnvBlock | None = None
    command, arguments = "make", ()
    while True:
        try:
            if command == "make":
                envs = []
                for i, make in enumerate(makers):
                    arrays.begin(i, MAKE)
                    envs.append(make())
                arrays.doing[:] = 0
                block = EnvBlock(envs, arrays)
                answer = "done", None
            elif command == "close":
                if block is not None:
                    block.close()
                return
            else:
                answer = "done", getattr(block, command)(*arguments)
        except (Exception, SystemExit) as error:
            answer = "raised", (_portable(error), traceback.format_exc())
        try:
            pipe.send(answer)
            command, arguments = pipe.recv()
        except (EOFError, OSError):
            return


def _portable(error: BaseException) -> Exception:
    """The error, if the trainer can be sent it as it is, else one that says the same."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if isinstance(copy, Exception):
            return copy
    except Exception:  # an exception may refuse in any way
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
