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
from typing import Any, Protocol

from palestra.errors import PalestraError, UsageError
from palestra.rollout.agents.lines import LONGEST_LINE, LineCalls
from palestra.rollout.gateway.server import Gateway
from palestra.spec.imports import OBJECT
from palestra.spec.kinds.posttrain import AgentSpec
from palestra.tasks.sandbox import confined
from palestra.work.groups import Guarded

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
    return Commands(spec, gateway) if spec.command else Functions(spec)


class Commands:
    """A process per agent; in the sandbox the gateway listens in each one's network, at the address it has outside."""

    def __init__(self, spec: AgentSpec, gateway: Gateway):
        self._command, self._answers = list(spec.command or ()), spec.answer == "output"
        self._gateway, self._groups = gateway, Guarded()
        limits = confined.Limits() if spec.limits is None else confined.Limits(**spec.limits.model_dump())
        self._sandbox: dict[str, Any] | None = None
        if spec.sandbox:
            self._sandbox = {"own_users": confined.possible(), "limits": limits}

    async def ready(self) -> None: ...

    async def run(self, problem: Mapping[str, Any], url: str, key: str) -> str | None:
        told = variables(problem, url, key)
        if self._sandbox is None:
            return await self._ran(self._command, {**os.environ, **told})
        ours, theirs = socket.socketpair()
        line = confined.wrapped(self._command, theirs.fileno(), int(url.rpartition(":")[2]), **self._sandbox)
        program = asyncio.ensure_future(self._ran(line, confined.environment() | told, theirs))
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

    async def _ran(self, command: list[str], environment: Mapping[str, str], *given: socket.socket) -> str | None:
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
        return printed.decode(errors="replace").strip() if self._answers else None

    def close(self) -> None:
        self._groups.close()


def variables(problem: Mapping[str, Any], url: str, key: str) -> dict[str, str]:
    """What a command is told in its environment."""
    openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    anthropic = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
    return {**openai, **anthropic, "PALESTRA_URL": url, "PALESTRA_PROBLEM": json.dumps(problem)}


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
        self._groups = groups
        groups.add(self._process.pid)
        self._calls = LineCalls(asyncio.open_connection(sock=ours, limit=LONGEST_LINE), self._gone)
        self.loaded = self._calls.open
        """Set when it has imported the function, or is gone."""

    @property
    def alive(self) -> bool:
        """Whether it can take another agent."""
        return not self._calls.ended and self._process.poll() is None

    async def run(self, job: Mapping[str, Any]) -> str | None:
        """Run one agent."""
        result = await self._calls(job)
        if "error" in result:
            raise ProgramFailed(f"the agent raised {result['error']}")
        return result["answer"]

    def close(self) -> None:
        self._groups.kill(self._process.pid)
        self._process.wait()

    async def _gone(self) -> Exception:
        self._groups.kill(self._process.pid)
        while (code := self._process.poll()) is None:  # no thread may be started while the interpreter ends
            await asyncio.sleep(0.01)
        return ProgramFailed(f"the worker of the agent {_death(code)}")
