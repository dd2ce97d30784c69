"""Process groups that end with this process, however it ends."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

from palestra.work import guard


class Guarded:
    """Process groups that a guard kills when this process is gone, even by SIGKILL. Any thread may call."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid())]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def add(self, pid: int) -> None:
        """A group that has started."""
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        """A group that has ended."""
        self._tell(f"-{pid}")

    def kill(self, pid: int) -> None:
        """Kill a group, or what is left of it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self.forget(pid)

    def close(self) -> None:
        """Groups that are left are killed."""
        self._guard.communicate()

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # a guard that was killed, or closed
            self._guard.stdin.write(f"{line}\n".encode())
