"""The warm server of a sandbox: a Python that has imported what programs use, and forks itself for each program.

It is a process of its own, with one thread, that never reads what it runs: code, tests and results are files that it
passes on, so that nothing of one program or its tests is in the memory of the next. It ends, with all its children,
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from palestra.tasks.sandbox import filter, kernel
from palestra.tasks.sandbox.candidate import run_program, serve_calls
from palestra.tasks.sandbox.examiner import examine, examine_together
from palestra.tasks.sandbox.levels import CANDIDATE, TESTS, Isolation, Limits, Way, isolate, prepare

# Common imports of programs, loaded once.
WARM = (
    "abc", "array", "bisect", "cmath", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "io", "itertools", "math", "operator", "random", "re", "statistics",
    "string", "struct", "textwrap", "time", "typing", "unicodedata",
)  # fmt: skip
LOCKED = b"+"  # the first byte from a process that is isolated; anything else says why it is not
MOST_FILES = 1 << 16


Job = tuple[int, Callable[..., int | None], Sequence[int]]
"""The role of a process, what it calls in the sandbox, which returns an exit code, and the files that this gets."""


@dataclass(frozen=True)
class Child:
    """A process in the sandbox."""

    pid: int
    life: int
    """The reading end of a pipe that is open as long as the process; its first byte says that it is isolated."""

    def problem(self) -> str | None:
        """Wait for its first byte; why it could not be isolated, or None."""
        data = os.read(self.life, 4096)
        return None if data[:1] == LOCKED else data.decode(errors="replace") or "it ended before it was isolated"

    def end(self) -> int:
        """Kill it, with its namespace or group; returns its exit code, or minus its signal."""
        for kill in (os.killpg, os.kill):  # one that has ended by itself keeps its code
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        os.close(self.life)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Server:
    """Serves one request after another."""

    def __init__(self, control: socket.socket, isolation: Isolation, folder: str, parent: int):
        self._control, self._isolation, self._folder, self._parent = control, isolation, folder, parent
        self._null = os.open("/dev/null", os.O_RDWR)
        self._self = (os.pidfd_open(os.getpid()),) if hasattr(os, "pidfd_open") else ()
        self._buffer = b""

    def serve(self) -> None:
        """Serve requests until the client is gone."""
        while True:
            if not self._ready(1.0):
                continue
            data, files, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
            for request in self._heard(data):
                if "kill" not in request:  # that of a run that has just ended
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
            if self._isolation.scratch is None:
                shutil.rmtree(scratch, ignore_errors=True)
        return {"why": why, "broken": problem, "status": status}

    def _jobs(self, kind: str, files: list[int]) -> list[Job]:
        """The processes to start, the one that is waited for last; further files are added to `files`."""
        if kind != "tests":
            return [(CANDIDATE, run_program if kind == "program" else examine_together, files)]
        code, tests, result = files
        ours, theirs = (end.detach() for end in socket.socketpair())
        files += [ours, theirs]
        return [(CANDIDATE, serve_calls, (code, ours)), (TESTS, examine, (tests, theirs, result))]

    def _watch(self, number: int, life: int, deadline: float) -> str:
        """Wait for the end of a process; returns why the wait is over."""
        while (left := deadline - time.monotonic()) > 0:
            ready = self._ready(left, life)
            if life in ready:
                return "ended"
            if ready and {"kill": number} in self._heard(self._control.recv(1 << 16)):
                return "killed"
        return "timeout"

    def _ready(self, seconds: float, *more: int) -> list[int]:
        """What becomes readable of the control socket and `more` within `seconds`, at most one."""
        readable = select.select([self._control.fileno(), *more], [], [], min(seconds, 1.0))[0]
        # A process that the parent forked may keep the socket open when the parent is gone.
        if not readable and os.getppid() != self._parent:
            sys.exit()
        return readable

    def _heard(self, data: bytes) -> list[dict[str, Any]]:
        """The requests completed by this data; no data means that the client is gone."""
        if not data:
            sys.exit()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _start(self, job: Job, limits: Limits, seconds: float, scratch: str) -> Child:
        life, writing = os.pipe()
        try:
            pid = kernel.clone(self._isolation.namespaces[job[0]])
            if pid == 0:
                self._become(job, writing, limits, seconds, scratch)
        except OSError:
            os.close(life)
            raise
        finally:
            os.close(writing)
        return Child(pid, life)

    def _become(self, job: Job, writing: int, limits: Limits, seconds: float, scratch: str) -> NoReturn:
        """In a new process: isolate it, do its job, and end."""
        status, (role, act, files) = 1, job
        with contextlib.suppress(BaseException):  # never back into the server's own code
            _, _, _, writing, *others = arrange([*(self._null,) * 3, writing, *files, *self._self])
            numbers, server = others[: len(files)], others[len(files) :]
            try:
                if os.environ["TMPDIR"] != scratch:
                    os.environ["HOME"] = os.environ["TMPDIR"] = scratch
                alive = server[0] if server else None
                isolate(self._isolation, limits, seconds, role=role, scratch=scratch, server=alive)
            except BaseException as error:
                os.write(writing, f" {type(error).__name__}: {error}".encode())
                raise
            os.write(writing, LOCKED)
            status = act(*numbers) or 0
        os._exit(status)

    def _scratch(self, number: int) -> str:
        """A folder for the files of a run, where it has no file system of its own."""
        if self._isolation.scratch is not None:
            return self._isolation.scratch
        path = os.path.join(self._folder, str(number))
        os.mkdir(path, 0o700)
        if self._isolation.uids is not None:
            os.chown(path, self._isolation.uids[CANDIDATE], self._isolation.uids[CANDIDATE])
        return path


def arrange(files: list[int]) -> list[int]:
    """Make these files the numbers from 0 on, and close all others."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, len(files) + 10) for file in files]
    for number, file in enumerate(high):
        os.dup2(file, number)
    os.closerange(len(files), MOST_FILES)
    return list(range(len(files)))


def warm_up() -> None:
    """Import what programs use, and seed `random`: the same for each, so that verdicts are reproducible."""
    register = os.register_at_fork
    os.register_at_fork = lambda **_: None  # `random` would take time for a new seed after each fork
    try:
        for name in WARM:
            import_module(name)
    finally:
        os.register_at_fork = register
    import_module("random").seed(0)


def main(settings: dict[str, Any]) -> None:
    """Serve the process that started this one; `settings` comes from `palestra.tasks.sandbox.client`."""
    folder, control = settings["folder"], socket.socket(fileno=settings["control"])
    try:
        warm_up()
        sys.path[:] = settings["modules"]
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, this is killed before the run
        try:
            isolation, problem = prepare(Way(*settings["way"]), folder, settings["readable"]), None
        except OSError as error:
            isolation, problem = None, str(error)
        control.sendall(json.dumps({"broken": problem}).encode() + b"\n")
        if isolation is None:
            return
        if sys.platform == "linux":
            kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        if isolation.level == "namespaces":
            filter.program(1)  # cached for all processes: each is the first in its namespace
        gc.collect()
        gc.freeze()
        Server(control, isolation, folder, settings["parent"]).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
