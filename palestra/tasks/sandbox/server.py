"""The warm server of a sandbox: a Python that has loaded what programs use, and forks a copy of itself for each.

It is a process of its own, with one thread, that never reads what it runs: code, tests and results are files that it
hands on, so that nothing of one program or its tests is in the memory of the next. It ends, and with it all it started,
when the process that it serves is gone.
"""

import contextlib
import fcntl
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from palestra.tasks.sandbox import filter, kernel
from palestra.tasks.sandbox.candidate import run_program, serve_calls
from palestra.tasks.sandbox.examiner import examine, examine_together
from palestra.tasks.sandbox.levels import CANDIDATE, TESTS, Attempt, Ground, attempts, lock_in
from palestra.tasks.sandbox.limits import Limits

# What programs like to import; loaded once, it costs them nothing.
WARM = (
    "abc", "array", "bisect", "cmath", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "io", "itertools", "math", "operator", "random", "re", "statistics",
    "string", "struct", "textwrap", "time", "typing", "unicodedata",
)  # fmt: skip
LOCKED = b"+"  # the first byte from a process that is locked in; anything else says why it is not
MOST_FILES = 1 << 16


@dataclass(frozen=True)
class SandboxJob:
    """What a process in the sandbox is to do, with which files."""

    role: int
    act: Callable[..., int | None]
    """Its files follow as numbers; it returns an exit code."""
    keep: tuple[int, ...]
    streams: tuple[int, int, int]
    """Its stdin, stdout and stderr."""


@dataclass(frozen=True)
class Child:
    """A process in the sandbox."""

    pid: int
    life: int
    """The reading end of a pipe that is open as long as the process, and first says that it is locked in."""

    def problem(self) -> str | None:
        """Wait for its first byte; why it could not be locked in, or None."""
        data = os.read(self.life, 4096)
        return None if data[:1] == LOCKED else data.decode(errors="replace") or "it ended before it was locked in"

    def end(self) -> int:
        """Kill it, with all that is in its namespace or group; its exit code, or minus its signal."""
        for kill in (os.killpg, os.kill):  # one that has ended by itself keeps its code
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        os.close(self.life)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Server:
    """Runs one request after another."""

    def __init__(self, control: socket.socket, ground: Ground, folder: str, parent: int):
        self._control, self._ground, self._folder, self._parent = control, ground, folder, parent
        self._null = os.open("/dev/null", os.O_RDWR)
        self._self = (os.pidfd_open(os.getpid()),) if hasattr(os, "pidfd_open") else ()
        self._buffer = b""

    def serve(self) -> None:
        """Take requests until nobody is left to ask."""
        while True:
            if not self._ready(1.0):
                continue
            data, files, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
            for request in self._heard(data):
                if "kill" not in request:  # that is for a run that has just ended
                    answer = self._run(request, files)
                    self._control.sendall(json.dumps(answer).encode() + b"\n")

    def _run(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        number, seconds, limits = request["run"], request["seconds"], Limits(**request["limits"])
        deadline = time.monotonic() + seconds
        scratch = self._scratch(number)
        children: list[Child] = []
        why, problem = "broken", None
        try:
            try:
                for job in self._jobs(request["kind"], files):
                    children.append(self._start(job, limits, seconds, scratch))
            finally:
                for file in files:
                    os.close(file)
            problems = [child.problem() for child in children]
            problem = next((problem for problem in problems if problem), None)
            if problem is None:
                why = self._watch(number, children[-1].life, deadline)  # the program; where it has tests, those
        except OSError as error:
            problem = str(error)
        finally:
            # The tests first: they would report that the program is gone.
            status = [child.end() for child in reversed(children)][::-1]
            self._clear(scratch)
        return {"run": number, "why": why, "broken": problem, "status": status}

    def _jobs(self, kind: str, files: list[int]) -> list[SandboxJob]:
        """What to start, the one that is waited for last; further files are added to `files`."""
        null = (self._null, self._null, self._null)
        if kind == "program":
            code, stdin, stdout, stderr = files
            return [SandboxJob(CANDIDATE, run_program, (code,), (stdin, stdout, stderr))]
        if kind == "together":
            return [SandboxJob(CANDIDATE, examine_together, tuple(files), null)]
        code, tests, result = files
        ours, theirs = (end.detach() for end in socket.socketpair())
        files += [ours, theirs]
        return [
            SandboxJob(CANDIDATE, serve_calls, (code, ours), null),
            SandboxJob(TESTS, examine, (tests, theirs, result), null),
        ]

    def _watch(self, number: int, life: int, deadline: float) -> str:
        """Wait for the end of a process, and say why the wait is over."""
        while (left := deadline - time.monotonic()) > 0:
            ready = self._ready(left, life)
            if life in ready:
                return "ended"
            if ready and {"kill": number} in self._heard(self._control.recv(1 << 16)):
                return "killed"
        return "timeout"

    def _ready(self, seconds: float, *more: int) -> list[int]:
        """What can be read among the control socket and `more` within some seconds, at most one."""
        found = select.select([self._control.fileno(), *more], [], [], min(seconds, 1.0))[0]
        # A process that the parent forked may hold the socket open when the parent is gone.
        if not found and os.getppid() != self._parent:
            sys.exit()
        return found

    def _heard(self, data: bytes) -> list[dict[str, Any]]:
        """The requests that are whole with this data; no data means that nobody is left to ask."""
        if not data:
            sys.exit()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _start(self, job: SandboxJob, limits: Limits, seconds: float, scratch: str) -> Child:
        life, held = os.pipe()
        try:
            pid = kernel.clone(self._ground.namespaces[job.role])
            if pid == 0:
                self._become(job, held, limits, seconds, scratch)
        except OSError:
            os.close(life)
            raise
        finally:
            os.close(held)
        return Child(pid, life)

    def _become(self, job: SandboxJob, held: int, limits: Limits, seconds: float, scratch: str) -> NoReturn:
        """In a new process: lock it in, do its job, and end."""
        status = 1
        with contextlib.suppress(BaseException):  # never back into the server's own code
            _, _, _, held, *others = arrange([*job.streams, held, *job.keep, *self._self])
            kept, server = others[: len(job.keep)], others[len(job.keep) :]
            try:
                if os.environ["TMPDIR"] != scratch:
                    os.environ["HOME"] = os.environ["TMPDIR"] = scratch
                alive = server[0] if server else None
                lock_in(self._ground, limits, seconds, role=job.role, scratch=scratch, server=alive)
            except BaseException as error:
                os.write(held, f" {type(error).__name__}: {error}".encode())
                raise
            os.write(held, LOCKED)
            status = job.act(*kept) or 0
        os._exit(status)

    def _scratch(self, number: int) -> str:
        """A folder for the files of a run, where it has no file system of its own."""
        if self._ground.scratch is not None:
            return self._ground.scratch
        path = os.path.join(self._folder, str(number))
        os.mkdir(path, 0o700)
        if self._ground.uids is not None:
            os.chown(path, self._ground.uids[CANDIDATE], self._ground.uids[CANDIDATE])
        return path

    def _clear(self, scratch: str) -> None:
        if self._ground.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)


