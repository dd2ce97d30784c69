"""Agents as programs: a command per episode, or a function in worker processes; none outlives this process."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from palestra.errors import PalestraError, UsageError
from palestra.rollout.gateway.server import Gateway
from palestra.spec.imports import OBJECT
from palestra.spec.kinds.posttrain import AgentSpec
from palestra.tasks.sandbox import confined
from palestra.work import guard

OUTPUT_BYTES = 1 << 20
"""Of what a command prints; the rest is read and dropped."""
BOOT = """
import json, sys
descriptor, name, sys.path = json.loads(sys.argv.pop())
from palestra.rollout.agents.worker import main
main(descriptor, name)
"""


class ProgramFailed(PalestraError):
    """An agent ended with an error or was killed."""


class Programs(Protocol):
    """Runs agents."""

    async def ready(self) -> None:
        """Wait until an agent can start at once."""
        ...

    async def run(self, problem: Mapping[str, Any], url: str, key: str) -> str | None:
        """Run one agent to its end; its answer, if it has given one. Cancelling it kills it."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...


def make_programs(spec: AgentSpec, gateway: Gateway) -> Programs:
    """What runs the agents of a spec."""
    if not spec.command:
        return Functions(spec)
    commands = Commands(spec.command, spec.answer == "output")
    if not spec.sandbox:
        return commands
    limits = confined.Limits() if spec.limits is None else confined.Limits(**spec.limits.model_dump())
    return Confined(commands, gateway, limits)


class Guarded:
    """Process groups that are killed when this process is gone, even by SIGKILL."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid())]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def add(self, pid: int) -> None:
        """A group that has started."""
        self._tell(f"+{pid}")

    def kill(self, pid: int) -> None:
        """Kill a group, or what is left of it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self._tell(f"-{pid}")

    def close(self) -> None:
        """Groups that are left are killed."""
        self._guard.communicate()

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()


class Commands:
    """A process per agent."""

    def __init__(self, command: list[str], output: bool):
        """With `output` what it prints is its answer."""
        self.command, self._output, self._groups = command, output, Guarded()

    async def ready(self) -> None: ...

    async def run(self, problem: Mapping[str, Any], url: str, key: str) -> str | None:
        return await self.started(self.command, {**os.environ, **variables(problem, url, key)})

    async def started(self, command: list[str], environment: Mapping[str, str], *given: socket.socket) -> str | None:
        """Run a command line to its end, with sockets that are then its own; what it printed, if that is its answer."""
        settings: dict[str, Any] = {"env": environment, "pass_fds": [one.fileno() for one in given]}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        try:
            process = await asyncio.create_subprocess_exec(*command, **settings, **pipes, start_new_session=True)
        except OSError as error:
            raise ProgramFailed(f"cannot start {command[0]}: {error.strerror or error}") from error
        finally:
            for one in given:
                one.close()
        self._groups.add(process.pid)
        try:
            reading = asyncio.gather(_ends(process.stdout), _ends(process.stderr))
            code = await process.wait()
            self._groups.kill(process.pid)  # what it left running would hold its pipes open
            (printed, _), (_, said) = await reading
        finally:
            self._groups.kill(process.pid)
        if code != 0:
            complaint = said.decode(errors="replace").strip().rpartition("\n")[2][-300:]
            raise ProgramFailed(f"the agent {_death(code)}{f': {complaint}' if complaint else ''}")
        return printed.decode(errors="replace").strip() if self._output else None

    def close(self) -> None:
        self._groups.close()


