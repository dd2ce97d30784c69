"""A program that this process starts: its output redacted in a log, its whole group ended even by a kill of us."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from palestra.errors import UsageError
from palestra.work import redact
from palestra.work.groups import Guarded

END_SECONDS = 10.0  # for the program to end when asked to
DRAIN_SECONDS = 5.0  # for its last output to be written
TAIL_BYTES = 4000


class Child(AbstractContextManager["Child"]):
    """A running program, in a process group of its own; leaving the context ends it."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None):
        self.command, self.log = list(command), log
        log.unlink(missing_ok=True)
        merged = {**os.environ, **(env or {})}
        script = {"start_new_session": True, "env": merged}
        self._groups = Guarded()
        read, write = os.pipe()
        try:
            redacting = [sys.executable, "-I", "-S", redact.__file__]
            self._redacting = subprocess.Popen(redacting, stdin=read, **script)
            os.write(write, os.fsencode(log) + b"\0")
            output = {"stdin": subprocess.DEVNULL, "stdout": write, "stderr": write}
            self._process = subprocess.Popen(self.command, **output, **script)
        except OSError as error:
            self._groups.close()
            raise UsageError(f"cannot start {self.command[0]}: {error.strerror or error}") from error
        finally:
            os.close(read)
            os.close(write)
        self._groups.add(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; when it has ended, so has its log."""
        code = self._process.poll()
        if code is not None:
            self._drain()
        return code

    def tail(self) -> str:
        """The end of what it printed."""
        with suppress(FileNotFoundError):
            return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        return ""

    def __exit__(self, *_: object) -> None:
        """Ask it to end, then kill its group; its last output is in the log when this returns."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._groups.kill(self._process.pid)
        self._process.wait()
        self._groups.close()
        self._drain()

    def _drain(self) -> None:
        with suppress(subprocess.TimeoutExpired):  # a child of it may still print
            self._redacting.wait(DRAIN_SECONDS)
