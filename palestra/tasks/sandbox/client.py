"""The client of a warm server: starts it, sends it files to run, reads their output, ends it."""

import contextlib
import io
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO

from palestra.errors import PalestraError
from palestra.tasks.sandbox.levels import Limits, Way, import_path, readable

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


class NotIsolated(PalestraError):
    """A program could not be isolated."""

    def __init__(self, why: str):
        super().__init__(f"a program could not be isolated: {why}")
        self.why = why


class Output:
    """The output of a run, read from a pipe: at most `most` bytes."""

    def __init__(self, reading: int, most: int):
        self.file, self._most, self._data = io.FileIO(reading), most, bytearray()
        os.set_blocking(reading, False)

    @property
    def overflown(self) -> bool:
        return len(self._data) > self._most

    @property
    def text(self) -> str:
        return self._data[: self._most].decode("utf-8", "replace")

    def read(self) -> bool:
        """Read what is available; False at the end of the pipe, or beyond the limit."""
        data = self.file.read(1 << 16)
        self._data += data or b""
        return bool(data) and not self.overflown


class Client:
    """One server, which runs one thing at a time."""

    def __init__(self, way: Way):
        """Start a server and run an empty program in it; NotIsolated where the machine does not allow this way."""
        self.level = way.level
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
            "way": way,
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
            self._reply(START_SECONDS)
            self.run("program", START_SECONDS, Limits(), ["", ""], [0, 0])
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(
        self, kind: str, seconds: float, limits: Limits, texts: Sequence[str], most: Sequence[int]
    ) -> tuple[str, list[int], list[str]]:
        """Run a job whose files are these texts, and a pipe for as many bytes as each of `most` says.

        Returns why it ended (ended, timeout, output), the exit codes of its processes, and its outputs.
        """
        self._runs += 1
        request = {"run": self._runs, "kind": kind, "seconds": seconds, "limits": asdict(limits)}
        with contextlib.ExitStack() as stack:
            with contextlib.ExitStack() as given:  # closed here once the server has them
                files = [given.enter_context(_written(text)) for text in texts]
                outputs = []
                for limit in most:
                    reading, writing = os.pipe()
                    outputs.append(Output(reading, limit))
                    stack.enter_context(outputs[-1].file)
                    files.append(given.enter_context(io.FileIO(writing, "w")))
                try:
                    socket.send_fds(self._control, [_line(request)], [file.fileno() for file in files])
                except OSError as error:
                    raise self._gone() from error
            reply = self._reply(seconds + GRACE_SECONDS, outputs)
            for output in outputs:  # the rest: all its writers are gone
                while output.read():
                    pass
            why = "output" if any(output.overflown for output in outputs) else reply["why"]
            return why, reply["status"], [output.text for output in outputs]

    def end(self) -> None:
        """Kill it, and with it what it runs."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _reply(self, seconds: float, outputs: Sequence[Output] = ()) -> dict[str, Any]:
        """The next line from the server; outputs are read meanwhile."""
        deadline = time.monotonic() + seconds
        with selectors.PollSelector() as selector:  # select() is limited to 1024 files
            selector.register(self._control, selectors.EVENT_READ)
            for output in outputs:
                selector.register(output.file, selectors.EVENT_READ, output)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PalestraError("the sandbox server does not answer; the next call starts another")
                for key, _ in selector.select(left):
                    if key.data is None:
                        self._receive()
                    elif not key.data.read():
                        selector.unregister(key.fileobj)
                        if key.data.overflown:
                            self._control.sendall(_line({"kill": self._runs}))
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(line)
        if reply["broken"]:
            raise NotIsolated(reply["broken"].strip())
        return reply

    def _receive(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise self._gone()
        self._buffer += data

    def _gone(self) -> PalestraError:
        self._process.kill()
        data = b"" if self._process.stderr is None else self._process.stderr.read()
        why = data.decode(errors="replace").strip() or f"it ended with {self._process.wait()} and no message"
        return PalestraError(f"the sandbox server is gone: {why}")


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


@contextlib.contextmanager
def _written(text: str) -> Generator[BinaryIO]:
    """An unnamed file with a text in it, at its beginning."""
    with open(os.memfd_create("sandbox"), "r+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        yield file