def variables(problem: Mapping[str, Any], url: str, key: str) -> dict[str, str]:
    """What a command is told in its environment."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "PALESTRA_URL": url,
        "PALESTRA_PROBLEM": json.dumps(problem),
    }


class Confined:
    """Commands in namespaces of their own: the gateway listens in each, at the address that it has outside."""

    def __init__(self, commands: Commands, gateway: Gateway, limits: confined.Limits):
        self._commands, self._gateway = commands, gateway
        self._settings: dict[str, Any] = {"own_users": confined.possible(), "limits": limits}

    async def ready(self) -> None: ...

    async def run(self, problem: Mapping[str, Any], url: str, key: str) -> str | None:
        ours, theirs = socket.socketpair()
        port = int(url.rpartition(":")[2])
        line = confined.wrapped(self._commands.command, theirs.fileno(), port, **self._settings)
        told = confined.environment() | variables(problem, url, key)
        program = asyncio.ensure_future(self._commands.started(line, told, theirs))
        server: asyncio.Server | None = None
        try:
            await _readable(ours)
            server = await self._gateway.listen(confined.received(ours))
            return await program
        except OSError as error:
            raise ProgramFailed(f"the agent could not be confined: {error}") from error
        finally:
            ours.close()
            if server is not None:
                server.close()
            program.cancel()
            await asyncio.gather(program, return_exceptions=True)

    def close(self) -> None:
        self._commands.close()


async def _readable(connection: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await asyncio.wait_for(ready.wait(), confined.SECONDS)
    finally:
        loop.remove_reader(connection)


async def _ends(stream: asyncio.StreamReader | None) -> tuple[bytes, bytes]:
    """The beginning and the end of what is printed; all of it is read, so that nobody waits."""
    head = tail = b""
    while stream is not None and (data := await stream.read(1 << 16)):
        head, tail = head + data[: OUTPUT_BYTES - len(head)], (tail + data)[-2000:]
    return head, tail


def _death(code: int) -> str:
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


class Functions:
    """Worker processes that take agents in turn; one that dies fails its agents, and the next agent starts another."""

    def __init__(self, spec: AgentSpec):
        assert spec.function is not None
        if spec.function.startswith(OBJECT):
            raise UsageError("rollout.workflow.function: an agent runs in a process of its own: name it as module:name")
        self._name, self._groups = spec.function, Guarded()
        self._workers: deque[Worker | None] = deque([None] * spec.processes)

    async def ready(self) -> None:
        await self._next().loaded.wait()

    async def run(self, problem: Mapping[str, Any], url: str, key: str) -> str | None:
        worker = self._next()
        self._workers.rotate(-1)
        return await worker.run({"problem": problem, "url": url, "key": key})

    def _next(self) -> "Worker":
        worker = self._workers[0]
        if worker is None or not worker.alive:
            worker = self._workers[0] = Worker(self._name, self._groups)
        return worker

    def close(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.close()
        self._groups.close()


class Worker:
    """A worker process, and the agents it runs."""

    def __init__(self, name: str, groups: Guarded):
        ours, theirs = socket.socketpair()
        with theirs:
            argument = json.dumps([theirs.fileno(), name, [os.getcwd(), *map(str, sys.path)]])
            command = [sys.executable, "-P", "-c", BOOT, argument]
            fds = [theirs.fileno()]
            self._process = subprocess.Popen(command, pass_fds=fds, start_new_session=True, stdin=subprocess.DEVNULL)
        ours.setblocking(False)
        self._groups, self._socket = groups, ours
        groups.add(self._process.pid)
        self.loaded = asyncio.Event()
        """Set when it has imported the function, or is gone."""
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._writer: asyncio.StreamWriter | None = None
        self._early: list[bytes] = []  # what is sent before the connection is open
        self._reading = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """Whether it can take another agent."""
        return not self._reading.done() and self._process.poll() is None

    async def run(self, job: Mapping[str, Any]) -> str | None:
        """Run one agent."""
        number, self._next = self._next, self._next + 1
        self._waiting[number] = done = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, **job})
            result = await done
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            del self._waiting[number]
        if "error" in result:
            raise ProgramFailed(f"the agent raised {result['error']}")
        return result["answer"]

    def close(self) -> None:
        self._groups.kill(self._process.pid)
        self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if self._writer is None:
            self._early.append(line)
        else:
            self._writer.write(line)

    async def _read(self) -> None:
        """Hand out results until the worker is gone; then fail what waits."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=1 << 26)
        for line in self._early:
            self._writer.write(line)
        with suppress(ConnectionError, ValueError):  # it may be killed in the middle of a line
            while line := await reader.readline():
                result = json.loads(line)
                self.loaded.set()
                if (waiting := self._waiting.get(result["id"])) is not None and not waiting.done():
                    waiting.set_result(result)
        self.loaded.set()
        self._groups.kill(self._process.pid)
        while (code := self._process.poll()) is None:  # no thread may be started while the interpreter ends
            await asyncio.sleep(0.01)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ProgramFailed(f"the worker of the agent {_death(code)}"))