def arrange(files: list[int]) -> list[int]:
    """Make these files the numbers from 0 on, and close all others."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, len(files) + 10) for file in files]
    for number, file in enumerate(high):
        os.dup2(file, number)
    os.closerange(len(files), MOST_FILES)
    return list(range(len(files)))


def choose(ways: list[Attempt], folder: str, paths: list[str]) -> tuple[Ground | None, list[str]]:
    """The ground of the first way that works, tried in a process of its own, and why those before it did not."""
    reasons = []
    for way in ways:
        problem = _problem(way, folder, paths)
        if problem is None:
            return way.prepare(folder, paths), reasons
        reasons.append(f"{way.level}{' as an ordinary user' if way.own_users else ''}: {problem}")
    return None, reasons


def _problem(way: Attempt, folder: str, paths: list[str]) -> str | None:
    """Why a way does not work, or None."""
    trial = os.path.join(folder, "trial")
    os.mkdir(trial, 0o711)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ground = way.prepare(trial, paths)
            inner = kernel.clone(ground.namespaces[CANDIDATE])
            if inner == 0:
                lock_in(ground, Limits(), 5.0, role=CANDIDATE, scratch=ground.scratch or trial, server=None)
                os.write(writing, LOCKED)
                os._exit(0)
            os.waitpid(inner, 0)
        except BaseException as error:
            os.write(writing, f" {error}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    shutil.rmtree(trial, ignore_errors=True)
    with open(reading, "rb") as file:
        data = file.read()
    return None if data[:1] == LOCKED else data.decode(errors="replace").strip() or "it did not work"


def warm_up() -> None:
    """Load what programs like to import, and seed what they draw from: the same for each, so that verdicts are one."""
    register = os.register_at_fork
    os.register_at_fork = lambda **_: None  # `random` would draw a new seed after each fork, and take its time for it
    try:
        for name in WARM:
            import_module(name)
    finally:
        os.register_at_fork = register
    import_module("random").seed(0)


def main(asked: dict[str, Any]) -> None:
    """Serve the process that started this one; `asked` is what `palestra.tasks.sandbox.client` wrote."""
    try:
        _serve(asked)
    finally:
        shutil.rmtree(asked["folder"], ignore_errors=True)


def _serve(asked: dict[str, Any]) -> None:
    warm_up()
    sys.path[:] = asked["modules"]
    control = socket.socket(fileno=asked["control"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, this goes before the run does
    ground, reasons = choose(attempts(asked["strongest"], asked["weakest"]), asked["folder"], asked["readable"])
    hello = {"level": None if ground is None else ground.level, "reasons": reasons}
    control.sendall(json.dumps(hello).encode() + b"\n")
    if ground is None:
        return
    if sys.platform == "linux":
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    if ground.level == "namespaces":
        filter.program(1)  # kept for all processes: each is the first in its namespace
    gc.collect()
    gc.freeze()
    Server(control, ground, asked["folder"], asked["parent"]).serve()
