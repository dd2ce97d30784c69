"""Servers of OpenEnv packages: started when first needed, started again if they die, ended with this process."""

import atexit
import re
import socket
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from palestra.errors import UsageError
from palestra.tasks.environments.environment import Busy
from palestra.work.child import Child

START_SECONDS = 300.0
_lock = threading.Lock()  # games begin in many threads
_servers: dict[tuple[str, str, int], "Server"] = {}
_stack = ExitStack()
atexit.register(_stack.close)


def address(package: str, python: str, number: int) -> str:
    """The URL of a package's server, of which there may be several by number; `Busy` while it starts."""
    key = package, python, number
    with _lock:
        if key not in _servers or (_servers[key].answered and _servers[key].child.exit_code() is not None):
            _servers[key] = Server(package, python)
        return _servers[key].url()


class Server:
    """A server of a package in a process of its own."""

    def __init__(self, package: str, python: str):
        """`<package>.server.app:app` is what OpenEnv's own template has; a folder is that of its `openenv.yaml`."""
        if Path(package).is_dir():
            application = ["server.app:app", "--app-dir", package]
        elif re.fullmatch(r"\w+(\.\w+)*", package):
            application = [f"{package}.server.app:app"]
        else:
            raise UsageError(f"openenv:{package}: expected the URL of a server, an installed package or a folder")
        self.package, self.python, self.answered = package, python, False
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--log-level", "warning"]
        log = Path(_stack.enter_context(tempfile.TemporaryDirectory(prefix="palestra-openenv-"))) / "log.txt"
        self.child = _stack.enter_context(Child([python, "-m", "uvicorn", *application, *options], log))
        self._deadline = time.monotonic() + START_SECONDS

    def url(self) -> str:
        """Where it answers; `Busy` until it does."""
        with socket.socket() as probe:
            self.answered = self.answered or probe.connect_ex(("127.0.0.1", self._port)) == 0
        if self.answered:
            return f"http://127.0.0.1:{self._port}"
        if self.child.exit_code() is not None:
            last = self.child.tail().rpartition("\n")[2]
            raise UsageError(f"openenv:{self.package}: its server ended: {last}. Is it installed for {self.python}?")
        if time.monotonic() > self._deadline:
            raise UsageError(f"openenv:{self.package}: its server does not answer: {self.child.tail()[-300:]}")
        raise Busy(f"the server of {self.package} starts")
