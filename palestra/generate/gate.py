"""What every HTTP request passes first: the key, the limit on its body, and the books of who asked for what."""

import hmac
import time
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.generate.openai import ApiError
from palestra.generate.prometheus import Counter, Histogram
from palestra.generate.responses import error_response

# The key is not asked for here, so that whoever starts and stops machines can look.
OPEN_PATHS = frozenset({"/health"})
# Whoever may call these decides what the model says.
CONTROL_PATHS = frozenset({"/update_weights", "/pause", "/resume"})
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Gate:
    """An ASGI middleware: wrong keys and bodies that are too long go no further, and are never read into memory.

    `max_body_bytes_of` holds the limits that differ, by method and path. A request names one of `allowed_hosts`, if
    there are any: else a page could have its own name mean this machine, and talk to it as to its own server.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        max_body_bytes: int,
        max_body_bytes_of: Mapping[str, int],
        allowed_hosts: Collection[str],
        requests: Counter,
        seconds: Histogram,
    ):
        self.app, self.api_key, self.allowed_hosts = app, api_key, allowed_hosts
        self.max_body_bytes, self.max_body_bytes_of = max_body_bytes, max_body_bytes_of
        self.requests, self.seconds = requests, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it; count it either way."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        status = 499  # what nginx calls a client that went away before it got an answer

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, noting)
        except Exception:
            status = 500
            raise
        finally:
            # A path of the client's choosing would make a new series for every request.
            path = getattr(scope.get("route"), "path", "other")
            self.requests.add(path, str(status))
            self.seconds.observe(time.monotonic() - started, path)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, limit = Headers(scope=scope), self._limit_of(scope)
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            error = ApiError(
                401, "Incorrect or missing API key: send it as Authorization: Bearer KEY", code="invalid_api_key"
            )
        elif self.allowed_hosts and _host(headers) not in self.allowed_hosts:
            error = ApiError(
                403, f"The host {_host(headers)!r} is not one of those allowed: start the server with --allowed-host"
            )
        elif headers.get("sec-fetch-site") in ("cross-site", "same-site") or _other_origin(headers):
            # Any page that a browser on this machine shows can post to a loopback address.
            error = ApiError(403, "Requests from pages of other sites are refused")
        elif scope["path"] in CONTROL_PATHS and self.api_key is None and not _from_here(scope, headers):
            error = ApiError(403, f"{scope['path']} needs a key from another machine: start the server with --api-key")
        elif int(headers.get("content-length", 0)) > limit:
            error = _too_long(limit)
        else:
            await self.app(scope, _limited(receive, limit), send)
            return
        await error_response(error)(scope, receive, send)

    def _limit_of(self, scope: Scope) -> int:
        return self.max_body_bytes_of.get(f"{scope['method']} {scope['path']}", self.max_body_bytes)

    def _has_key(self, headers: Headers) -> bool:
        if self.api_key is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Starlette reads the bytes of a header as Latin-1; clients send keys in UTF-8.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), self.api_key.encode())


def _host(headers: Headers) -> str:
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:  # brackets of an address that is none
        return ""


def _other_origin(headers: Headers) -> bool:
    """Whether a page of another server asks."""
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _from_here(scope: Scope, headers: Headers) -> bool:
    """Whether a program on this machine asks, by a name that is always this machine's."""
    address = (scope.get("client") or ("",))[0].removeprefix("::ffff:")
    return _host(headers) in LOOPBACK and (address.startswith("127.") or address in LOOPBACK)


def _limited(receive: Receive, limit: int) -> Receive:
    """`receive`, until more bytes have come than allowed: a body need not say how long it is."""
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > limit:
            raise HTTPException(413, str(_too_long(limit)))
        return message

    return counted


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"The body is longer than the {limit:,} bytes allowed here", code="request_too_large")
