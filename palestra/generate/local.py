"""The engine of this process as a `Generator`, and a trained language model to call from Python."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from palestra.data.chat import encode_chat
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError
from palestra.generate.engine.engine import Engine
from palestra.generate.types import GROUP, Chunk, Generation, Request, Result, Sampling
from palestra.lm.model import Transformer
from palestra.track.trace import span


class LocalGenerator(AbstractContextManager["LocalGenerator"]):
    """Requests as coroutines. `drive="thread"` generates in its own thread until `close`; with `"caller"` the owner of
    the device calls `engine.burst()`, and requests wait until then.

    A coroutine that is cancelled, or a stream that is not read to its end, aborts its request.
    """

    def __init__(self, engine: Engine, *, drive: Literal["thread", "caller"] = "thread"):
        self.engine = engine
        self._wake, self._closed = threading.Event(), False
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Deliveries] = WeakKeyDictionary()
        self._thread = threading.Thread(target=self._work, name="generate", daemon=True) if drive == "thread" else None
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def generate(self, request: Request) -> Result:
        sink, id = await self._submit(request, streams=False)
        with span("sample", role="generator", group=GROUP.get()) as about:
            try:
                item = await sink.queue.get()
            except asyncio.CancelledError:
                self._abort(id)
                raise
            if isinstance(item, BaseException):
                raise item
            assert isinstance(item, Result)
            about["tokens"] = sum(len(one.tokens) for one in item.generations)
            versions = (max(one.versions) for one in item.generations if one.versions)
            about["version"] = max(versions, default=self.engine.version)
        return item

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        sink, id = await self._submit(request, streams=True)
        try:
            while not isinstance(item := await sink.queue.get(), Result):
                if isinstance(item, BaseException):
                    raise item
                yield item
        except BaseException:  # closed early, or cancelled; after its end the id may be another request's
            self._abort(id)
            raise

    async def abort(self, id: str) -> None:
        self._abort(id)

    async def pause(self) -> None:
        await asyncio.to_thread(self.engine.pause)

    async def resume(self) -> None:
        self.engine.resume()
        self._wake.set()

    async def publish(self, weights: Mapping[str, Tensor], version: int, *, keep_cache: bool = True) -> None:
        await asyncio.to_thread(self.engine.publish, weights, version, keep_cache=keep_cache)

    @property
    def generated(self) -> float:
        return self.engine.metrics()["generated_tokens"]

    def counters(self) -> dict[str, float]:
        return {}

    def load(self, weights: Mapping[str, Tensor], version: int, *, keep_cache: bool = True) -> None:
        self.engine.publish(weights, version, keep_cache=keep_cache)

    def overlap(self) -> None:
        self.engine.burst()

    def work(self, seconds: float) -> bool:
        """With `drive="caller"`: a burst; False after waiting at most `seconds` where there is nothing to generate."""
        self._wake.clear()
        if self.engine.burst():
            return True
        self._wake.wait(seconds)
        return False

    def wake(self) -> None:
        """End a wait in `work`, from any thread."""
        self._wake.set()

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    def close(self) -> None:
        """Stop the thread; requests in flight fail."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        if self.engine.failure is None:
            self.engine.fail(PalestraError("the generator was closed"))

    async def _submit(self, request: Request, *, streams: bool) -> "tuple[_Sink, str]":
        if request.sampling.guide is not None:
            await asyncio.to_thread(self.engine.compile, request.sampling.guide)
        loop = asyncio.get_running_loop()
        sink = _Sink(self._loops.setdefault(loop, _Deliveries(loop)), streams)
        id = self.engine.submit(request, sink)
        self._wake.set()
        return sink, id

    def _abort(self, id: str) -> None:
        self.engine.abort(id)
        self._wake.set()

    def _work(self) -> None:
        while True:
            # Cleared first: a request that comes during a burst that finds nothing to do wakes the next one.
            self._wake.clear()
            if self._closed or self.engine.failure is not None:
                return
            # The engine has failed its requests with the error, and fails later ones.
            with suppress(BaseException):
                if not self.engine.burst():
                    self._wake.wait()


class _Deliveries:
    """Hands results to futures and streams in their loop: what comes while the loop is busy, in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._lock = loop, threading.Lock()
        self._waiting: list[Callable[[], object]] = []

    def add(self, deliver: Callable[[], object]) -> None:
        """Call `deliver` in the loop, in the order of these calls."""
        with self._lock:
            self._waiting.append(deliver)
            first = len(self._waiting) == 1
        if first:
            # The waiting coroutine may be gone, and the loop with it.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for deliver in waiting:
            deliver()


class _Sink:
    """A queue for the coroutine that waits for a request, filled in its own loop."""

    def __init__(self, deliveries: _Deliveries, streams: bool):
        self.deliveries, self.streams = deliveries, streams
        self.queue: asyncio.Queue[Chunk | Result | BaseException] = asyncio.Queue()

    def put(self, item: Chunk | Result | BaseException) -> None:
        self.deliveries.add(lambda: self.queue.put_nowait(item))


class LanguageModel:
    """Continues texts and conversations: `model.write("Once")`, `model.answer("Who are you?")`."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, eos: frozenset[int], *, device: torch.device | str = "cpu"
    ):
        self.tokenizer = tokenizer
        self.engine = Engine(model, eos=eos, tokenizer=tokenizer, device=device)

    def write(self, prompt: str, **sampling: Any) -> str:
        """The continuation of a text; keywords are those of `Sampling`, such as `max_new_tokens=50`."""
        return self.generate(self.tokenizer.encode_prompt(prompt), **sampling).text or ""

    def answer(self, messages: str | Sequence[Mapping[str, Any]], **sampling: Any) -> str:
        """The assistant's next turn after a question or a list of messages."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        prompt = encode_chat(self.tokenizer, turns, add_generation_prompt=True).tokens
        return self.generate(prompt, **sampling).text or ""

    def generate(self, tokens: Sequence[int], **sampling: Any) -> Generation:
        """Tokens after tokens, with their log-probabilities."""
        (result,) = self.engine.run([Request(tuple(tokens), Sampling(**sampling))])
        return result.generations[0]
