"""The one fan-out: work items with resources, a lease, retries and a stop, run by a backend; seeds to pipeline steps.

The caller passes a list of items, or an iterator that is advanced when there is room for another, and consumes the
outcomes as they come. An iterator that yields None is advanced again after the next outcome; it ends when no outcome is
left to wait for. A backend runs one item at a time: other machines plug in there.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from palestra.errors import LeaseLost, PalestraError, RunBusy
from palestra.work.pool import Pool
from palestra.work.redact import redact
from palestra.work.worker import output_to

log = logging.getLogger("palestra.work")

STOP_SECONDS = 60.0  # to save, after a stop was requested
SILENT_SECONDS = 300.0  # without a heartbeat a worker counts as hung and is killed
RETRY_SECONDS = 60.0  # at most, between two attempts
WAIT_SECONDS = 0.25  # between two polls of the stop and calls of progress
TAKEN = "another process has taken it over"
ASK_SECONDS = 0.05  # between two polls of items that are stopping


class Leased(Protocol):
    """Keeps an item from being run twice by several fan-outs."""

    def acquire(self) -> None:
        """Take it; raises `RunBusy` if another has it."""

    def renew(self) -> None:
        """Heartbeat; raises `LeaseLost` if another has taken it over."""

    def release(self) -> None:
        """Release it; one that was lost is left to its new owner."""


@dataclass(frozen=True)
class WorkItem:
    """A picklable function with its arguments, resources and retry policy."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] | Callable[[], tuple[Any, ...]] = ()
    """Or a function that returns them when an attempt starts, called here with the lease held."""
    cores: int = 1
    """Compute threads; an item that needs more than there are runs alone."""
    gpu: float = 0.0
    """Share of one GPU, if there are any."""
    memory: int = 0
    """Bytes of main memory; an item that needs more than there is runs alone."""
    timeout: float | None = None
    """Seconds after which it is killed; not in line."""
    retries: int = 0
    """New attempts after a failure: after one second, then two, four and so on."""
    log: Path | None = None
    """A file for its output."""
    lease: Leased | None = None
    done: Callable[[bool], bool] = lambda held: False
    """Whether nothing is left to do: called before the lease is taken, and again (`held`) before the first attempt."""
    complete: "Callable[[WorkOutcome], None]" = lambda outcome: None
    """Called here after each attempt, with the lease held; an error that it raises is the attempt's."""


@dataclass(frozen=True)
class WorkOutcome:
    """The value of an item, or the error with its own traceback."""

    item: WorkItem
    value: Any = None
    error: BaseException | None = None
    """CancelledError: killed, as it did not end within the grace. LeaseLost: another process has the item now."""
    seconds: float = 0.0
    """Of the last attempt."""
    attempts: int = 0
    """0: it was done already, or could not start."""


@dataclass(frozen=True)
class Resources:
    """What the items of one fan-out share: cores, GPUs as CUDA_VISIBLE_DEVICES names them, bytes of main memory."""

    cores: int = 1
    gpus: Sequence[str] = ()
    memory: float = math.inf


class Stop:
    """Requests the end of a fan-out; may be called by a signal handler."""

    requested = False

    def __call__(self) -> None:
        """Start no more items, let running ones save and end, kill them after the grace."""
        self.requested = True


