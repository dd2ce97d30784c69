"""The client of a warm server: starts it, sends it files to run, reads their output, ends it."""

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from palestra.errors import PalestraError, UsageError
from palestra.tasks.sandbox.levels import Level, Limits, import_path, readable

START_SECONDS = 60.0  # for a server to start, on a busy machine
GRACE_SECONDS = 30.0  # beyond the wall clock of a run, for its server to reply
BOOT = """
import json, sys
settings = json.loads(sys.argv.pop())
sys.path[:] = settings["path"]
from palestra.tasks.sandbox.server import main
main(settings)
"""
# Nothing of this process's environment; a fixed hash seed, so that sets have one order and verdicts are reproducible.
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"HOME": "/tmp", "TMPDIR": "/tmp"}


class Client:
    """One server, which runs one thing at a time."""

    def __init__(self, strongest: Level, weakest: Level):
        self._folder = tempfile.mkdtemp(prefix="palestra_sandbox_")
        os.chmod(self._folder, 0o711)  # the dedicated user has to reach the folder of a run in it
        self._control, theirs = socket.socketpair()
        self._buffer, self._runs = b"", 0
        modules = import_path()
        settings = {
            "control": theirs.fileno(),
            "parent": os.getpid(),
            "path": [path for path in sys.path if path],
            "modules": modules,
            "readable": readable(modules),
            "folder": self._folder,
            "strongest": strongest,
            "weakest": weakest,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-c", BOOT, json.dumps(settings)],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            hello = self._reply(time.monotonic() + START_SECONDS, Files())
            if hello["level"] is None:
                raise UsageError(_refusal(weakest, hello["reasons"]))
        except BaseException:
            self.end()
            raise
        self.level: Level = hello["level"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, kind: str, seconds: float, limits: Limits, inputs: list[int], files: "Files") -> dict[str, Any]:
        """Run a job with its files, read its pipes, and return how it ended."""
        self._runs += 1
        request = {"run": self._runs, "kind": kind, "seconds": seconds, "limits": asdict(limits)}
        try:
            socket.send_fds(self._control, [json.dumps(request).encode() + b"\n"], inputs)
        except OSError as error:
            raise PalestraError(f"the sandbox server is gone: {self._stderr()}") from error
        files.given_away()
        reply = self._reply(time.monotonic() + seconds + GRACE_SECONDS, files)
        files.drain()
        if reply["broken"]:
            raise PalestraError(f"a program could not be isolated: {reply['broken'].strip()}")
        return reply

    def end(self) -> None:
        """Kill it, and with it what it runs."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _reply(self, deadline: float, files: "Files") -> dict[str, Any]:
        """The next line from the server; pipes are read meanwhile."""
        killed = False
        with selectors.PollSelector() as selector:  # select() is limited to 1024 files
            selector.register(self._control, selectors.EVENT_READ)
            for number in files.reading():
                selector.register(number, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PalestraError("the sandbox server does not answer; the next call starts another")
                for key, _ in selector.select(left):
                    if key.fd == self._control.fileno():
                        self._receive()
                    elif not files.read(key.fd):
                        selector.unregister(key.fd)
                if files.overflown and not killed:
                    killed = True
                    self._control.sendall(json.dumps({"kill": self._runs}).encode() + b"\n")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _receive(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise PalestraError(f"the sandbox server is gone: {self._stderr()}")
        self._buffer += data

    def _stderr(self) -> str:
        self._process.kill()
        data = b"" if self._process.stderr is None else self._process.stderr.read()
        return data.decode(errors="replace").strip() or f"it ended with {self._process.wait()} and no message"


@dataclass
class Pipe:
    """The output of a run through a pipe."""

    most: int
    """The limit on bytes that are read."""
    data: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


class Files:
    """The files of a run: its inputs, and the pipes that are read while it runs."""

    def __init__(self) -> None:
        self._given: list[int] = []
        self._open: dict[int, Pipe] = {}
        self.overflown = False
        """Whether a pipe exceeded its limit."""

    def written(self, text: str) -> int:
        """An unnamed file with a text in it."""
        if hasattr(os, "memfd_create"):
            number = os.memfd_create("sandbox")
        else:
            with tempfile.TemporaryFile() as file:
                number = os.dup(file.fileno())
        self._given.append(number)
        data = text.encode("utf-8", "surrogatepass")
        while data:
            data = data[os.write(number, data) :]
        os.lseek(number, 0, os.SEEK_SET)  # its reader continues at its writer's offset
        return number

    def pipe(self, most: int) -> tuple[int, Pipe]:
        """The writing end of a pipe, and its output."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._given.append(writing)
        self._open[reading] = pipe = Pipe(most)
        return writing, pipe

    def given_away(self) -> None:
        """Close what the server has received."""
        while self._given:
            os.close(self._given.pop())

    def reading(self) -> list[int]:
        """The pipes that are still open."""
        return list(self._open)

    def read(self, number: int) -> bool:
        """Read what is available; False at the end of the pipe, or beyond a limit."""
        pipe = self._open[number]
        with contextlib.suppress(BlockingIOError):
            data = os.read(number, 1 << 16)
            pipe.data += data
            if len(pipe.data) > pipe.most:
                self.overflown = True
                del pipe.data[pipe.most :]
            if not data or self.overflown:
                os.close(number)
                del self._open[number]
                return False
        return True

    def drain(self) -> None:
        """Read the rest after a run has ended: all its writers are gone."""
        for number in self.reading():
            while self.read(number):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.given_away()
        for number in self._open:
            os.close(number)
        self._open.clear()


def _refusal(weakest: Level, reasons: list[str]) -> str:
    tried = "; ".join(reasons) or "not Linux on x86-64 or 64-bit ARM"
    advice = (
        "Allow user namespaces (Debian: sysctl kernel.unprivileged_userns_clone=1; Ubuntu: sysctl "
        "kernel.apparmor_restrict_unprivileged_userns=0), or run as root in a container"
    )
    if weakest != "weak":
        advice += ", or accept a weak sandbox with `args: {sandbox: weak}`"
    return f"code cannot be run safely on this machine ({tried}). {advice}."
