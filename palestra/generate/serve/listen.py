"""Listening over HTTP: sockets, deadlines of connections, and a server that ends its requests when it must stop."""

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from types import FrameType

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


def hosts_of(host: str, allowed: tuple[str, ...] | list[str] = ()) -> tuple[str, ...]:
    """The names that requests may have: those allowed; without any, a loopback name on loopback, and any elsewhere."""
    return tuple(allowed) or (LOOPBACK if host in LOOPBACK else ())