class Handle(Protocol):
    """An attempt at an item, wherever it runs: like a `concurrent.futures.Future`, with a cooperative end."""

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` when it has ended, from any thread."""

    def done(self) -> bool:
        """Whether it has ended."""

    def result(self) -> Any:
        """The value; raises the error, or CancelledError."""

    def ask_to_end(self) -> None:
        """Request that it saves and ends; idempotent."""

    def cancel(self) -> object:
        """Kill it."""


class Backend(Protocol):
    """Where items run."""

    def submit(self, item: WorkItem, args: tuple[Any, ...], gpu: str | None) -> Handle:
        """Start an attempt at an item, on that GPU."""

    def close(self) -> None:
        """End all workers; no attempt runs any more."""


class _Called(Future):
    def ask_to_end(self) -> None: ...


class Inline:
    """Runs an item in this process, while the fan-out waits."""

    def submit(self, item: WorkItem, args: tuple[Any, ...], gpu: str | None) -> Handle:
        """Call the function; a KeyboardInterrupt ends the fan-out, not the item."""
        called = _Called()
        try:
            with output_to(None if item.log is None else str(item.log)):
                called.set_result(item.function(*args))
        except Exception as error:
            called.set_exception(error)
        return called

    def close(self) -> None: ...


class Processes:
    """Runs items in worker processes, reused by items with the same needs; `env` is added to their environment.

    One pool of one worker each, so that each has its own GPU in its environment.
    """

    def __init__(
        self, name: str, *, env: dict[str, str] | None = None, heartbeat_timeout: float | None = SILENT_SECONDS
    ) -> None:
        self._name, self._env, self._silence = name, env or {}, heartbeat_timeout
        self._pools: list[Pool] = []
        self._idle: dict[tuple[int, str | None], list[Pool]] = {}

    def submit(self, item: WorkItem, args: tuple[Any, ...], gpu: str | None) -> Handle:
        """Run in an idle worker, else in a new one."""
        idle = self._idle.setdefault((item.cores, gpu), [])
        if not idle:
            env = self._env | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
            name = f"{self._name}-{len(self._pools)}"
            idle.append(Pool(1, threads=item.cores, name=name, env=env, heartbeat_timeout=self._silence))
            self._pools += idle
        task = idle[-1].submit(item.function, *args, timeout=item.timeout, log=item.log)
        pool = idle.pop()
        task.add_done_callback(lambda ended: idle.append(pool))
        return task

    def close(self) -> None:
        """End the workers, all at once."""
        for pool in self._pools:
            pool.close()
        for pool in self._pools:
            pool.join()


def run(
    tasks: Iterable[WorkItem | None],
    resources: Resources,
    backend: Backend,
    *,
    stop: Stop | None = None,
    grace: float = STOP_SECONDS,
    follow: float | None = None,
    look: float = 0.5,
    renew: float = 2.0,
    progress: Callable[[Mapping[str, str]], None] = lambda states: None,
) -> Generator[WorkOutcome, None, None]:
    """Run the items as far as resources and leases allow; yields their outcomes in the order in which they end.

    The lease of an outcome is held until the next one is requested. Close the iterator (`contextlib.closing`): items
    that then run are stopped as by `stop`. Items that never started have no outcome.

    Args:
        tasks: The items; an iterator is advanced when there is room for another.
        resources: What may be used at once.
        backend: Where they run; closed at the end.
        stop: Once requested, no more items start, and running ones are asked to save and end.
        grace: Seconds until items that were asked to end are killed.
        follow: Seconds from the first failure until all other items are killed; None: they continue.
        look: Seconds between two attempts to get a lease that another process holds.
        renew: Seconds between two renewals of a lease.
        progress: Called repeatedly with the state of each known item: waiting, running or elsewhere.
    """
    fan = _FanOut(iter(tasks), resources, backend, stop or Stop(), grace, follow, look, renew)
    try:
        yield from fan.outcomes(progress)
    finally:
        fan.close()


@dataclass(eq=False)
class _Entry:
    """An item that was pulled and has not ended."""

    item: WorkItem
    attempts: int = 0
    due: float = 0.0  # when to try it next
    state: str = "waiting"
    lost: bool = False
    handle: Handle | None = None
    gpu: str | None = None
    began: float = 0.0
    failed: WorkOutcome | None = None  # the last attempt


@dataclass
class _FanOut:
    source: Iterator[WorkItem | None]
    resources: Resources
    backend: Backend
    stop: Stop
    grace: float
    follow: float | None
    look: float
    renew: float

    def __post_init__(self) -> None:
        self.entries: list[_Entry] = []
        self.held: list[_Entry] = []  # those whose lease is ours
        self.ended: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self.quiet = False  # the source has yielded None: nothing until the next outcome
        self.deadline: float | None = None  # when what runs is killed
        self.closing = threading.Event()
        self.beating = threading.Thread(target=self._beat, name="palestra-leases", daemon=True)
        self.beating.start()

    def outcomes(self, progress: Callable[[Mapping[str, str]], None]) -> Iterator[WorkOutcome]:
        while True:
            if self.stop.requested and self.deadline is None:
                self.deadline = time.monotonic() + self.grace
            if self.deadline is None:
                yield from self._begin()
            progress({entry.item.name: entry.state for entry in self.entries})
            if not self._running() and (self.deadline is not None or not self.entries):
                break
            if (entry := self._await_one()) is not None:
                yield from self._conclude(entry)
        for entry in list(self.entries):
            if entry.failed is not None:  # it waited for a retry
                yield from self._end(entry, entry.failed)

    def _begin(self) -> Iterator[WorkOutcome]:
        while not self.stop.requested:
            waiting = (entry for entry in self.entries if entry.handle is None and entry.due <= time.monotonic())
            entry = next(waiting, None) or self._pull()
            if entry is None or not self._fits(entry.item):
                return
            yield from self._start(entry)
            if entry.handle is not None and entry.handle.done():  # inline: its outcome first
                return

    def _pull(self) -> _Entry | None:
        if self.quiet or sum(entry.item.cores for entry in self._running()) >= self.resources.cores:
            return None
        item = next(self.source, None)
        if item is None:
            self.quiet = True
            return None
        self.entries.append(_Entry(item))
        return self.entries[-1]

    def _running(self) -> list[_Entry]:
        return [entry for entry in self.entries if entry.handle is not None]

    def _fits(self, item: WorkItem) -> bool:
        running = [entry.item for entry in self._running()]
        fits_gpu = not item.gpu or self._gpu()[0] + item.gpu <= 1.0 + 1e-9
        fits_memory = sum(other.memory for other in running) + item.memory <= self.resources.memory
        fits_cores = sum(other.cores for other in running) + item.cores <= self.resources.cores
        return not running or (fits_gpu and fits_memory and fits_cores)

    def _gpu(self) -> tuple[float, str | None]:
        """The used share of the least used GPU, and its name."""
        gpus = self.resources.gpus
        taken = [(sum(entry.item.gpu for entry in self.entries if entry.gpu == gpu), i) for i, gpu in enumerate(gpus)]
        share, index = min(taken, default=(0.0, 0))
        return share, gpus[index] if gpus else None

    def _start(self, entry: _Entry) -> Iterator[WorkOutcome]:
        """Start an attempt, unless another process has the item, or has done it."""
        item, held = entry.item, entry in self.held
        try:
            if entry.lost:
                raise LeaseLost(TAKEN)
            is_done = not held and item.done(False)
            if not is_done and not held and item.lease is not None:
                item.lease.acquire()
                self.held.append(entry)
            if is_done or (entry.attempts == 0 and item.done(True)):
                yield from self._end(entry, WorkOutcome(item))
                return
            args = item.args() if callable(item.args) else item.args
            entry.gpu = self._gpu()[1] if item.gpu else None
            entry.began, entry.state = time.monotonic(), "running"
            entry.handle = self.backend.submit(item, args, entry.gpu)
        except RunBusy:
            entry.state, entry.due = "elsewhere", time.monotonic() + self.look
            return
        except (OSError, PalestraError) as error:
            yield from self._end(entry, WorkOutcome(item, error=error, attempts=entry.attempts))
            return
        entry.attempts += 1
        entry.handle.add_done_callback(lambda handle: self.ended.put(entry))

    def _await_one(self) -> _Entry | None:
        """The next item to end; None after a while, to poll the stop and retries."""
        now, patience = time.monotonic(), WAIT_SECONDS
        for entry in self.entries:
            if entry.handle is None:  # an item that is due waits for room
                patience = min(patience, entry.due - now) if entry.due > now else patience
            elif entry.lost or (self.deadline is not None and now >= self.deadline):
                entry.handle.cancel()
            elif self.stop.requested:
                entry.handle.ask_to_end()
        with contextlib.suppress(queue.Empty):
            return self.ended.get(timeout=patience if self.deadline is None else ASK_SECONDS)
        return None

    def _conclude(self, entry: _Entry) -> Iterator[WorkOutcome]:
        """Handle the end of an attempt: the outcome, or a retry."""
        assert entry.handle is not None
        handle, entry.handle, entry.gpu = entry.handle, None, None
        outcome = WorkOutcome(entry.item, seconds=time.monotonic() - entry.began, attempts=entry.attempts)
        try:
            outcome = replace(outcome, value=handle.result())
        except Exception as error:
            outcome = replace(outcome, error=error)
        try:
            if entry.lost:
                raise LeaseLost(TAKEN)
            entry.item.complete(outcome)
        except (OSError, PalestraError) as error:
            outcome = replace(outcome, value=None, error=error)
        error, over = outcome.error, self.stop.requested or self.deadline is not None
        if error is None or isinstance(error, LeaseLost) or over or entry.attempts > entry.item.retries:
            if error is not None and self.follow is not None and self.deadline is None:
                self.deadline = time.monotonic() + self.follow
            yield from self._end(entry, outcome)
            return
        seconds = min(RETRY_SECONDS, 2.0 ** (entry.attempts - 1))
        entry.failed, entry.due = outcome, time.monotonic() + seconds
        first = str(getattr(error, "message", error)).strip().partition("\n")[0]
        log.warning("%s failed, retrying in %g s: %s", entry.item.name, seconds, redact(first))

    def _end(self, entry: _Entry, outcome: WorkOutcome) -> Iterator[WorkOutcome]:
        self.entries.remove(entry)
        self.quiet = False
        try:
            yield outcome
        finally:
            self._release(entry)

    def close(self) -> None:
        """End what still runs: cooperatively, then by kill; at once if the grace is over already."""
        running = [entry.handle for entry in self.entries if entry.handle is not None]
        until = 0.0 if self.deadline is not None else time.monotonic() + self.grace
        try:
            while time.monotonic() < until and not all(handle.done() for handle in running):
                for handle in running:
                    handle.ask_to_end()
                time.sleep(ASK_SECONDS)
        finally:  # a second Ctrl-C ends the grace
            for handle in running:
                handle.cancel()
            self.backend.close()
            self.closing.set()
            self.beating.join()
            for entry in list(self.held):
                self._release(entry)

    # ---- leases

    def _release(self, entry: _Entry) -> None:
        if entry not in self.held or entry.item.lease is None:
            return
        self.held.remove(entry)
        try:
            entry.item.lease.release()
        except (OSError, PalestraError) as error:  # it is then taken over when this process has ended
            log.warning("the lease on %s could not be released: %s", entry.item.name, error)

    def _beat(self) -> None:
        while not self.closing.wait(self.renew):
            for entry in list(self.held):
                try:
                    assert entry.item.lease is not None
                    entry.item.lease.renew()
                except LeaseLost:
                    entry.lost = True
                except (OSError, PalestraError, RuntimeError) as error:
                    if entry in self.held:  # not released meanwhile
                        log.warning("the lease on %s could not be renewed: %s", entry.item.name, error)
