"""The tools of MCP servers for the tool workflow: programs that speak over stdin and stdout, or URLs.

Sessions live on an event loop of their own; a call comes from any other.
"""

import asyncio
import json
import os
import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from palestra.errors import UsageError, needs_extra
from palestra.rollout.event_loop import LoopThread

SECONDS = 30.0  # for a server to start, and for a call


class McpServers:
    """Connections to MCP servers, each a command line or a URL such as http://localhost:8000/mcp."""

    def __init__(self, servers: Sequence[str]):
        with needs_extra("tools of MCP servers", "mcp"):
            import mcp as _  # noqa: F401
        self._loop, self._sessions = LoopThread("mcp"), []
        self.tools: dict[str, Any] = {}
        """From the name of a tool to a function of a call's input."""
        try:
            self._loop.start(self._open(servers)).result()
        except BaseException:
            self.close()
            raise

    async def _open(self, servers: Sequence[str]) -> None:
        for server in servers:
            started: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()
            self._sessions.append(asyncio.create_task(_session(server, started)))
            try:
                client, listed = await asyncio.wait_for(started, SECONDS)
            except Exception as error:
                why = "it did not answer" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
                raise UsageError(f"rollout.workflow.mcp: no MCP server at {server!r} ({why})") from error
            for tool in listed.tools:
                if tool.name in self.tools:
                    raise UsageError(f"rollout.workflow.mcp: two tools are called {tool.name!r}")
                self.tools[tool.name] = self._tool(client, tool.name, tool.input_schema)

    def _tool(self, client: Any, name: str, schema: dict[str, Any]) -> Any:
        async def run(text: str) -> str:
            try:
                arguments = arguments_of(text, schema)
            except ValueError as error:
                return f"error: {error}"
            return await asyncio.wrap_future(self._loop.start(_called(client, name, arguments)))

        return run

    def close(self) -> None:
        """End the sessions, and the programs with them."""
        self._loop.close()


async def _session(server: str, started: asyncio.Future[tuple[Any, Any]]) -> None:
    """One task opens and closes a session, as its library asks for; it is cancelled when the loop ends."""
    from mcp.client.client import Client
    from mcp.client.stdio import StdioServerParameters

    try:
        async with AsyncExitStack() as stack:
            if "://" in server:
                client = await stack.enter_async_context(Client(server))
            else:
                command, *args = shlex.split(server)
                program = StdioServerParameters(command=command, args=args, cwd=os.getcwd())
                client = await stack.enter_async_context(Client(program))
            started.set_result((client, await client.list_tools()))
            await asyncio.Event().wait()
    except Exception as error:
        if not started.done():
            started.set_exception(error)


async def _called(client: Any, name: str, arguments: dict[str, Any]) -> str:
    try:
        result = await asyncio.wait_for(client.call_tool(name, arguments), SECONDS)
    except TimeoutError:
        return f"error: it took longer than {SECONDS:g} seconds"
    except Exception as error:  # the server's answer to a wrong call: for the model to read
        return f"error: {error}"
    text = "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)
    return f"error: {text}" if result.is_error else text


def arguments_of(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call: a JSON object, or the value itself where the tool has one parameter."""
    parameters = schema.get("properties", {})
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # the latter: nested too deeply
        value = text.strip()
    if isinstance(value, dict) and (len(parameters) != 1 or value.keys() <= parameters.keys()):
        return value
    if len(parameters) == 1:
        ((name, kind),) = parameters.items()
        return {name: text.strip() if kind.get("type") == "string" else value}
    if not parameters and not text.strip():
        return {}
    raise ValueError(f"expected a JSON object with {', '.join(parameters) or 'nothing'}")
