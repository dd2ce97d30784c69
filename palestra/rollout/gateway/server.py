"""The gateway's HTTP server: every key is a session, every request a turn in its tree."""

import asyncio
import hashlib
import json
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from palestra.errors import MissingExtra
from palestra.generate.client import StrictBody
from palestra.generate.serve import gate
from palestra.generate.serve.listen import PromptHeaders, bound, uvicorn_config
from palestra.generate.serve.openai import ApiError
from palestra.rollout.event_loop import LoopThread
from palestra.rollout.gateway.chat import ToolChatBody
from palestra.rollout.gateway.dialect import Body, Exchange, SessionEnded
from palestra.rollout.gateway.messages import MessagesBody
from palestra.rollout.gateway.responses import ResponsesBody
from palestra.rollout.gateway.session import Session
from palestra.work.hosts import LOOPBACK

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp
except ImportError as error:
    raise MissingExtra("The gateway", "serve") from error

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ToolChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
}
REMEMBERED = 4096
"""Keys of ended sessions, which get a better message than unknown ones."""
REAP_SECONDS = 1.0


Reward = Annotated[float, Field(strict=False, allow_inf_nan=False)]


class RewardBody(StrictBody):
    """`POST /reward`."""

    reward: Reward


class EndBody(StrictBody):
    """`POST /end`."""

    answer: str | None = None
    """What the verifier gets instead of the last message."""
    reward: Reward | None = None


def new_key() -> str:
    """A key that nobody guesses."""
    return f"pal-{secrets.token_urlsafe(24)}"


