"""A timeline of a run: spans as Chrome trace events, one file per process, which Perfetto opens; merged when read.

The file is a JSON array, one event a line. The closing bracket comes with `close`; viewers do without it, so a killed
run's trace opens too. Recording appends a tuple to memory; a background thread formats and writes once a second.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import errno
import functools
import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Self

NAMES = {
    "answers", "checkpoint", "collect", "eval", "interact", "learn", "likelihood",
    "publish", "record", "rollout", "sample", "suites", "texts", "train",
}  # fmt: skip
"""What Palestra's own spans are called; a reader may rely on them."""
WRITE_EVERY = 1.0  # seconds
MAX_WAITING = 50_000  # events in memory; beyond that, the recording thread writes them itself
TAIL = 1 << 20  # bytes; the last event of a killed run is not longer

Event = tuple[str, str, int, int, int, dict[str, Any]]  # phase, name, track, start (ns), duration (ns), args

logger = logging.getLogger("palestra.track")


class TraceEvent(NamedTuple):
    """A span as it is read back."""

    name: str
    track: str
    """Role and rank: `trainer/0`, `generator/3`, `verifier/7`, `sync`."""
    start: int
    """Unix time in ns."""
    duration: int
    """In ns."""
    args: dict[str, Any]
    """Where they apply `step`, `version`, `group`, `tokens`."""


class _Track(threading.local):
    """Gives each thread its own small track number, on its first event."""

    def __init__(self, tracer: "Tracer") -> None:
        self.id = next(tracer._numbers)
        thread = threading.current_thread()
        name = tracer.track if thread is threading.main_thread() else thread.name
        tracer._events.append(("M", "thread_name", self.id, 0, 0, {"name": name}))


class _Span:
    __slots__ = ("args", "name", "start", "tracer")

    def __init__(self, tracer: "Tracer", name: str, args: dict[str, Any]) -> None:
        self.tracer, self.name, self.args = tracer, name, args

    def __enter__(self) -> None:
        self.start = time.perf_counter_ns()

    def __exit__(self, *failure: object) -> None:
        tracer = self.tracer
        if tracer.enabled:
            now = time.perf_counter_ns()
            tracer._events.append(("X", self.name, tracer._track.id, self.start, now - self.start, self.args))
            if len(tracer._events) > MAX_WAITING:
                tracer.flush()


class Tracer:
    """Records spans of all threads of one process into one file; `append` continues a truncated or killed one.

    Spans of the main thread are on `track`, those of another thread on the track that is the thread's name.
    """

    def __init__(self, path: Path, enabled: bool = True, append: bool = False, track: str = "trainer/0") -> None:
        self.enabled, self.track = enabled, track
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
        """A context manager that records the time spent inside, with `args` (plain JSON values)."""
        return _Span(self, name, args)

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
        if phase == "X":  # µs
            line += f',"ts":{(start - self._origin) / 1000:.3f},"dur":{duration / 1000:.3f}'
        return line + (f',"args":{json.dumps(args, default=str)}}}' if args else "}")


_quoted = functools.lru_cache(maxsize=1024)(json.dumps)


def read_traces(*paths: Path) -> list[TraceEvent]:
    """The spans of several processes by their start; what a killed one left torn at the end is ignored."""
    spans = []
    for path in paths:
        origin, tracks = 0, {}
        for line in path.read_bytes().splitlines():
            event = _parsed(line.rstrip(b","))
            if event is None:
                continue
            where, args = (event.get("pid"), event.get("tid")), event.get("args", {})
            if event["name"] == "start":
                origin = args["unix_ns"]
            elif event["name"] == "thread_name":
                tracks[where] = args["name"]
            elif event["ph"] == "X":
                start, duration = origin + round(event["ts"] * 1000), round(event["dur"] * 1000)
                spans.append(TraceEvent(event["name"], tracks[where], start, duration, args))
    return sorted(spans, key=lambda span: span.start)


def _cut_to_last_event(path: Path) -> int | None:
    """Cut what a kill or `close` left after the last whole event; the run's start in unix ns, None for a fresh file."""
    if not path.exists():
        return None
    with open(path, "r+b") as file:
        file.readline()
        header = _parsed(file.readline().rstrip(b",\n"))
        if header is None:
            return None
        base = max(0, file.seek(0, os.SEEK_END) - TAIL)
        file.seek(base)
        tail = file.read().rstrip(b"\n],")
        if _parsed(tail[tail.rfind(b"\n") + 1 :]) is None:
            tail = tail[: tail.rfind(b",\n")]
        file.truncate(base + len(tail))
    return header["args"]["unix_ns"]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None for a bracket or a torn event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
