"""Work for an HTTP client that ends when the client goes away, and server-sent events made of it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from palestra.generate.openai import ApiError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event. In ASCII: readers of lines take more than a line feed for the end of one."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def error_response(error: ApiError) -> Response:
    """A refusal; one that says "later" says when."""
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return JSONResponse(error.body, error.status, headers)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; if the client goes away first, `work` is cancelled and `ClientGone` raised.

    The body of the request must have been read: the next message is then that of the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
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


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. An error before the first is an ordinary response, a later one is the last event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], explain: Callable[[Exception], ApiError]):
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._explain = events, explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until there are no more or no one to send them to."""
        try:
            refusal = await unless_gone(receive, self._send(send))
        except ClientGone:
            return
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)

    async def _send(self, send: Send) -> ApiError | None:
        started = False

        async def write(data: bytes, *, last: bool = False) -> None:
            nonlocal started
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                started = True
            await send({"type": "http.response.body", "body": data, "more_body": not last})

        async with aclosing(self._events):
            try:
                async for data in self._events:
                    await write(data)
            except Exception as error:
                explained = self._explain(error)
                if not started:
                    return explained
                await write(event(explained.body))
        await write(b"", last=True)
        return None
