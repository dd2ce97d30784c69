"""The generator over HTTP: the interface of the engine against a server elsewhere, and its JSON."""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from palestra.data.media import data_url, placed
from palestra.errors import MissingExtra, PalestraError, UsageError
from palestra.generate.engine.request import (
    LONGEST_STOP,
    MOST_ALTERNATIVES,
    MOST_BIAS,
    MOST_BIASED,
    MOST_STOPS,
    PromptTooLong,
    QueueFull,
)
from palestra.generate.types import Chunk, Generation, Guide, Request, Result, Sampling, StopReason

if TYPE_CHECKING:
    from torch import Tensor


# What both `/generate` and OpenAI's endpoints accept. Numbers are finite, and fit the engine's 64-bit tensors.
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
MOST_SAMPLES = 1024  # that one HTTP request may ask for, all of its prompts together
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Alternatives = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]
# Keys of JSON are strings.
LogitBias = Annotated[dict[Annotated[TokenId, Field(strict=False)], Bias], Field(max_length=MOST_BIASED)]
Repetition = Annotated[float, Field(ge=0.01, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StrictBody(BaseModel):
    """JSON of which every field is known and has its own type."""

    model_config = ConfigDict(strict=True, extra="forbid")


class GuideBody(StrictBody):
    """`Guide` as JSON."""

    of_json: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def guide(self) -> Guide:
        """The guide it describes."""
        choice = None if self.choice is None else tuple(self.choice)
        return Guide(json=self.of_json, regex=self.regex, choice=choice, grammar=self.grammar)


class SamplingBody(StrictBody):
    """`Sampling` as JSON."""

    temperature: Temperature = 1.0
    top_k: Count | None = None
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    max_new_tokens: Count = 128
    min_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    # JSON has lists, no tuples.
    stop: Annotated[tuple[StopString, ...], Field(strict=False, max_length=MOST_STOPS)] = ()
    stop_ids: Annotated[tuple[TokenId, ...], Field(strict=False)] = ()
    ignore_eos: bool = False
    seed: Seed | None = None
    logprobs: Alternatives = 0
    logit_bias: LogitBias | None = None
    repetition_penalty: Repetition = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    guide: GuideBody | None = None


class ImageBody(StrictBody):
    """An image among the tokens of a prompt."""

    start: Annotated[int, Field(ge=0, lt=2**31)]
    """Where its first token lies."""
    url: str
    """A data URL, of an image that has the size it is read in."""


class GenerateBody(StrictBody):
    """`Request` as JSON, and whether to stream."""

    prompt: list[TokenId]
    sampling: SamplingBody = SamplingBody()
    n: Samples = 1
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool = False
    media: list[ImageBody] = []

    def request(self) -> Request:
        """The request it describes; without an id it gets one, so that it can be ended."""
        media = tuple(placed(image.url, image.start) for image in self.media)
        guide = None if self.sampling.guide is None else self.sampling.guide.guide()
        values: dict[str, Any] = {**dict(self.sampling), "guide": guide}
        return Request(tuple(self.prompt), Sampling(**values), self.n, self.id or uuid.uuid4().hex, media)


def request_json(request: Request, *, stream: bool) -> dict[str, Any]:
    """The body of `POST /generate`; with an id, so that the server knows what to end."""
    named = {**vars(request), "id": request.id or uuid.uuid4().hex}
    named["media"] = [{"start": image.start, "url": data_url(image.pixels)} for image in request.media]
    return {**named, "sampling": asdict(request.sampling), "stream": stream}


def result_json(result: Result) -> dict[str, Any]:
    """The response of `POST /generate`; the prompt is what was sent."""
    return {"id": result.id, "generations": [vars(generation) for generation in result.generations]}


RESULT, CHUNK = TypeAdapter(Result), TypeAdapter(Chunk)
"""The inverses: lists of JSON become tuples, strings stop reasons."""


try:
    import httpx
except ImportError as error:
    raise MissingExtra("A generator over HTTP", "serve") from error


log = logging.getLogger("palestra.generate")

T = TypeVar("T")
Made = TypeVar("Made", Generation, Chunk)
# Waits between attempts, in seconds: a server that restarts is back within a minute.
WAITS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
LONGEST_WAIT = 120.0
"""Seconds that a server may ask to wait with `Retry-After`."""
# Errors after which the server cannot have begun, and those after which it may have.
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout)
UNANSWERED = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class HttpGenerator(AbstractAsyncContextManager["HttpGenerator"]):
    """A `Generator` whose engine is behind `palestra serve`. Use it on one event loop, and close it.

    A request whose caller is cancelled closes its connection, on which the server ends it. Only what the server cannot
    have begun is tried again: a connection that was not made, and calls that may be made twice without harm (pause,
    resume, abort, publish).
    """

    expected = "a palestra server"
    """What the address should be of."""
    again: tuple[type[Exception], ...] = UNSENT
    """Errors after which a call is made again."""
    retried: tuple[int, ...] = ()
    """Statuses after which it is."""
    retries = 0
    """Calls that were."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        waits: tuple[float, ...] = WAITS,
        ends: Collection[int] | None = None,
    ):
        """`ends` are end tokens in place of those of the server's model: a chat template may have one more."""
        self.base_url, self._waits, self._ends = base_url.rstrip("/"), waits, ends
        headers = {} if api_key is None else {b"Authorization": f"Bearer {api_key}".encode()}
        # A generation takes as long as it takes; connections are closed here before the server would, so that none is
        # used that the server is just closing.
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=4.0),
            trust_env=False,
        )

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; requests that are running end."""
        await self._client.aclose()

    async def generate(self, request: Request) -> Result:
        async with self._call("POST", "/generate", json=request_json(self._sent(request), stream=False)) as response:
            body = await response.aread()
            result = self._read(body, lambda data: RESULT.validate_python({**data, "prompt": request.prompt}))
            return replace(result, generations=tuple(self._ended(made, request) for made in result.generations))

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        async with self._call("POST", "/generate", json=request_json(self._sent(request), stream=True)) as response:
            async for event in self._events(response):
                yield self._ended(self._read(event, _chunk), request)

    def _sent(self, request: Request) -> Request:
        sampling = request.sampling
        if self._ends is None or sampling.ignore_eos:
            return request
        stop_ids = (*sampling.stop_ids, *(token for token in self._ends if token not in sampling.stop_ids))
        return replace(request, sampling=replace(sampling, stop_ids=stop_ids, ignore_eos=True))

    def _ended(self, made: Made, request: Request) -> Made:
        """With the reason that it would have here: the server was told of end tokens as of others that stop."""
        sampling = request.sampling
        if self._ends is None or sampling.ignore_eos or made.stop_reason != StopReason.STOP or not made.tokens:
            return made
        last = made.tokens[-1]
        return replace(made, stop_reason=StopReason.EOS) if last in {*self._ends} - {*sampling.stop_ids} else made

    async def abort(self, id: str) -> None:
        await self._command("POST", "/abort", json={"id": id})

    async def pause(self) -> None:
        await self._command("POST", "/pause")

    async def resume(self) -> None:
        await self._command("POST", "/resume")

    async def publish(self, weights: "Mapping[str, Tensor]", version: int, *, keep_cache: bool = True) -> None:
        """New weights, sent as safetensors, between two tokens of the server."""
        from palestra.generate.serve.service import SafetensorsBytes

        data = await asyncio.to_thread(SafetensorsBytes, weights)

        async def pieces() -> AsyncIterator[bytes]:
            for piece in data:
                yield piece

        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(data))}
        params = {"version": version, "keep_cache": str(keep_cache).lower()}
        await self._command("PUT", "/update_weights", content=pieces, params=params, headers=headers)

    async def _events(self, response: httpx.Response) -> AsyncIterator[str]:
        """The server-sent events of a response, up to its `[DONE]`."""
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield line.removeprefix("data: ")
        raise PalestraError(f"{self.base_url} ended a stream before its end: see the server's log")

    def _read(self, body: str | bytes, parse: Callable[[dict[str, Any]], T]) -> T:
        try:
            return parse(json.loads(body))
        except (ValueError, KeyError, TypeError) as error:
            message = f"{self.base_url} sent a malformed response: it is not {self.expected}"
            raise PalestraError(message) from error

    async def _command(self, method: str, path: str, **options: Any) -> None:
        """A call that may be made twice."""
        async with self._call(method, path, again=(*UNSENT, *UNANSWERED), **options):
            pass

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        *,
        again: tuple[type[Exception], ...] | None = None,
        content: Callable[[], AsyncIterator[bytes]] | None = None,
        **options: Any,
    ) -> AsyncIterator[httpx.Response]:
        """A response with status 200; what `again` and `retried` name is tried again, all else explained.

        `content` gives the body anew for each attempt.
        """
        waits = iter(self._waits)
        while True:
            body = None if content is None else content()
            request = self._client.build_request(method, path, content=body, **options)
            try:
                response = await self._client.send(request, stream=True)
                wait = next(waits, None) if response.status_code in self.retried else None
                if wait is None:
                    break
                await response.aclose()
                wait, why = max(wait, _retry_after(response)), f"status {response.status_code}"
            except httpx.HTTPError as error:
                wait, why = next(waits, None) if isinstance(error, again or self.again) else None, _text(error)
                if wait is None:
                    raise PalestraError(f"{self.base_url} does not respond: {why}") from error
            if not self.retries:
                log.warning("%s: %s; the call is made again in %g s, and others after it", self.base_url, why, wait)
            self.retries += 1
            await asyncio.sleep(wait)
        try:
            if response.status_code != 200:
                raise _error(response.status_code, await response.aread(), self.expected)
            yield response
        except httpx.HTTPError as error:
            raise PalestraError(f"{self.base_url} broke off its response to {path}: {_text(error)}") from error
        finally:
            await response.aclose()


def _retry_after(response: httpx.Response) -> float:
    """The seconds that a server asks to wait; 0 where it names none, or a date."""
    given = response.headers.get("Retry-After", "")
    return min(float(given), LONGEST_WAIT) if given.isdecimal() else 0.0


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _chunk(data: dict[str, Any]) -> Chunk:
    """An event of a stream: tokens, or what went wrong after the status was sent."""
    if "error" in data:
        raise _error(200, data["error"])
    return CHUNK.validate_python(data)


def _error(status: int, body: bytes | Mapping[str, Any], expected: str = HttpGenerator.expected) -> PalestraError:
    """The error that the engine would have raised here."""
    try:
        data = json.loads(body) if isinstance(body, bytes) else body
        error = data.get("error", data)
        message, code = (error, None) if isinstance(error, str) else (str(error["message"]), error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return PalestraError(f"the server sent status {status} and no explanation: it is not {expected}")
    if code == "context_length_exceeded":
        return PromptTooLong(message)
    if code == "queue_full" or status == 429:
        return QueueFull(message)
    if status == 404:
        return UsageError(f"{message} (status 404): expected {expected}")
    return UsageError(message) if 400 <= status < 500 else PalestraError(message)
