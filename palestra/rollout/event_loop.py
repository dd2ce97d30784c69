"""The asyncio loop of the workflows in its own thread, and the watchdog that tells who waits for whom."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from types import FrameType
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
        except CancelledError:  # by an earlier call, which was left behind and has come to its turn
            pass
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


class LoopLag:
    """How late an event loop comes round to what is due. Code that blocks it delays every other workflow as much.

    `run()` is a task of that loop; any thread may `take()`.
    """

    def __init__(self, every: float = 0.05):
        """It looks `every` so many seconds."""
        self._every = every
        self._due: float | None = None
        self._lock = threading.Lock()
        self._sum, self._most, self._count = 0.0, 0.0, 0

    async def run(self) -> None:
        """Measure until cancelled."""
        try:
            while True:
                self._due = time.monotonic() + self._every
                await asyncio.sleep(self._every)
                self._note(time.monotonic() - self._due)
        finally:
            self._due = None

    def take(self) -> dict[str, float]:
        """The mean and the longest lag since the last call, in seconds, for a row of metrics."""
        due = self._due
        if due is not None and (late := time.monotonic() - due) > self._every:
            self._note(late)  # the loop is blocked right now
        with self._lock:
            mean, most = self._sum / max(self._count, 1), self._most
            self._sum, self._most, self._count = 0.0, 0.0, 0
        return {"time/loop_lag_mean": mean, "time/loop_lag_max": most}

    def _note(self, late: float) -> None:
        with self._lock:
            self._sum, self._most, self._count = self._sum + late, max(self._most, late), self._count + 1


class RolloutWatchdog:
    """A thread that tells, once for each stall, what every thread and task waits for. It ends nothing.

    As a context manager it watches until it is left; `progress()` says that something got done.
    """

    def __init__(self, seconds: float, describe: Callable[[], str], loop: asyncio.AbstractEventLoop):
        """After `seconds` without progress it logs what `describe` says and the stacks of threads and `loop`'s tasks.

        `describe` is called in the watchdog's thread and must wait for nothing.
        """
        self._seconds, self._describe, self._loop = seconds, describe, loop
        self._last = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._end.set()
        self._thread.join()

    def progress(self) -> None:
        """Something got done."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        told = None
        while not self._end.wait(min(self._seconds / 4, 1.0)):
            last = self._last
            if last == told or time.monotonic() - last < self._seconds:
                continue
            told = last
            # The stacks first: they cannot fail, and what is said last stands last in the terminal.
            log.warning("no progress for %.1f s; all stacks follow\n%s", time.monotonic() - last, stacks(self._loop))
            try:
                log.warning("who waits for whom: %s", self._describe())
            except Exception:  # the run it speaks of goes on changing; that must not end the watch
                log.exception("who waits for whom could not be told")


def stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Where every other thread of this process is, and every task of a loop with all that it awaits."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            found.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        awaited = traceback.StackSummary.extract(_awaited(task.get_coro()))
        found.append(f"{task!r}\n{''.join(awaited.format())}")
    return "\n".join(found)


def _awaited(inner: Any) -> Iterator[tuple[FrameType, int]]:
    """The frames of a coroutine and of those it awaits, outermost first; a task itself tells of the first alone."""
    while inner is not None:
        # Of coroutines, generators and asynchronous generators.
        frame, inner = next(
            (
                (getattr(inner, frame), getattr(inner, awaits))
                for frame, awaits in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
                if hasattr(inner, frame)
            ),
            (None, None),
        )
        if frame is not None:
            yield frame, frame.f_lineno
