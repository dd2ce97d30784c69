"""A watchdog thread for environments in this process: names the one that hangs and interrupts its call."""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from weakref import WeakSet

from palestra.control.envs.stepping import EnvironmentFailed

log = logging.getLogger("palestra.control")

GRACE = 5.0  # seconds that an interrupted call has to return


class EnvironmentHung(EnvironmentFailed):
    """A call of an environment's `reset` or `step` did not return."""


def hung(name: str, env: int, doing: str, seconds: float, stack: str) -> EnvironmentHung:
    """The error that names an environment and shows where it hangs."""
    return EnvironmentHung(
        f"{name} hangs: environment {env} did not return from {doing} within {seconds:g} s (env.reset_timeout). "
        "The last checkpoint is intact: fix the environment, or raise env.reset_timeout if it is only slow, "
        f"then resume. Its stack:\n{stack.rstrip()}"
    )


class Patience:
    """Detects that a value has not changed for `seconds`, in which this process was itself running.

    A process that was stopped for a while (Ctrl-Z) does not take its environments for hung.
    """

    def __init__(self, seconds: float):
        self.seconds, self.interval = seconds, min(1.0, seconds / 8)
        self._last: object = None
        self._since = self._looked = time.monotonic()

    def over(self, now: object) -> bool:
        """Whether `now` has been the same for too long."""
        looked, self._looked = self._looked, time.monotonic()
        if now != self._last or self._looked - looked > self.interval + self.seconds / 2:
            self._last, self._since = now, self._looked
        return self._looked - self._since > self.seconds


_watching: "WeakSet[EnvWatchdog]" = WeakSet()


class EnvWatchdog:
    """Around calls into environments: `with watchdog: ...`; entering and leaving cost about a microsecond.

    When `progress()` has not changed for `seconds` the call is interrupted: a signal raises EnvironmentHung in the main
    thread, which ends loops, sleeps and waits in Python. Compiled code that never returns cannot be interrupted: then
    the message is written to stderr and the process ends, with the exit code of the error. Compiled code that never
    releases the GIL cannot be detected from here: `vectorize: async` detects it from outside. A hang in another thread
    than the main one, as in a user's own program, is logged and not interrupted.
    """

    def __init__(self, name: str, seconds: float, progress: Callable[[], tuple[int, int, str]]):
        self.name, self.seconds = name, seconds
        self.progress = progress
        """The number of calls started, the environment of the last one, and what it was."""
        self.error: EnvironmentHung | None = None
        self._caller: int | None = None  # the thread that is inside
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def __enter__(self) -> None:
        self._caller = threading.get_ident()
        if self._thread is None:
            _watching.add(self)
            mine = threading.current_thread() is threading.main_thread()
            if mine and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
                signal.signal(signal.SIGUSR2, _raise)
            self._thread = threading.Thread(target=self._watch, name=f"watchdog of {self.name}", daemon=True)
            self._thread.start()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._caller = None

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watch(self) -> None:
        patience = Patience(self.seconds)
        while not self._over.wait(patience.interval):
            caller, call = self._caller, self.progress()
            if patience.over((caller, call)) and caller is not None:
                self._end(caller, call)
                return

    def _end(self, caller: int, call: tuple[int, int, str]) -> None:
        frame = sys._current_frames().get(caller)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self.error = hung(self.name, call[1], call[2], self.seconds, stack)
        if caller != threading.main_thread().ident:
            log.error(str(self.error))
            return
        if signal.getsignal(signal.SIGUSR2) == _raise:
            signal.pthread_kill(caller, signal.SIGUSR2)
            if self._over.wait(GRACE) or (self._caller, self.progress()) != (caller, call):
                return
        sys.stderr.write(f"palestra: {self.error}\n")
        sys.stderr.flush()
        os._exit(self.error.exit_code)


def _raise(signum: int, frame: object) -> None:
    """The signal handler, one for all watchdogs."""
    for watchdog in _watching:
        # The call may have returned just before the signal.
        if watchdog.error is not None and watchdog._caller is not None:
            raise watchdog.error
