"""Hosted objects of one kind: calls go to the least busy, what is lost is replaced, and its calls are asked again."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from palestra.cluster.actor import Actor, ActorLost
from palestra.errors import PalestraError

log = logging.getLogger("palestra.cluster")

ATTEMPTS = 3  # of a call whose actors are lost, and of starting one before the run ends
MOST_KEYS = 2**16  # that are remembered
LOOK_SECONDS = 0.02  # between two looks for a member that is free


@dataclass(eq=False)
class Member:
    """An actor and what it is doing."""

    actor: Actor
    ready: bool = False
    leaving: bool = False
    load: int = 0

    def state(self) -> dict[str, Any]:
        """For people and files."""
        doing = "leaving" if self.leaving else "ready" if self.ready else "starting"
        actor = self.actor
        known = {"name": actor.name, "machine": actor.machine, "pid": actor.pid, "state": doing, "load": self.load}
        return known | actor.status


class Crew:
    """As many members as asked for, which may join and leave while it works."""

    def __init__(
        self,
        role: str,
        size: int,
        start: Callable[[str], Actor],
        prepare: Callable[[Actor], object] = lambda actor: None,
        prepared: Callable[[Actor], bool] = lambda actor: True,
    ):
        """`start` hosts a member of that name. It takes calls once it is `prepared`, which is asked with `lock` held;
        until then `prepare` is called, in a thread of its own.
        """
        self.role, self._start, self._prepare, self._prepared = role, start, prepare, prepared
        self.lock = threading.RLock()
        self.lost = self.asked_again = 0
        self._members: list[Member] = []
        self._keys: dict[Hashable, Member] = {}  # who had the last call of a key
        self._failed_starts = self._named = 0
        self._failure: PalestraError | None = None
        self._closed = False
        self.add(size)

    def __len__(self) -> int:
        return len([member for member in self._members if not member.leaving])

    def members(self) -> list[dict[str, Any]]:
        """Who there is, for people and files."""
        return [member.state() for member in self._members]

    def ready(self) -> list[Actor]:
        """Those that take calls."""
        return [member.actor for member in self._members if member.ready]

    def add(self, count: int = 1) -> list[str]:
        """Start more members; they take calls once they are prepared."""
        names = [f"{self.role}/{self._named + place}" for place in range(count)]
        self._named += count
        for name in names:
            self._hire(name)
        return names

    def remove(self, name: str | None = None) -> str:
        """Let a member leave once its calls have ended: that one, or the one that came last."""
        with self.lock:
            staying = [member for member in self._members if not member.leaving]
            found = [member for member in staying if name in (None, member.actor.name)]
            if not found:
                raise PalestraError(f"there is no {name}; there are {', '.join(m.actor.name for m in staying)}")
            if len(staying) == 1:
                raise PalestraError(f"{staying[0].actor.name} is the only one left and stays")
            leaving = found[-1]
            leaving.leaving, leaving.ready = True, False
        threading.Thread(target=self._see_off, args=(leaving,), name="see-off", daemon=True).start()
        return leaving.actor.name

    async def call(
        self,
        method: str,
        *args: Any,
        weight: int = 1,
        key: Hashable = None,
        wrong: Callable[[Any], str | None] = lambda value: None,
    ) -> Any:
        """Call a method of the least busy member, or of that which had the last call with the same key.

        Where the member is lost another is asked; one whose answer is `wrong`, in words, is given up.
        """
        for attempt in range(ATTEMPTS):
            member = await self._take(weight, key)
            try:
                value = await asyncio.wrap_future(member.actor.call(method, *args))
                if (why := wrong(value)) is None:
                    return value
                member.actor.lose(why)
                raise ActorLost(f"{member.actor.name} {why}")
            except ActorLost:
                if attempt == ATTEMPTS - 1:
                    raise
                self.asked_again += 1
            finally:
                self._put_back(member, weight)
        raise AssertionError

    async def stream(self, method: str, *args: Any, weight: int = 1, key: Hashable = None) -> AsyncGenerator[Any, None]:
        """The items of an asynchronous generator of one member; what has begun is not asked again."""
        member = await self._take(weight, key)
        items = member.actor.stream(method, *args)
        try:
            async for item in items:
                yield item
        finally:
            self._put_back(member, weight)
            await items.aclose()

    def each(self, method: str, *args: Any) -> "list[tuple[Actor, Future[Any]]]":
        """Call a method of every member that takes calls."""
        return [(actor, actor.call(method, *args)) for actor in self.ready()]

    def close(self) -> None:
        """Replace nobody from now on; the hub ends the members."""
        self._closed = True
        self._fail(PalestraError(f"the {self.role}s were closed"))

    async def _take(self, weight: int, key: Hashable) -> Member:
        while True:
            with self.lock:
                if self._failure is not None:
                    raise self._failure
                free = [member for member in self._members if member.ready and member.actor.lost is None]
                if free:
                    known = self._keys.pop(key, None)
                    chosen = known if known in free else min(free, key=lambda member: member.load)
                    chosen.load += weight
                    if key is not None:
                        self._keys[key] = chosen  # the last that was used comes last
                        if len(self._keys) > MOST_KEYS:
                            del self._keys[next(iter(self._keys))]
                    return chosen
            await asyncio.sleep(LOOK_SECONDS)

    def _put_back(self, member: Member, weight: int) -> None:
        with self.lock:
            member.load -= weight

    def _hire(self, name: str) -> None:
        try:
            actor = self._start(name)
        except PalestraError as error:
            self._do_without(name, error)
            return
        member = Member(actor)
        with self.lock:
            self._members.append(member)
        threading.Thread(target=self._bring_in, args=(member,), name=f"bring-in {name}", daemon=True).start()

    def _bring_in(self, member: Member) -> None:
        try:
            member.actor.ready.result()
            while not member.ready and not member.leaving:
                self._prepare(member.actor)
                with self.lock:
                    member.ready = self._prepared(member.actor)
        except ActorLost:
            self._failed_starts += 1
            self._replace(member)
            return
        except Exception as error:
            self._failed_starts += 1
            member.actor.lose(f"could not be prepared: {error}")
            self._replace(member)
            return
        self._failed_starts, actor = 0, member.actor
        log.info("%s is ready (process %d on %s)", actor.name, actor.pid, actor.machine)
        actor.when_lost.append(lambda _: self._replace(member))
        if actor.lost is not None:
            self._replace(member)

    def _replace(self, member: Member) -> None:
        with self.lock:
            if member not in self._members:
                return
            self._members.remove(member)
            ended, actor = self._closed or member.leaving, member.actor
        if ended:
            return
        self.lost += 1
        if self._failed_starts >= ATTEMPTS:
            why = PalestraError(f"{ATTEMPTS} times in a row a {self.role} could not start: {actor.lost}")
            self._do_without(actor.name, why)
            return
        log.warning("%s; it is replaced, and what it was asked is asked again", actor.lost)
        self._hire(actor.name)

    def _see_off(self, member: Member) -> None:
        while member.load > 0 and member.actor.lost is None:
            time.sleep(0.1)
        member.actor.end()
        with self.lock:
            if member in self._members:
                self._members.remove(member)
        log.info("%s has left", member.actor.name)

    def _do_without(self, name: str, error: PalestraError) -> None:
        """Go on with the others; without any, fail."""
        if self.ready():
            self._failed_starts = 0
            log.error("%s is given up, and the others go on: %s", name, error)
        else:
            self._fail(error)

    def _fail(self, error: PalestraError) -> None:
        with self.lock:
            self._failure = self._failure or error
