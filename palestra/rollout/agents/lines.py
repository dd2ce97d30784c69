"""Calls to another process as lines of JSON: many at once, each answered by a line with its id."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

LONGEST_LINE = 1 << 26


class LineCalls:
    """Calls over one connection. A cancelled call sends `{"cancel": id}`."""

    def __init__(
        self,
        opening: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
        gone: Callable[[], Awaitable[Exception]],
    ):
        """`gone` is called when nothing more can come: what waits fails with what it returns."""
        self.open = asyncio.Event()
        """Set with the first line, or when the other process is gone."""
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._connection = asyncio.ensure_future(opening)
        self._reading = asyncio.create_task(self._read(gone))

    @property
    def ended(self) -> bool:
        """Whether no call can be answered any more."""
        return self._reading.done()

    async def __call__(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a job."""
        id = next(self._numbers)
        self.waiting[id] = done = asyncio.get_running_loop().create_future()
        try:
            _, writer = await asyncio.shield(self._connection)
            writer.write(_line({**job, "id": id}))
            try:
                return await done
            except asyncio.CancelledError:
                writer.write(_line({"cancel": id}))
                raise
        finally:
            del self.waiting[id]

    async def close(self) -> None:
        """Close what the other process reads."""
        (await self._connection)[1].close()

    async def _read(self, gone: Callable[[], Awaitable[Exception]]) -> None:
        try:
            reader, _ = await self._connection
        except OSError:  # which every call raises
            self.open.set()
            return
        with suppress(ConnectionError, ValueError):  # it may be killed in the middle of a line
            while line := await reader.readline():
                answer = json.loads(line)
                self.open.set()
                if (done := self.waiting.get(answer["id"])) is not None and not done.done():
                    done.set_result(answer)
        self.open.set()
        error = await gone()
        for done in self.waiting.values():
            if not done.done():
                done.set_exception(error)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
