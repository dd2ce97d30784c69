"""The server's work: admits requests, runs them, explains failures, reads new weights."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from palestra.errors import UsageError
from palestra.generate.engine.request import EngineFailed
from palestra.generate.local import LocalGenerator
from palestra.generate.serve.gate import DONE, Counter, Histogram, event, explained, gauges
from palestra.generate.serve.openai import ApiError, Reply
from palestra.generate.types import Chunk, Request, Result
from palestra.lm.hf import load_pretrained
from palestra.lm.lora import WEIGHTS as ADAPTERS
from palestra.runs.tree import Leaf, flatten, safetensors_chunks

log = logging.getLogger(__name__)


class Service:
    """A generator behind HTTP: limits the requests in flight and counts them."""

    def __init__(self, generator: LocalGenerator, *, max_concurrent: int):
        self.generator, self.max_concurrent = generator, max_concurrent
        self.requests = Counter("palestra_requests_total", "HTTP requests by path and status.", ("path", "status"))
        self.seconds = Histogram("palestra_request_seconds", "From the request to its last byte.", ("path",))
        self.first_token = Histogram("palestra_first_token_seconds", "From the request to the first token of a stream.")
        self.prompt_tokens = Counter("palestra_prompt_tokens_total", "Tokens of prompts with a response.")
        self.new_tokens = Counter("palestra_new_tokens_total", "Tokens that were sent to clients.")
        self._admitted: dict[object, Sequence[Request]] = {}
        self._reported: BaseException | None = None

    def metrics(self) -> str:
        """All numbers, in Prometheus' text format."""
        parts = (self.requests, self.seconds, self.first_token, self.prompt_tokens, self.new_tokens)
        lines = [line for part in parts for line in part.lines()]
        here = {"admitted": len(self._admitted), "tasks": len(asyncio.all_tasks())}
        lines += gauges("palestra_http_", here, "In the server now")
        lines += gauges("palestra_engine_", self.generator.metrics(), "In the engine")
        return "\n".join(lines) + "\n"

    async def results(self, requests: Sequence[Request]) -> list[Result]:
        """All results; if one fails or the caller is cancelled, the others end too."""
        with self._admit(requests):
            tasks = [asyncio.ensure_future(self.generator.generate(request)) for request in requests]
            try:
                results = await asyncio.gather(*tasks)
            finally:
                await _end(tasks)
            self.prompt_tokens.add(amount=sum(len(request.prompt) for request in requests))
            made = (generation for result in results for generation in result.generations)
            self.new_tokens.add(amount=sum(len(generation.tokens) for generation in made))
            return results

    async def chunks(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Chunk], None]:
        """The chunks of all requests as they come, each with the place of its request in the list."""
        started = time.monotonic()
        started_places: set[int] = set()
        with self._admit(requests):
            async with aclosing(_merged([self.generator.stream(request) for request in requests])) as merged:
                async for place, chunk in merged:
                    if not started_places:
                        self.first_token.observe(time.monotonic() - started)
                    if place not in started_places:
                        self.prompt_tokens.add(amount=len(requests[place].prompt))
                        started_places.add(place)
                    self.new_tokens.add(amount=len(chunk.tokens))
                    yield place, chunk

    async def reply_events(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        """The events of a streamed chat or completion."""
        opened, tokens = False, 0
        async with aclosing(self.chunks(reply.requests)) as chunks:
            async for place, chunk in chunks:
                for data in () if opened else reply.opening():
                    yield event(data)
                opened, tokens = True, tokens + len(chunk.tokens)
                if (part := reply.part(place, chunk)) is not None:
                    yield event(part)
        for data in reply.closing(tokens):
            yield event(data)
        yield DONE

    async def chunk_events(
        self, request: Request, part: Callable[[Chunk], dict[str, Any]] = vars
    ) -> AsyncGenerator[bytes, None]:
        """The events of a request's tokens; `part` is the JSON of a chunk."""
        async with aclosing(self.chunks([request])) as chunks:
            async for _, chunk in chunks:
                yield event(part(chunk))
        yield DONE

    def explain(self, error: BaseException) -> ApiError:
        """An error as the client sees it; that the engine has failed is logged once."""
        if isinstance(error, EngineFailed) and error.__cause__ is not self._reported:
            log.critical("the engine has failed", exc_info=error.__cause__)
            self._reported = error.__cause__
        return explained(error)

    async def abort_all(self) -> None:
        """Abort every request; each returns what it has."""
        for request in chain.from_iterable(list(self._admitted.values())):
            if request.id is not None:
                await self.generator.abort(request.id)

    @contextmanager
    def _admit(self, requests: Sequence[Request]) -> Iterator[None]:
        if len(self._admitted) >= self.max_concurrent:
            message = f"The server already has {self.max_concurrent} requests in flight: try again later"
            raise ApiError(429, message, kind="rate_limit_error", code="too_many_requests")
        ticket = object()
        self._admitted[ticket] = requests
        try:
            yield
        finally:
            del self._admitted[ticket]


async def _merged(streams: Sequence[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Several streams as one; an error in one ends all."""
    ready: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue()

    async def pump(place: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    ready.put_nowait((place, chunk))
        finally:
            ready.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(place, stream)) for place, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            item = await ready.get()
            if item is not None:
                yield item
                continue
            running -= 1
            for task in tasks:
                if task.done():
                    task.result()  # raises what the stream raised
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


PIECE = 1 << 20


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a Hugging Face folder, of a checkpoint that has one as `model/`, or of a safetensors file."""
    folder = path / "model" if (path / "model").is_dir() else path
    if path.name == ADAPTERS or (folder / ADAPTERS).is_file():
        raise UsageError(
            f"{path} holds LoRA adapters alone, and a server takes whole weights: send the model's weights with its "
            "adapters merged"
        )
    if path.is_file():
        return read_safetensors(path)
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{path} is not a model: expected a folder with a config.json, a checkpoint, or a safetensors file"
        )
    return load_pretrained(folder).model.state_dict()


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, under the model's own parameter names."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UsageError(f"the weights are not a safetensors file: {error}") from error


class SafetensorsBytes:
    """The bytes of a safetensors file of weights, in pieces of at most 1 MiB; tensors on the CPU are not copied."""

    def __init__(self, weights: Mapping[str, Tensor]):
        _, leaves = flatten(dict(weights))
        named = [Leaf(name, leaf.type_name, leaf.carrier) for name, leaf in zip(weights, leaves, strict=True)]
        self._chunks = [memoryview(chunk) for chunk in safetensors_chunks(named)]

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            for start in range(0, len(chunk), PIECE):
                yield bytes(chunk[start : start + PIECE])
