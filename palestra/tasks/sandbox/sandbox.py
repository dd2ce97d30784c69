"""The sandbox's interface: runs programs, and tests against code, and returns plain data."""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from palestra.errors import PalestraError, UsageError
from palestra.tasks.sandbox.client import Client, NotIsolated
from palestra.tasks.sandbox.levels import LEVELS, Level, Limits, ways

MOST_RESULT = 1 << 20  # bytes that tests may report


@dataclass(frozen=True)
class SandboxOutcome:
    """The result of tests."""

    status: Literal["passed", "failed", "timeout", "error"]
    """`error`: the tests themselves are at fault."""
    passed: tuple[bool, ...]
    """Of each test."""
    level: Level
    """How well the code was isolated; `weak` where it ran in one process with its tests."""
    seconds: float
    note: str = ""
    """The first failure."""


@dataclass(frozen=True)
class ProgramOutput:
    """The output of a program."""

    stdout: str
    stderr: str
    status: Literal["ok", "error", "timeout", "output", "killed"]
    """`error`: an exit code other than 0; `output`: it wrote too much; `killed`: a signal, such as SIGSEGV."""
    code: int
    """Its exit code; below 0, the signal that ended it."""
    level: Level
    seconds: float


class Sandbox:
    """Runs untrusted code. Close it, or use it in a `with` block; its processes end with this one anyway.

    It may be used from several threads, and from asyncio by `asyncio.to_thread`. `workers` programs run at a time, one
    a core if null, and further calls wait. Its level is the strongest between `strongest` and `weakest` that this
    machine allows; where there is none, using it raises a UsageError.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        limits: Limits | None = None,
        weakest: Level = "uid",
        strongest: Level = "namespaces",
    ):
        if LEVELS.index(strongest) > LEVELS.index(weakest):
            raise UsageError(f"no level is at most {strongest} and at least {weakest}: they are {', '.join(LEVELS)}")
        self._limits, self._weakest, self._ways = limits or Limits(), weakest, ways(strongest, weakest)
        self._free = threading.Semaphore(workers or os.cpu_count() or 1)
        self._idle: queue.LifoQueue[Client] = queue.LifoQueue()
        self._owner, self._closed = os.getpid(), False

    def start(self) -> Level:
        """Start a first server now, so that the first program does not wait, and return the level."""
        with self._client() as client:
            return client.level

    def run_tests(
        self,
        code: str,
        tests: Sequence[str],
        entry_points: Sequence[str],
        timeout: float = 5.0,
        *,
        setup: str = "",
        together: bool = False,
    ) -> SandboxOutcome:
        """Run tests, each some Python source, against code that runs alone in another process.

        The functions `entry_points` of the code are stubs for the tests: arguments and results cross as plain values.
        `setup` is source that runs before the tests, in their process. `timeout` is the wall clock in seconds for
        all of it. With `together` the tests run in the code's own process, and prove little.
        """
        if not tests or not all(test.strip() for test in tests):
            raise UsageError("no test, or an empty one: any code would pass; give the problem tests")
        started = time.monotonic()
        exam = json.dumps({"setup": setup, "tests": list(tests), "entry_points": list(entry_points)})
        with self._client() as client:
            kind, level = ("together", "weak") if together else ("tests", client.level)
            why, codes, (result,) = client.run(kind, timeout, self._limits, [code, exam], [MOST_RESULT])
        lines = _lines(result)
        passed = [False] * len(tests)
        for line in lines:
            if type(line.get("test")) is int and 0 <= line["test"] < len(tests):
                passed[line["test"]] = line.get("passed") is True
        status, note = _status(why, codes, lines, passed, together)
        return SandboxOutcome(status, tuple(passed), level, time.monotonic() - started, note)

    def run_program(self, code: str, stdin: str = "", timeout: float = 5.0) -> ProgramOutput:
        """Run a program as `python program.py` would, with a text as its stdin."""
        started, most = time.monotonic(), self._limits.output << 10
        with self._client() as client:
            why, (ended,), (out, err) = client.run("program", timeout, self._limits, [code, stdin], [most, most])
        status = why if why in ("output", "timeout") else "killed" if ended < 0 else "error" if ended else "ok"
        return ProgramOutput(out, err, status, ended, client.level, time.monotonic() - started)

    def close(self) -> None:
        """End its servers; a busy one ends when it is done."""
        if self._owner != os.getpid():
            return  # they belong to another process
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _client(self) -> Generator[Client]:
        if self._owner != os.getpid():
            raise PalestraError("a sandbox belongs to the process that made it; a process forked from it makes its own")
        with self._free:
            if self._closed:
                raise PalestraError("the sandbox is closed")
            client = None
            with contextlib.suppress(queue.Empty):
                client = self._idle.get_nowait()
            client = client or self._connected()
            try:
                yield client
            except BaseException:
                client.end()  # its state is unknown
                raise
            self._idle.put(client)
            if self._closed:
                self.close()

    def _connected(self) -> Client:
        """A server at the strongest level that works, which is then that of all."""
        reasons = []
        for way in self._ways:
            try:
                client = Client(way)
            except NotIsolated as error:
                reasons.append(f"{way}: {error.why}")
                continue
            self._ways = [way]
            return client
        tried = "; ".join(reasons) or "not Linux on x86-64 or 64-bit ARM"
        advice = "" if self._weakest == "weak" else ", or accept a weak sandbox with `args: {sandbox: weak}`"
        raise UsageError(
            f"code cannot be run safely on this machine ({tried}). Allow user namespaces (Debian: sysctl "
            "kernel.unprivileged_userns_clone=1; Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0), or "
            f"run as root in a container{advice}."
        )


def _lines(text: str) -> list[dict[str, Any]]:
    """The lines of a report. Where code and tests share a process, it may contain anything."""
    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            if type(value := json.loads(line)) is dict:
                lines.append(value)
    return lines


def _status(
    why: str, codes: list[int], lines: list[dict[str, Any]], passed: list[bool], together: bool
) -> tuple[Literal["passed", "failed", "timeout", "error"], str]:
    """The status of tests, and the first failure."""
    ended = next((str(line["ended"]) for line in lines if "ended" in line), None)
    note = next((str(line["why"]) for line in lines if line.get("why")), "")[:1000]
    if ended == "done" and all(passed):
        return "passed", ""
    if not together and (ended == "error" or any(line.get("broken") for line in lines)):
        return "error", note
    if ended is not None:
        return "failed", note
    if why == "timeout":
        return "timeout", note or "it took too long"
    if together:
        return "failed", note or "the code ended its process"
    return "error", note or f"the process of the tests ended with {codes[-1]}"
