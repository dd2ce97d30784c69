"""Bad clients against a live gateway, for minutes: half-open sockets, slow readers, idle sessions, killed processes.

    python benchmarks/gateway.py soak [--minutes 5] [--wave 10]

Every few seconds a wave begins beside those before it. Well-behaved sessions of two turns run among them, and all must
succeed. At the end everything is given the time that the gateway's limits allow, and then counted: requests, slots and
pages of the engine, sessions, connections and tasks of the gateway, threads, files and child processes of this one. A
JSON line; the exit code is 1 where anything is left that was not there before.
"""

import asyncio
import gc
import json
import signal
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from typing import Any

import psutil

from palestra.data.tokenizers import Tokenizer
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Sampling
from palestra.rollout.gateway.dialect import Source
from palestra.rollout.gateway.server import Gateway, new_key
from palestra.rollout.gateway.session import Session

HALF_OPEN, SLOW, IDLE, KILLED, GOOD = 50, 4, 20, 4, 4
"""Of each kind in a wave."""
CHAT: list[Any] = [{"role": "user", "content": "Count to ten."}]
LONG = {"messages": CHAT, "stream": True, "n": 4, "max_tokens": 200, "logprobs": True, "top_logprobs": 5}
CONTEXT = 1024
DRAIN_SECONDS = 150.0
"""More than the longest limit of the gateway, on a busy machine."""
KILLED_CLIENT = """
import socket, sys
host, port, *requests = sys.argv[1:]
held = []
for request in requests:
    held.append(socket.create_connection((host, int(port))))
    held[-1].sendall(request.encode())
held[-1].recv(1)
print("begun", flush=True)
sys.stdin.read()
"""


