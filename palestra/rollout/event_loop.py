"""The event loop of the workflows in its own thread, its lag, and a watchdog that logs where a stall waits."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from statistics import fmean
from types import FrameType
from typing import Any, Self

log = logging.getLogger("palestra.rollout")

Task = asyncio.Task[Any]
CLOSE_SECONDS = 5.0  # that `close` waits for cancelled workflows to end


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
        """Run coroutines there and return once each has reached its first await.

        When one ends, `ended` is called in the loop's thread with its index and its task.
        """

        async def begin() -> None:
            for place, coroutine in enumerate(coroutines):
                task = asyncio.ensure_future(coroutine)
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                task.add_done_callback(partial(ended, place))
            await asyncio.sleep(0)  # all of them run before the caller continues

        self.start(begin()).result()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Cancel all tasks and end the thread; where a workflow blocks the loop, the thread is left running."""
        if self.loop.is_closed():
            return
        try:
            self.start(_cancel_all()).result(seconds)
        except TimeoutError:
            log.warning("a workflow blocks the event loop or ignores its cancellation: its thread is left behind")
            return
        except CancelledError:  # by an earlier call that timed out and has now run
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
    """How late an event loop runs what is due. Code that blocks it delays every other workflow as much.

    `run()` is a task of that loop; any thread may `take()`.
    """

    def __init__(self, every: float = 0.05):
        """It measures every `every` seconds."""
        self._every = every
        self._due: float | None = None
        self._lock = threading.Lock()
        self._lags: list[float] = []

    async def run(self) -> None:
        """Measure until cancelled."""
        try:
            while True:
                self._due = time.monotonic() + self._every
                await asyncio.sleep(self._every)
                with self._lock:
                    self._lags.append(time.monotonic() - self._due)
        finally:
            self._due = None

    def take(self) -> dict[str, float]:
        """The mean and the longest lag since the last call, in seconds, for a row of metrics."""
        due = self._due
        with self._lock:
            lags, self._lags = self._lags, []
        if due is not None and (late := time.monotonic() - due) > self._every:
            lags.append(late)  # the loop is blocked right now
        return {"time/loop_lag_mean": fmean(lags or [0.0]), "time/loop_lag_max": max(lags, default=0.0)}


class RolloutWatchdog:
    """A thread that logs, once per stall, what every thread and task waits for. It ends nothing.

    It watches while its context is entered; `progress()` restarts its clock.
    """

    def __init__(self, seconds: float, describe: Callable[[], str], loop: asyncio.AbstractEventLoop):
        """After `seconds` without progress it logs `describe()` and the stacks of threads and `loop`'s tasks.

        `describe` is called in the watchdog's thread and must not block.
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
        """Restart the clock."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        logged = None
        while not self._end.wait(min(self._seconds / 4, 1.0)):
            last = self._last
            if last == logged or time.monotonic() - last < self._seconds:
                continue
            logged = last
            # The stacks first: they cannot fail, and the summary should be last in the terminal.
            log.warning("no progress for %.1f s; all stacks follow\n%s", time.monotonic() - last, stacks(self._loop))
            try:
                log.warning("groups in flight: %s", self._describe())
            except Exception:  # its data changes meanwhile, which must not end the watch
                log.exception("the groups in flight could not be described")


def stacks(loop: asyncio.AbstractEventLoop) -> str:
    """The stacks of every other thread of this process, and of every task of a loop with all that it awaits."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        awaited = traceback.StackSummary.extract(_awaited(task.get_coro()))
        lines.append(f"{task!r}\n{''.join(awaited.format())}")
    return "\n".join(lines)


def _awaited(inner: Any) -> Iterator[tuple[FrameType, int]]:
    """The frames of a coroutine and of those it awaits, outermost first; `Task.get_stack` has only the first."""
    while inner is not None:
        for kind, awaits in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            if hasattr(inner, f"{kind}_frame"):  # a coroutine, a generator or an asynchronous generator
                frame, inner = getattr(inner, f"{kind}_frame"), getattr(inner, awaits)
                break
        else:
            return
        if frame is not None:
            yield frame, frame.f_lineno
