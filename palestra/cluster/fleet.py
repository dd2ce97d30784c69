"""Generators in processes of their own, behind the interface of one."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from palestra.cluster.actor import Actor, ActorLost, Hub
from palestra.cluster.broadcast import Broadcast
from palestra.cluster.channel import ChannelError, WeightChannel
from palestra.cluster.crew import Crew
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import GROUP, Chunk, GeneratesElsewhere, Request, Result
from palestra.track.trace import span

LOOK_SECONDS = 0.01


class HostedEngine(LocalGenerator):
    """A generator in its own process: it generates until it is ended, and fetches weights when told to."""

    def __init__(self, engine: Engine, channel: WeightChannel):
        super().__init__(engine, drive="thread")
        self._channel = channel

    async def sample(self, request: Request, group: int | None) -> Result:
        """Generate for a group."""
        GROUP.set(group)
        return await self.generate(request)

    def fetch(self, version: int, keep_cache: bool) -> None:
        """Load a version between two bursts."""
        weights = partial(dict, self._channel.fetch(version))
        # On a GPU nothing may be fetched while the engine captures a graph; elsewhere it goes on meanwhile.
        if self.engine.model.embed.device.type != "cuda":
            with span("fetch", track="sync", version=version):
                weights = weights()
        with span("install", track="sync", version=version):
            self.engine.publish(weights, version, keep_cache=keep_cache)

    def status(self) -> dict[str, Any]:
        return {"version": self.engine.version, "generated": self.generated}

    def close(self) -> None:
        super().close()
        self._channel.close()


class Fleet(GeneratesElsewhere):
    """A `DrivenGenerator` of generators elsewhere. Members are made by `start`, and fetch weights from the channel.

    A member has `sample`, `stream`, `abort`, `pause`, `resume` and `fetch(version, keep_cache)`.
    """

    crew: Crew
    """Set once its members can be made: they ask this for weights."""

    def __init__(self, hub: Hub, channel: WeightChannel):
        super().__init__()
        self._hub, self._channel = hub, channel
        self._version = self._loaded_by_all = -1
        self._paused = False
        self._counted: Counter[tuple[str, int]] = Counter()
        self._loaded: WeakKeyDictionary[Actor, int] = WeakKeyDictionary()
        self._joining: set[Actor] = set()  # for whom the next version waits

    async def generate(self, request: Request) -> Result:
        version, group = self._loaded_by_all, GROUP.get()

        def wrong(result: Result) -> str | None:
            oldest = min((v for one in result.generations for v in one.versions), default=version)
            return None if oldest >= version else f"samples with weights {oldest} when all should have {version}"

        return await self.crew.call("sample", request, group, weight=request.n, key=group, wrong=wrong)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        items = self.crew.stream("stream", request, weight=request.n, key=GROUP.get())
        try:
            async for chunk in items:
                yield chunk
        finally:
            await items.aclose()

    async def abort(self, id: str) -> None:
        self.crew.each("abort", id)

    async def pause(self) -> None:
        self._paused = True
        await asyncio.to_thread(self._wait, self.crew.each("pause"))

    async def resume(self) -> None:
        self._paused = False
        await asyncio.to_thread(self._wait, self.crew.each("resume"))

    async def publish(self, weights: Mapping[str, Tensor], version: int, *, keep_cache: bool = True) -> None:
        await asyncio.to_thread(self.load, weights, version, keep_cache=keep_cache)

    def load(self, weights: Mapping[str, Tensor], version: int, *, keep_cache: bool = True) -> None:
        """All generators have the version when it returns; those that are lost meanwhile are replaced."""
        while self._joining:
            time.sleep(LOOK_SECONDS)
        if not isinstance(self._channel, Broadcast):
            self._channel.publish(version, weights)
        with self.crew.lock:  # who joins meanwhile fetches it first
            self._version = version
            loading = self.crew.each("fetch", version, keep_cache)
        if isinstance(self._channel, Broadcast):  # its readers are there before it begins
            self._channel.readers = len(loading)
            with suppress(ChannelError):  # one of them was lost: the others ask again
                self._channel.publish(version, weights)
        self._wait(loading, "fetch", version, keep_cache)
        self._loaded |= {actor: version for actor, _ in loading}
        self._loaded_by_all = version

    def prepare(self, actor: Actor) -> None:
        """A generator that joins, before its first request: the newest weights.

        One that is slower than the trainer's steps would never have them: the second time the trainer waits for it.
        """
        if actor in self._loaded:
            self._joining.add(actor)
        version = self._version
        try:
            if version >= 0:
                actor.call("fetch", version, False).result()
            actor.call("pause" if self._paused else "resume").result()
        except Exception as error:
            if not isinstance(error, ChannelError) or version == self._version:
                self._joining.discard(actor)
                raise
        self._loaded[actor] = version

    def prepared(self, actor: Actor) -> bool:
        """Whether it has the weights that the others have."""
        ready = self._loaded[actor] == self._version
        if ready:
            self._joining.discard(actor)
        return ready

    @property
    def generated(self) -> float:
        for member in self.crew.members():
            self._counted[member["name"], member["pid"]] = member.get("generated", 0)
        return float(self._counted.total())

    def counters(self) -> dict[str, float]:
        """For a row: how many there are, how many were lost, calls that were asked again, answers refused."""
        crew = self.crew
        counts = {"generators": len(crew), "lost": crew.lost, "asked_again": crew.asked_again, "late": self._hub.late}
        return {f"fleet/{name}": float(count) for name, count in counts.items()}

    def _wait(self, calls: "list[tuple[Actor, Future[Any]]]", *again: Any) -> None:
        """Until every member has done it; an error of their own, unlike a loss, is raised.

        What broke off because another was lost is called `again`; who cannot fetch weights then is given up.
        """
        for actor, future in calls:
            with suppress(ActorLost):
                try:
                    future.result()
                except ChannelError:
                    try:
                        actor.call(*again).result()
                    except ChannelError as error:
                        actor.lose(f"cannot fetch weights: {error}")
