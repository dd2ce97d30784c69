"""The main process's handle of a worker: started, sent a task, polled, killed with its whole group."""

import contextlib
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from palestra.errors import PalestraError
from palestra.work.groups import Guarded
from palestra.work.worker import Failure

LOAD_SECONDS = 60.0  # for starting a worker and importing what the task needs, before its own timeout starts
END_SECONDS = 2.0  # for an idle worker to end by itself
# sys.path as it is here, before palestra is looked for: a worker finds modules where the main process finds them.
BOOT = """
import json, sys
socket, parent, sys.path = json.loads(sys.argv.pop())
from palestra.work.worker import main
main(socket, parent)
"""


class TaskFailed(PalestraError):
    """A task raised. The worker's traceback is in the message; the exception, rebuilt, is the cause."""

    def __init__(self, name: str, failure: Failure) -> None:
        super().__init__(f"{name} failed in a worker process:\n\n{failure.traceback}")
        self.type_name, self.message, self.traceback = failure.type_name, failure.message, failure.traceback
        self.exit_code = failure.exit_code
        self.__cause__ = _rebuilt(failure)
        self._arguments = name, failure

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskFailed, self._arguments


class TaskTimeout(PalestraError):
    """A task ran past its timeout and was killed, its children too."""


class WorkerDied(PalestraError):
    """A worker ended in the middle of a task; `returncode` is its exit code, or minus the signal that killed it."""

    def __init__(self, name: str, why: str, returncode: int) -> None:
        super().__init__(f"The worker running {name} {why}.")
        self.returncode = returncode
        self._arguments = name, why, returncode

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerDied, self._arguments


class DiedIdle(Exception):
    """A worker was already dying, between two tasks, when it was sent one: the task never started."""


class Process:
    """One worker process, in a session and process group of its own."""

    def __init__(self, env: dict[str, str], groups: Guarded) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            argument = json.dumps([theirs.fileno(), os.getpid(), list(map(str, sys.path))])
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, argument],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._readable = select.poll()  # the connection's own poll makes a new selector each time
        self._readable.register(self._connection.fileno(), select.POLLIN)
        self._killed = self._awake = False
        self.heard = time.monotonic()  # the last sign of life
        self._groups = groups
        groups.add(self._process.pid)

    def alive(self) -> bool:
        """Whether the worker can take a task."""
        return not self._killed and self._process.poll() is None

    def run(self, name: str, payload: bytes, log: str | None, timeout: float | None, silence: float | None) -> bytes:
        """Run one task and return its pickled value."""
        start = self.heard = time.monotonic()
        used, answered = self._awake, False
        limit = math.inf if timeout is None else max(timeout, LOAD_SECONDS)
        silence = math.inf if silence is None else silence
        patience = silence if self._awake else max(silence, LOAD_SECONDS)
        try:
            self._connection.send_bytes(pickle.dumps((payload, log), pickle.HIGHEST_PROTOCOL))
            while True:
                now = time.monotonic()
                # At most a second: a child that the worker forked may hold the socket open when the worker is dead.
                seconds = max(0.0, min(1.0, start + limit - now, self.heard + patience - now))
                if self._readable.poll(math.ceil(1000 * seconds)):
                    kind, data = pickle.loads(self._connection.recv_bytes())
                    self.heard, self._awake, patience = time.monotonic(), True, silence
                    answered = True
                    if kind == "result":
                        return data
                    if kind == "failed":
                        raise TaskFailed(name, data)
                    if kind == "running" and timeout is not None:
                        start, limit = self.heard, timeout
                elif time.monotonic() - start >= limit:
                    raise TaskTimeout(f"{name} was killed after {limit:g} s, its timeout.")
                elif time.monotonic() - self.heard >= patience:
                    raise WorkerDied(name, f"gave no sign of life for {patience:g} s and was killed", -signal.SIGKILL)
                elif not self.alive():
                    raise EOFError
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            if used and not answered:
                raise DiedIdle from None
            code = self._process.returncode
            raise WorkerDied(name, _death(code), -signal.SIGKILL if code is None else code) from None

    def terminate(self) -> None:
        """Ask the worker itself, not its children, to save and end."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the worker's whole group."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError for one that has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self, ask: bool) -> None:
        """End the worker, cooperatively if `ask`, and its whole group."""
        if ask:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._connection.send_bytes(b"")
                self._process.wait(END_SECONDS)
        self.kill()
        self._process.wait()
        self._groups.forget(self._process.pid)
        self._connection.close()


def _death(code: int | None) -> str:
    if code is None:
        return "closed its connection and was killed"
    if code >= 0:
        return f"exited with code {code} in the middle of it"
    hint = " (as the system does when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _rebuilt(failure: Failure) -> BaseException:
    """The worker's exception; a RuntimeError with its text if its class is not imported here or does not unpickle."""
    if failure.pickled is not None and failure.module in sys.modules:
        with contextlib.suppress(Exception):
            return pickle.loads(failure.pickled)
    return RuntimeError(f"{failure.type_name}: {failure.message}")