class Soak:
    """A gateway, its engine, and what bad clients do to them."""

    def __init__(self, generator: LocalGenerator, gateway: Gateway, tokenizer: Tokenizer):
        self.generator, self.gateway, self.tokenizer = generator, gateway, tokenizer
        self.done: Counter[str] = Counter()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        gateway._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # who does not read is soon noticed
        self._host, self._port = gateway._socket.getsockname()

    def counts(self) -> dict[str, int]:
        """All that could leak."""

        async def tasks() -> int:
            return len(asyncio.all_tasks())

        gc.collect()
        engine, process = self.generator.engine.metrics(), psutil.Process()
        return {
            "requests": int(engine["requests"]),
            "slots": int(engine["slots"] - engine["free_slots"]),
            "pages": int(engine["pages"] - engine["free_pages"]),
            "sessions": len(self.gateway.sessions.open),
            "session_objects": len(self._sessions),
            "connections": len(self.gateway._server.server_state.connections),
            "tasks": self.gateway.thread.start(tasks()).result(),
            "threads": threading.active_count(),
            "files": process.num_fds(),
            "children": len(process.children()),
        }

    async def run(self, seconds: float, wave: float) -> dict[str, Any]:
        """Waves for so long, then what is left of them."""
        await asyncio.gather(*(self._good() for _ in range(GOOD)))
        before = await self._settled()
        memory, waves, end = [], [], time.monotonic() + seconds
        while True:
            waves.append(asyncio.create_task(self._wave()))
            memory.append(psutil.Process().memory_info().rss >> 20)
            if (left := end - time.monotonic()) <= 0:
                break
            await asyncio.sleep(min(wave, left))
        number = len(waves)
        await asyncio.gather(*waves)
        waves.clear()
        deadline = time.monotonic() + DRAIN_SECONDS
        while leaked := {name: more for name, now in self.counts().items() if (more := now - before[name]) > 0}:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.25)
        about = {"seconds": round(seconds), "waves": number, **self.done, "rss_mib": [memory[0], memory[-1]]}
        return {**about, "before": before, "after": self.counts(), "leaked": leaked}

    async def _settled(self) -> dict[str, int]:
        """The counts when nothing is under way any more."""
        before = self.counts()
        while True:
            await asyncio.sleep(0.25)
            now = self.counts()
            if now == before and not any(now[name] for name in ("requests", "sessions", "connections")):
                return now
            before = now

    async def _wave(self) -> None:
        half_open = (self._half_open(place) for place in range(HALF_OPEN))
        slow, idle = (self._slow() for _ in range(SLOW)), (self._idle(place) for place in range(IDLE))
        await asyncio.gather(*half_open, *slow, *idle, self._killed(), *(self._good() for _ in range(GOOD)))

    def _opened(self, sampling: Sampling | None = None) -> Session:
        async def opened() -> Session:
            settings: dict[str, Any] = {"context": CONTEXT, "model": "policy", "sampling": sampling, "format": "json"}
            session = Session(new_key(), Source(self.generator), self.tokenizer, **settings)
            self.gateway.sessions.add(session)
            return session

        session = self.gateway.thread.start(opened()).result()
        self._sessions.add(session)
        return session

    async def _clients(self) -> set[Any]:
        """The addresses that are connected."""

        async def there() -> set[Any]:
            connections: set[Any] = self.gateway._server.server_state.connections
            return {connection.client for connection in connections}

        return await asyncio.wrap_future(self.gateway.thread.start(there()))

    def _request(self, key: str, body: Any) -> bytes:
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {key}\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def _half_open(self, place: int) -> None:
        """Connects, perhaps sends a part of a request's headers or body, and waits until it is disconnected."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        whole = self._request("nobody", {"messages": CHAT})
        writer.write(whole[: (0, 20, 80, len(whole) - 10)[place % 4]])
        await _until_closed(reader, writer)
        self.done["half_open"] += 1

    async def _slow(self) -> None:
        """Asks for a long stream and reads none of it until it is disconnected."""
        session = self._opened()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (self._host, self._port))
        connection.sendall(self._request(session.key, LONG))
        # What lies unread in the kernel's buffers hides from this side that the other has closed.
        while not (session.busy or session.turns) or connection.getsockname() in await self._clients():
            await asyncio.sleep(0.1)
        connection.close()
        self.done["slow"] += 1

    async def _idle(self, place: int) -> None:
        """A session that is used once or never, and then not ended."""
        session = self._opened(Sampling(max_new_tokens=4))
        key, over = session.key, session.over
        if place % 2:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            writer.write(self._request(key, {"messages": CHAT}))
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
        del session
        while not over.is_set():
            await asyncio.sleep(0.2)
        self.done["idle"] += 1

    async def _killed(self) -> None:
        """A process with streams under way that is killed."""
        requests = [self._request(self._opened().key, LONG).decode() for _ in range(KILLED)]
        client = (sys.executable, "-c", KILLED_CLIENT, self._host, str(self._port), *requests)
        process = await asyncio.create_subprocess_exec(*client, stdin=-1, stdout=-1)
        assert process.stdout is not None
        await process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        await process.wait()
        self.done["killed"] += KILLED

    async def _good(self) -> None:
        """A session of two turns; it must succeed whatever others do."""
        session = self._opened(Sampling(max_new_tokens=16))
        reader, writer = await asyncio.open_connection(self._host, self._port)
        messages = CHAT
        for _ in range(2):
            writer.write(self._request(session.key, {"messages": messages}))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert head.startswith(b"http/1.1 200"), head
            length = int(head.partition(b"content-length:")[2].split()[0])
            reply = json.loads(await reader.readexactly(length))["choices"][0]["message"]["content"]
            messages = [*messages, {"role": "assistant", "content": reply}, *CHAT]
        await _closed(writer)
        assert len(session.turns) == 2
        assert session.retokenized == session.forks == 0
        self.gateway.thread.loop.call_soon_threadsafe(self.gateway.sessions.end, session, "closed")
        self.done["good"] += 1


async def _until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):  # that is how some are disconnected
        while await reader.read(1 << 16):
            pass
    await _closed(writer)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def soak(
    generator: LocalGenerator, tokenizer: Tokenizer, *, seconds: float, wave: float, idle: float
) -> dict[str, Any]:
    """What is left of so many seconds of bad clients; sessions that are idle for `idle` seconds end."""
    gateway = Gateway(model="policy", idle_seconds=idle)
    try:
        return asyncio.run(Soak(generator, gateway, tokenizer).run(seconds, wave))
    finally:
        gateway.close()
