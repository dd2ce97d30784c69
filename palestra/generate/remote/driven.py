"""Generators over HTTP as one that a training loop drives, on an event loop of their own."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, aclosing
from typing import Any

from torch import Tensor

from palestra.generate.client import HttpGenerator
from palestra.generate.types import Chunk, GeneratesElsewhere, Request, Result

Start = Callable[[Coroutine[Any, Any, Any]], "Future[Any]"]
LOOK_SECONDS = 0.5  # between two looks at whether a server that loads weights still runs


class RemoteEngines(GeneratesElsewhere, AbstractContextManager["RemoteEngines"]):
    """A `DrivenGenerator` that coroutines of any event loop may call. `check` raises where a server is gone."""

    def __init__(self, members: Sequence[HttpGenerator], start: Start, check: Callable[[], None] = lambda: None):
        """`start` runs a coroutine on the event loop that all of them use."""
        super().__init__()
        self._members, self._start, self._check = list(members), start, check
        self._load = [0] * len(self._members)
        self._tokens = 0

    async def generate(self, request: Request) -> Result:
        place = self._take(request)
        try:
            result: Result = await asyncio.wrap_future(self._start(self._members[place].generate(request)))
        finally:
            self._load[place] -= request.n
        self._tokens += sum(len(generation.tokens) for generation in result.generations)
        return result

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        place, here = self._take(request), asyncio.get_running_loop()
        items: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()

        async def pump() -> None:
            end: BaseException | None = None
            try:
                async with aclosing(self._members[place].stream(request)) as chunks:
                    async for chunk in chunks:
                        here.call_soon_threadsafe(items.put_nowait, chunk)
            except Exception as error:
                end = error
            here.call_soon_threadsafe(items.put_nowait, end)

        pumping = self._start(pump())
        try:
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                self._tokens += len(item.tokens)
                yield item
        finally:
            pumping.cancel()
            self._load[place] -= request.n

    async def abort(self, id: str) -> None:
        await self._each(lambda member: member.abort(id))

    async def pause(self) -> None:
        await self._each(lambda member: member.pause())

    async def resume(self) -> None:
        await self._each(lambda member: member.resume())

    async def publish(self, weights: Mapping[str, Tensor], version: int, *, keep_cache: bool = True) -> None:
        await self._each(lambda member: member.publish(weights, version, keep_cache=keep_cache))

    def load(self, weights: Mapping[str, Tensor], version: int, *, keep_cache: bool = True) -> None:
        """All servers have the weights when this returns."""
        calls = [self._start(one.publish(weights, version, keep_cache=keep_cache)) for one in self._members]
        for call in calls:
            while not wait([call], LOOK_SECONDS).done:
                self._check()
            call.result()

    @property
    def generated(self) -> float:
        """Tokens of requests that are complete."""
        return float(self._tokens)

    @property
    def retries(self) -> int:
        """Calls that were made again."""
        return sum(member.retries for member in self._members)

    def counters(self) -> dict[str, float]:
        return {}

    def work(self, seconds: float) -> bool:
        """Wait: the servers generate."""
        self._check()
        return super().work(seconds)

    def __exit__(self, *_: object) -> None:
        """Close all connections; requests in flight end."""
        for member in self._members:
            self._start(member.close()).result()

    def _take(self, request: Request) -> int:
        place = self._load.index(min(self._load))
        self._load[place] += request.n
        return place

    async def _each(self, call: Callable[[HttpGenerator], Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*(asyncio.wrap_future(self._start(call(member))) for member in self._members))
