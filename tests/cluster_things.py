"""Objects to host in other processes."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from typing import Any

from palestra.work.fanout import Handle, WorkItem


class _Task(Future):
    def ask_to_end(self) -> None: ...

    def cancel(self) -> bool:
        return False


class Threads:
    """A backend whose workers are threads: everything else is as between processes, and starts at once."""

    def submit(self, item: WorkItem, args: tuple[Any, ...], gpu: str | None) -> Handle:
        task = _Task()

        def run() -> None:
            try:
                task.set_result(item.function(*args))
            except BaseException as error:
                task.set_exception(error)

        threading.Thread(target=run, name=item.name, daemon=True).start()
        return task

    def close(self) -> None: ...


class Counter:
    """Adds to a number."""

    def __init__(self, value: int):
        self.value = value
        self.cancelled = 0

    def add(self, more: int) -> int:
        return self.value + more

    async def sleep(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "slept"

    async def count(self, to: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(to):
                yield number
                await asyncio.sleep(0.001)
        finally:
            self.cancelled += 1

    def fail(self) -> None:
        raise ValueError("no such thing")

    def pid(self) -> int:
        return os.getpid()

    def busy(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def status(self) -> dict[str, int]:
        return {"value": self.value}


class Unpicklable(Exception):
    def __init__(self, a: int, b: int):
        super().__init__(f"{a} {b}")


class Odd:
    """Raises what cannot be sent."""

    def fail(self) -> None:
        raise Unpicklable(1, 2)


def broken() -> None:
    raise RuntimeError("it cannot be made")


def hosted_tiny_engine(address: str, settings: dict[str, Any]) -> Any:
    """The engine of tiny_server, with weights from a channel."""
    from tiny_server import tiny_engine

    from palestra.cluster.channel import ChannelError, open_channel
    from palestra.cluster.fleet import HostedEngine

    slow = settings.pop("slow", 0.0)

    class Hurt(HostedEngine):
        """With what can go wrong with it."""

        def fetch(self, version: int, keep_cache: bool) -> None:
            if not self.generated:  # later it is as fast as the others
                time.sleep(slow)
            super().fetch(version, keep_cache)

        def forget(self) -> None:
            """Sample with the weights of version 0 from now on."""
            self.engine.version = 0

        def lose_channel(self) -> None:
            def fetch(version: int) -> Any:
                raise ChannelError(f"version {version} is damaged")

            self._channel.fetch = fetch

    return Hurt(tiny_engine(**settings), open_channel(address))