class Sessions:
    """The open sessions by key. `unknown` may open one for a key that is not known."""

    def __init__(
        self,
        *,
        idle_seconds: float,
        unknown: Callable[[str], Session | None] = lambda key: None,
        ended: Callable[[Session], None] = lambda session: None,
    ):
        self.open: dict[str, Session] = {}
        self._idle, self._unknown, self._ended = idle_seconds, unknown, ended
        self._over: deque[str] = deque(maxlen=REMEMBERED)

    def add(self, session: Session) -> None:
        """Requests with its key belong to it from now on."""
        self.open[session.key] = session

    def find(self, headers: Headers) -> Session:
        """The session of a request's key, sent as OpenAI's or Anthropic's clients do."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = bearer if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if key in self.open:
            return self.open[key]
        if _digest(key) in self._over:
            raise SessionEnded
        session = self._unknown(key)
        if session is None:
            raise ApiError(401, "Incorrect or missing API key: the key is that of a session", code="invalid_api_key")
        self.add(session)
        return session

    def end(self, session: Session, why: Any) -> None:
        """End a session; its key is then refused."""
        if self.open.pop(session.key, None) is not None:
            self._over.append(_digest(session.key))
            session.end(why)
            self._ended(session)

    async def reap(self) -> None:
        """End sessions that nobody uses, for ever."""
        while True:
            await asyncio.sleep(min(REAP_SECONDS, self._idle / 4))
            self._end_idle()  # a function of its own: a variable here would hold the last session while this sleeps

    def _end_idle(self) -> None:
        for session in list(self.open.values()):
            if not session.busy and time.monotonic() - session.used > self._idle:
                self.end(session, "idle")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("latin-1", "replace")).hexdigest()


def create_app(
    sessions: Sessions,
    *,
    model: str,
    max_body_bytes: int = gate.MAX_BODY_BYTES,
    allowed_hosts: Sequence[str] = LOOPBACK,
) -> ASGIApp:
    """The application; requests name one of `allowed_hosts`, if there are any."""

    async def answer(http: Request) -> Response:
        session = sessions.find(http.headers)
        raw = await http.body()
        body = _read(BODIES[http.url.path], raw)
        conversation = body.conversation(session.context)
        name = f"{http.url.path} {hashlib.sha256(raw).hexdigest()}"
        retry = http.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        exchange = await session.exchange(conversation, name, retry)
        if conversation.stream:
            return gate.EventStream(_delivered(body, exchange, session), gate.explained)
        replies = await gate.unless_gone(http.receive, exchange.replies())
        session.deliver(exchange)
        return JSONResponse(body.whole(exchange, replies))

    async def reward(http: Request) -> Response:
        session = sessions.find(http.headers)
        session.reward = _read(RewardBody, await http.body()).reward
        return JSONResponse({"reward": session.reward})

    async def end(http: Request) -> Response:
        session = sessions.find(http.headers)
        body = _read(EndBody, await http.body() or b"{}")
        session.answer = body.answer if body.answer is not None else session.answer
        session.reward = body.reward if body.reward is not None else session.reward
        sessions.end(session, "call")
        return JSONResponse(_status(session))

    async def status(http: Request) -> Response:
        return JSONResponse(_status(sessions.find(http.headers)))

    async def models(http: Request) -> Response:
        sessions.find(http.headers)
        about = {"id": model, "object": "model", "created": 0, "owned_by": "palestra"}
        return JSONResponse({"object": "list", "data": [about]})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "model": model, "sessions": len(sessions.open)})

    async def explain(http: Request, error: Exception) -> Response:
        return _refusal(http.url.path, gate.explained(error))

    about = "HTTP requests by path and status."
    counters: dict[str, Any] = {
        "requests": gate.Counter("palestra_gateway_requests_total", about, ("path", "status")),
        "seconds": gate.Histogram("palestra_gateway_seconds", "From the request to its last byte.", ("path",)),
    }

    async def metrics(_: Request) -> Response:
        lines = [line for part in counters.values() for line in part.lines()]
        lines += gate.gauges("palestra_gateway_", {"sessions": float(len(sessions.open))}, "In the gateway now")
        return Response("\n".join(lines) + "\n", media_type=gate.CONTENT_TYPE)

    limits = {"max_body_bytes": max_body_bytes, "max_body_bytes_of": {}, "allowed_hosts": allowed_hosts}
    gated = Middleware(gate.Gate, api_key=None, **limits, **counters)  # `Sessions.find` refuses, with the reason
    return Starlette(
        routes=[
            *(Route(path, answer, methods=["POST"]) for path in BODIES),
            Route("/reward", reward, methods=["POST"]),
            Route("/end", end, methods=["POST"]),
            Route("/session", status),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        middleware=[gated],
        exception_handlers=dict.fromkeys(gate.EXPLAINED, explain),  # type: ignore[arg-type]
    )


async def _delivered(body: Body, exchange: Exchange, session: Session) -> Any:
    """The events of a response; it is delivered with the last one."""
    async for data in body.events(exchange):
        yield data
    session.deliver(exchange)


def _status(session: Session) -> dict[str, Any]:
    counts = {"turns": len(session.turns), "tokens": session.sampled, "forks": session.forks}
    return {**counts, "retokenized": session.retokenized, "reward": session.reward, "ended": session.ended}


def _read(cls: Any, raw: bytes) -> Any:
    try:
        return cls.model_validate(json.loads(raw))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from error


def _refusal(path: str, error: ApiError) -> Response:
    """A refusal in the words of the dialect."""
    if path != "/v1/messages":
        return gate.error_response(error)
    kinds = {401: "authentication_error", 413: "request_too_large", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return JSONResponse({"type": "error", "error": {"type": kind, "message": str(error)}}, error.status)


class Gateway:
    """The server in a thread of its own, beside the loops whose generators it asks."""

    def __init__(self, *, model: str, port: int = 0, idle_seconds: float):
        self.sessions = Sessions(idle_seconds=idle_seconds)
        self._socket: socket.socket = bound("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn_config(create_app(self.sessions, model=model)))
        self.thread = LoopThread("gateway")
        self._serving = self.thread.start(self._server.serve(sockets=[self._socket]))
        self.thread.start(self.sessions.reap())

    async def listen(self, listening: socket.socket) -> asyncio.Server:
        """Serve another socket too, as one of another network namespace; in the gateway's loop. Close it when done."""
        config, state = self._server.config, self._server.server_state
        protocol = partial(PromptHeaders, config=config, server_state=state, app_state={})
        return await asyncio.get_running_loop().create_server(protocol, sock=listening)

    def close(self) -> None:
        """Stop listening and end all sessions."""
        self._server.should_exit = True
        with suppress(Exception):
            self._serving.result(10)
        self.thread.close()
        self._socket.close()
