"""Environments of OpenEnv: a small client of their servers' WebSocket (`/ws`) and schema (`/schema`).

Messages are `{"type": "reset" | "step" | "state" | "mcp" | "close", "data": …}`, one answer each, as in openenv 0.10.
"""

import itertools
import json
import re
import sys
from contextlib import ExitStack, suppress
from typing import Any
from urllib.request import urlopen

from palestra.errors import PalestraError, needs_extra
from palestra.tasks.environments.environment import Busy, EnvironmentTask, Turn
from palestra.tasks.environments.servers import address
from palestra.tasks.task import Problem

SECONDS = 600.0  # after which a server that says nothing is given up, unless the workflow has done so before
INVALID, FULL = "VALIDATION_ERROR", "CAPACITY_REACHED"
ROTATION = itertools.count()  # over the servers of a package


class OpenEnv(EnvironmentTask):
    """An environment as `openenv:http://host:port`, `openenv:<package>` or `openenv:<folder>`, a session an episode."""

    source = extra = "openenv"


class Client:
    """A session as an `Environment`. `tools` shows the tools of the environment's MCP server with the first turn.

    The servers of a package are started here, `servers` of them, with the interpreter `python`. An action is a JSON
    object, or plain text where the server's actions have one field.
    """

    def __init__(
        self, where: str, *, tools: bool = False, python: str = sys.executable, servers: int = 1, **reset: Any
    ):
        self._where, self._python, self._servers = re.sub("^ws", "http", where).rstrip("/"), python, servers
        self._tools, self._options = tools, reset
        self._socket: Any = None
        self._stack = ExitStack()

    @staticmethod
    def warm_up() -> None:
        """Import the client library."""
        with needs_extra("openenv", "openenv"):
            import websockets.sync.client as _  # noqa: F401

    def reset(self, seed: int, problem: Problem) -> Turn:
        """Begin; where all sessions of the server are taken, `Busy`."""
        try:
            self._connect()
            turn = self._turn(self._ask("reset", {"seed": seed, **self._options}))
            return Turn(f"{self._listed()}\n{turn.observation}") if self._tools else turn
        except Busy:
            self.close()
            raise

    def _connect(self) -> None:
        from websockets.sync.client import connect

        url = self._where
        if not re.match("https?://", url):
            url = address(url, self._python, next(ROTATION) % self._servers)
        try:
            with urlopen(f"{url}/schema", timeout=30) as answer:
                self._action = json.load(answer).get("action", {})
            # No pings: a server may think longer than they wait, and answers those of the server meanwhile.
            options: dict[str, Any] = {"ping_interval": None, "max_size": None, "open_timeout": 30}
            self._socket = self._stack.enter_context(connect(f"{re.sub('^http', 'ws', url)}/ws", **options))
        except (OSError, ValueError) as error:
            raise PalestraError(f"there is no OpenEnv server at {url}: {error}") from error

    def step(self, action: str) -> Turn:
        try:
            return self._turn(self._ask("step", self._parsed(action)))
        except InvalidAction as error:
            return Turn(f"Invalid action: {error}")

    def state(self) -> dict[str, Any]:
        """What the server says of the episode."""
        return self._ask("state")

    def close(self) -> None:
        """End the session, so that the server frees it at once."""
        if self._socket is not None:
            with suppress(Exception):  # a connection that is lost is closed
                self._socket.send(json.dumps({"type": "close"}))
            self._stack.close()

    def _ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # a server without a free session has said so and closed it
            self._socket.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        answer = json.loads(self._socket.recv(timeout=SECONDS))
        if answer["type"] != "error":
            return answer["data"]
        problem = answer["data"]
        if problem.get("code") == INVALID:
            errors = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problem.get("errors", [])]
            raise InvalidAction("; ".join(errors) or problem["message"])
        failure = Busy if problem.get("code") == FULL else PalestraError
        raise failure(f"the server says {problem.get('code')}: {problem.get('message')}")

    def _parsed(self, action: str) -> dict[str, Any]:
        """An action as its schema has it."""
        fields = {name: kind for name, kind in self._action.get("properties", {}).items() if name != "metadata"}
        text = re.sub(r"^```(?:json)?|```$", "", action.strip()).strip()
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):  # the latter: nested too deeply
            value = text
        if isinstance(value, dict):
            return value
        required = [name for name in self._action.get("required", []) if name in fields] or list(fields)
        if len(required) != 1:
            raise InvalidAction(f"expected a JSON object with {', '.join(fields) or 'the fields of an action'}")
        (name,) = required
        return {name: text if fields[name].get("type") == "string" else value}

    def _turn(self, data: dict[str, Any]) -> Turn:
        seen = {name: value for name, value in data["observation"].items() if name != "metadata" and value is not None}
        texts = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in seen.items()]
        only = next(iter(seen.values())) if len(seen) == 1 else None
        text = only if isinstance(only, str) else "\n".join(texts)
        return Turn(text, {0: float(data.get("reward") or 0.0)}, bool(data.get("done")))

    def _listed(self) -> str:
        answer = self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        if answer.get("error"):
            raise PalestraError(f"the server has no list of tools: {answer['error'].get('message')}")
        tools = answer["result"]["tools"]
        lines = [f"{one['name']}({', '.join(one['inputSchema'].get('properties', {}))}): {one.get('description') or ''}"
                 for one in tools]  # fmt: skip
        return "Tools:\n" + "\n".join(lines)


class InvalidAction(PalestraError):
    """An action that the server's schema refuses; the message is for the model that wrote it."""
