"""What every HTTP request passes: authentication, body limits, disconnects, server-sent events, Prometheus counters."""

import asyncio
import hmac
import json
import logging
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.request import EngineFailed, PromptTooLong, QueueFull
from palestra.generate.serve.openai import ApiError
from palestra.work.hosts import LOOPBACK, from_other_site, host_of

log = logging.getLogger("palestra.generate.serve")
T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
MAX_BODY_BYTES = 4 << 20


def most_bytes(images: bool) -> int:
    """Of a request's body by default; a model that reads images gets longer ones."""
    return 32 << 20 if images else MAX_BODY_BYTES


class ClientGone(Exception):
    """The client closed its connection before it had its response."""


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event. In ASCII: readers of lines take more than a line feed for the end of one."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def explained(error: BaseException) -> ApiError:
    """An error as the client sees it; one that is not a refusal also goes to the log, with its traceback."""
    match error:
        case ApiError():
            return error
        case ClientGone():
            return ApiError(499, "The client is gone")  # no one reads it
        case HTTPException():
            code = "request_too_large" if error.status_code == 413 else None
            return ApiError(error.status_code, str(error.detail), code=code)
        case ValidationError():
            return invalid_body([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])
        case EngineFailed():
            return ApiError(503, f"The engine has failed, and every request with it: {error}", kind="server_error")
        case PromptTooLong():
            return ApiError(400, str(error), code="context_length_exceeded")
        case QueueFull():
            return ApiError(429, str(error), kind="rate_limit_error", code="queue_full")
        case UsageError():
            return ApiError(400, str(error))
    log.error("a request failed", exc_info=error)
    message = str(error) if isinstance(error, PalestraError) else f"{type(error).__name__}: {error}"
    return ApiError(500, message, kind="server_error")


EXPLAINED: tuple[type[Exception], ...] = (
    ApiError,
    ClientGone,
    HTTPException,
    ValidationError,
    PalestraError,
    Exception,
)
"""By name: Starlette looks for the handler of an error's own class and of those above it."""


def invalid_body(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first field that is wrong, and what it should be; a union has a problem for each of its types."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']} at character {first['loc'][1]}")
    parts = [part for part in first["loc"][1:] if part != "str"]  # the type of a union that was tried
    path = [str(part) for part in parts if isinstance(part, int) or part.isidentifier()]
    expected = dict.fromkeys(str(problem["msg"]) for problem in problems if problem["loc"][:2] == first["loc"][:2])
    return ApiError(400, f"{'.'.join(path) or 'The body'}: {'; or '.join(expected)}", param=path[0] if path else None)


def error_response(error: ApiError) -> Response:
    """A refusal; one that says "later" says when."""
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return JSONResponse(error.body, error.status, headers)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; if the client disconnects first, `work` is cancelled and `ClientGone` raised.

    The body of the request must have been read: the next message is then that of the disconnect.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        # What they hold (a slot of the engine) is free when this returns.
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. An error before the first is an ordinary response, a later one is the last event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], explain: Callable[[Exception], ApiError]):
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._explain = events, explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            if (refusal := await unless_gone(receive, self._send(send))) is not None:
                await error_response(refusal)(scope, receive, send)

    async def _send(self, send: Send) -> ApiError | None:
        async with aclosing(self._events):
            try:
                first = await anext(self._events)
            except Exception as error:
                return self._explain(error)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:
                await send({"type": "http.response.body", "body": event(self._explain(error).body), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return None


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Counter:
    """A number that only grows, one for each combination of labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()):
        self.name, self.text, self.labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, amount: float = 1.0) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def lines(self) -> Iterable[str]:
        yield from _heading(self.name, self.text, "counter")
        for values, number in sorted(self._values.items()):
            yield f"{self.name}{_labels(zip(self.labels, values, strict=True))} {_number(number)}"


class Histogram:
    """How many observations (in seconds) lie at or below each bound, for each combination of labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = (), bounds: tuple[float, ...] = SECONDS):
        self.name, self.text, self.labels, self.bounds = name, text, labels, bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *labels: str) -> None:
        counts = self._counts.setdefault(labels, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def lines(self) -> Iterable[str]:
        yield from _heading(self.name, self.text, "histogram")
        # Buckets are cumulative.
        for values, counts in sorted(self._counts.items()):
            pairs = list(zip(self.labels, values, strict=True))
            total = 0
            for bound, count in zip([*map(_number, self.bounds), "+Inf"], counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_labels([*pairs, ('le', bound)])} {total}"
            yield f"{self.name}_sum{_labels(pairs)} {_number(self._sums[values])}"
            yield f"{self.name}_count{_labels(pairs)} {total}"


def gauges(prefix: str, values: Mapping[str, float], text: str) -> Iterable[str]:
    """The exposition of numbers that are read now, each under its own name."""
    for name, value in values.items():
        yield from _heading(prefix + name, f"{text}: {name.replace('_', ' ')}.", "gauge")
        yield f"{prefix}{name} {_number(value)}"


def _heading(name: str, text: str, kind: str) -> Iterable[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    inside = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in pairs)
    return f"{{{inside}}}" if inside else ""


def _number(value: float) -> str:
    return repr(int(value)) if float(value).is_integer() else repr(float(value))


# No key needed here: health checks have none.
OPEN_PATHS = frozenset({"/health"})
# These change what the model generates for everyone.
CONTROL_PATHS = frozenset({"/update_weights", "/pause", "/resume"})


@dataclass
class Gate:
    """An ASGI middleware: wrong keys and bodies that are too long go no further, and are never read into memory.

    `max_body_bytes_of` holds the limits that differ, by method and path. A request names one of `allowed_hosts`, if
    there are any: else a page could have its own name mean this machine, and talk to it as to its own server.
    """

    app: ASGIApp
    api_key: str | None
    max_body_bytes: int
    max_body_bytes_of: Mapping[str, int]
    allowed_hosts: Collection[str]
    requests: Counter
    seconds: Histogram

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.monotonic()
        status = 499  # nginx's code for a client that disconnected before it got a response

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
        headers = Headers(scope=scope)
        limit = self.max_body_bytes_of.get(f"{scope['method']} {scope['path']}", self.max_body_bytes)
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            message = "Incorrect or missing API key: send it as Authorization: Bearer KEY"
            error = ApiError(401, message, code="invalid_api_key")
        elif self.allowed_hosts and host_of(headers) not in self.allowed_hosts:
            allow = "start the server with --allowed-host"
            error = ApiError(403, f"The host {host_of(headers)!r} is not one of those allowed: {allow}")
        elif from_other_site(headers):
            error = ApiError(403, "Requests from pages of other sites are refused")
        elif scope["path"] in CONTROL_PATHS and self.api_key is None and not _from_here(scope, headers):
            error = ApiError(403, f"{scope['path']} needs a key from another machine: start the server with --api-key")
        elif int(headers.get("content-length", 0)) > limit:
            error = _too_long(limit)
        else:
            await self.app(scope, _limited(receive, limit), send)
            return
        await error_response(error)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        if self.api_key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Starlette reads the bytes of a header as Latin-1; clients send keys in UTF-8.
        return scheme.lower() == "bearer" and hmac.compare_digest(key.encode("latin-1"), self.api_key.encode())


def _from_here(scope: Scope, headers: Headers) -> bool:
    """Whether the request comes from this machine, by a name that is always this machine's."""
    address = (scope.get("client") or ("",))[0].removeprefix("::ffff:")
    return host_of(headers) in LOOPBACK and (address.startswith("127.") or address in LOOPBACK)


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
