"""What happened when: spans, counters and instants as Chrome trace events, a file that Perfetto opens.

The file is a JSON array, one event a line. The closing bracket comes with `close`; viewers do without it, so a killed
run's trace opens too. Recording appends a tuple to memory; a background thread formats and writes once a second.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import errno
import functools
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

WRITE_EVERY = 1.0  # seconds
MAX_WAITING = 50_000  # events in memory; beyond that, whoever records writes them himself

TAIL = 1 << 20  # bytes; the last event of a killed run is not longer

Event = tuple[str, str, int, int, int, dict[str, Any]]  # phase, name, track, start (ns), duration (ns), args

logger = logging.getLogger("palestra.track")


class _Track(threading.local):
    """Gives each thread its own small track number, on its first event."""

    def __init__(self, tracer: "Tracer") -> None:
        self.id = next(tracer._numbers)
        tracer._events.append(("M", "thread_name", self.id, 0, 0, {"name": threading.current_thread().name}))


class _Span:
    """One timed stretch; entered and left once."""

    __slots__ = ("args", "name", "start", "tracer")

    def __init__(self, tracer: "Tracer", name: str, args: dict[str, Any]) -> None:
        self.tracer, self.name, self.args = tracer, name, args

    def __enter__(self) -> None:
        self.start = time.perf_counter_ns()

    def __exit__(self, *failure: object) -> None:
        tracer = self.tracer
        if tracer.enabled:
            now = time.perf_counter_ns()
            tracer._add(("X", self.name, tracer._track.id, self.start, now - self.start, self.args))


class Tracer:
    """Records events of all threads of one process into one file; `append` continues a cut or killed one."""

    def __init__(self, path: Path, enabled: bool = True, append: bool = False) -> None:
        self.enabled = enabled
        self._events: deque[Event] = deque()
        self._numbers = itertools.count(1)
        self._track = _Track(self)
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._path = path
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        if not enabled:
            return
        started = _cut_to_last_event(path) if append else None
        self._file = open(path, "ab" if started is not None else "wb", buffering=0)  # noqa: SIM115 (open until close)
        wall, clock = time.time_ns(), time.perf_counter_ns()
        # Times count from the first start of the run, so that a resumed part stands where it belongs and the numbers
        # stay small enough for a viewer's doubles.
        self._origin = clock - (wall - started if started is not None else 0)
        if started is None:
            self._write("[\n" + json.dumps({"ph": "M", "name": "start", "args": {"unix_ns": wall}}))
        self._thread = threading.Thread(target=self._write_now_and_then, name="trace writer", daemon=True)
        self._thread.start()

    def span(self, name: str, **args: Any) -> _Span:
        """Return a context manager that records the time spent inside, with `args` (plain JSON values) beside it."""
        return _Span(self, name, args)

    def counter(self, name: str, value: float) -> None:
        """Record a value that is drawn over time; NaN and infinities cannot be drawn and are left out."""
        if self.enabled and math.isfinite(value):
            self._add(("C", name, self._track.id, time.perf_counter_ns(), 0, {"value": value}))

    def flush(self) -> None:
        """Write everything recorded so far."""
        with self._writing:
            if self.enabled and self._events:
                waiting = [self._events.popleft() for _ in range(len(self._events))]
                self._write("".join(map(self._line, waiting)))

    def close(self) -> None:
        """Write what is left and the closing bracket."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join()
        self._thread = None
        self.flush()
        with self._writing:
            if self.enabled:
                self._write("\n]\n")
            self.enabled = False
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _add(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) > MAX_WAITING:
            self.flush()

    def _write_now_and_then(self) -> None:
        while not self._closing.wait(WRITE_EVERY):
            self.flush()

    def _write(self, text: str) -> None:
        try:
            data = text.encode()
            if self._file.write(data) != len(data):  # unbuffered: a nearly full disk takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a trace is not worth a run
            self.enabled = False
            logger.warning("no more trace: cannot write %s (%s)", self._path, error.strerror)

    def _line(self, event: Event) -> str:
        phase, name, track, start, duration, args = event
        line = f',\n{{"ph":"{phase}","name":{_quoted(name)},"pid":{self._pid},"tid":{track}'
        if phase != "M":
            line += f',"ts":{(start - self._origin) / 1000:.3f}'  # µs
        if phase == "X":
            line += f',"dur":{duration / 1000:.3f}'
        return line + (f',"args":{json.dumps(args, default=str)}}}' if args else "}")


_quoted = functools.lru_cache(maxsize=1024)(json.dumps)


def _cut_to_last_event(path: Path) -> int | None:
    """Cut what a kill or `close` left after the last whole event; the run's start in unix ns, None for a fresh file."""
    if not path.exists():
        return None
    with open(path, "r+b") as file:
        file.readline()
        try:
            started = json.loads(file.readline().rstrip(b",\n"))["args"]["unix_ns"]
        except (ValueError, KeyError):
            return None
        base = max(0, file.seek(0, os.SEEK_END) - TAIL)
        file.seek(base)
        tail = file.read().rstrip(b"\n],")
        if not _is_event(tail[tail.rfind(b"\n") + 1 :]):
            tail = tail[: tail.rfind(b",\n")]
        file.truncate(base + len(tail))
    return started


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
