"""Listening over HTTP: sockets, deadlines of connections, and a server that ends its requests when it must stop."""

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import FrameType
from typing import Any

from palestra.errors import MissingExtra, PalestraError
from palestra.work.hosts import LOOPBACK

try:
    import h11
    import uvicorn
    from starlette.types import ASGIApp
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise MissingExtra("The server", "serve") from error

HEADER_SECONDS = 10.0
"""How long the headers of a request may take to come."""
STALL_SECONDS = 60.0
"""How long a client may read nothing of its response."""
GRACE_SECONDS = 5.0
"""How long requests may run after a stop signal before they are aborted."""
CONNECTIONS = 4096
"""More are refused with 503."""


def uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """How every application is served."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (most := min(hard, 4 * CONNECTIONS) if hard > 0 else 4 * CONNECTIONS):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return uvicorn.Config(
        app,
        http=PromptHeaders,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="off",
        # Clients give up idle connections first, so that none is used while it is being closed here.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=round(2 * GRACE_SECONDS),
        limit_concurrency=min(CONNECTIONS, max(soft, most) // 2),
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise PalestraError(f"cannot listen on {host} port {port}: {error.strerror}. Choose another --port") from error


def serve(
    app: ASGIApp,
    listening: socket.socket,
    abort: Callable[[], Awaitable[None]],
    *,
    name: str,
    api_key: str | None,
    note: str = "",
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, with a coroutine beside that runs as long; `abort` ends what is left.

    After the signal requests have a few seconds to finish; then they are aborted and return what they have.
    """
    host, port = listening.getsockname()[:2]
    if api_key is None and host not in LOOPBACK:
        open_to = f"warning: anyone who can reach {host} port {port} can use this model"
        print(f"{open_to}. Give --api-key or PALESTRA_API_KEY.", file=sys.stderr)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    print(f"serving {name} at {url}{note} (Ctrl-C stops)", flush=True)
    StoppingServer(uvicorn_config(app), abort, beside).run(sockets=[listening])


def hosts_of(host: str, allowed: Sequence[str] = ()) -> Sequence[str]:
    """The names that requests may use: those allowed; without any, a loopback name on loopback, any elsewhere."""
    return allowed or (LOOPBACK if host in LOOPBACK else ())


class PromptHeaders(H11Protocol):
    """HTTP with deadlines: a connection that never completes its headers, or never reads, would stay open forever."""

    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        if state is not h11.IDLE:
            self._late.cancel()
        elif self._late.cancelled():
            self._late = self.loop.call_later(HEADER_SECONDS, self.transport.close)
        if state is h11.SEND_BODY:
            self._late = self.loop.call_later(STALL_SECONDS, self._close_silent)

    def _close_silent(self) -> None:
        """Close a connection whose body does not go on, unless it is the application that does not read."""
        if self.flow.read_paused:
            self._late = self.loop.call_later(STALL_SECONDS, self._close_silent)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_SECONDS, self.transport.abort)  # `close` waits for what is unread

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._late.cancel()
        if self._stalled is not None:
            self._stalled.cancel()


class StoppingServer(uvicorn.Server):
    """A server that ends its requests, with `abort`, when it must stop; `beside` runs as long as it does."""

    def __init__(
        self,
        config: uvicorn.Config,
        abort: Callable[[], Awaitable[None]],
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ):
        super().__init__(config)
        self._abort, self._beside = abort, beside

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        task = None if self._beside is None else asyncio.create_task(self._beside())
        await super().serve(sockets)
        if task is not None:
            task.cancel()
        await self._abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop for a signal, and at once for a second Ctrl-C. It is not raised again: stopping is not a failure."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, wait, end what still runs, and wait for that."""
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await self._abort()
