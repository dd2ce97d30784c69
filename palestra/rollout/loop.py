"""An asyncio loop in a thread of its own, where workflows run while another thread owns the device."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

log = logging.getLogger("palestra.rollout")

Task = asyncio.Task[Any]
CLOSE_SECONDS = 5.0
"""How long `close` waits for workflows to end once they are cancelled."""


class LoopThread:
    """Runs coroutines; as a context manager it ends with all that is still running cancelled."""

    def __init__(self, name: str = "rollout"):
        self.loop = asyncio.new_event_loop()
        self._running: set[Task] = set()
        """The loop itself knows its tasks by weak references alone."""
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run a coroutine there; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def start_all(self, coroutines: Sequence[Coroutine[Any, Any, Any]], ended: Callable[[int, Task], None]) -> None:
        """Run coroutines there and wait until each has come to its first wait.

        Where one ends, `ended` is called in the loop's thread with its place and what it gave.
        """

        async def begin() -> None:
            for place, coroutine in enumerate(coroutines):
                task = asyncio.ensure_future(coroutine)
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                task.add_done_callback(partial(ended, place))
            await asyncio.sleep(0)  # all of them come before what is asked for now

        self.start(begin()).result()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Cancel what runs, and end the thread; where a workflow blocks the loop, leave the thread to the exit."""
        if self.loop.is_closed():
            return
        try:
            self.start(_cancel_all()).result(seconds)
        except TimeoutError:
            log.warning("a workflow blocks the event loop or ignores its cancellation: its thread is left behind")
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close(0.1 if kind is not None and issubclass(kind, KeyboardInterrupt) else CLOSE_SECONDS)


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
