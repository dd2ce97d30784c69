"""A timeline of a run: spans as Chrome trace events, one file per process, which Perfetto opens; merged when read.

The file is a JSON array, one event a line. The closing bracket comes with `close`; viewers do without it, so a killed
run's trace opens too. Events wait in memory; the first span that ends a second after the last write writes them.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

NAMES = {
    "answers", "checkpoint", "collect", "eval", "fetch", "install", "interact", "learn", "likelihood", "lm_eval",
    "publish", "record", "rollout", "sample", "suites", "texts", "train", "verify", "video",
}  # fmt: skip
"""What Palestra's own spans are called; a reader may rely on them."""
WRITE_EVERY = 1.0  # seconds
TAIL = 1 << 20  # bytes; the last event of a killed run is not longer
FILES = "trace*.json"
"""The traces of a session: `trace.json` of its first trainer, and that of each other process by its role."""
LANES = 2**22  # numbers from here on are no thread's

encode = json.JSONEncoder(separators=(",", ":"), default=str).encode

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
    """Where they apply `step`, `version`, `group`, `tokens`, `status`."""


def trace_file(role: str) -> str:
    """The name of the trace of a process with a role: `trace.generator-0.json`."""
    return f"trace.{role.replace('/', '-')}.json"


class Tracer(AbstractContextManager["Tracer"]):
    """Records spans of all threads of one process into one file; `append` continues a truncated or killed one.

    Spans of the main thread are on `track`, those of another thread on the track that is the thread's name, unless they
    name theirs. While it is open, `span` records here.
    """

    current: ClassVar["Tracer | None"] = None
    """That of this process."""

    def __init__(self, path: Path, enabled: bool = True, append: bool = False, track: str = "trainer/0") -> None:
        self.enabled, self.track, self._path = enabled, track, path
        self._tracks: dict[int, str] = {}  # by thread or lane, once it has an event
        self._lanes: dict[str, dict[int, int]] = {}  # by track: when the last span of each lane has ended
        self._numbers = count(LANES)
        self._waiting: list[str] = []
        self._lock = threading.Lock()
        if not enabled:
            return
        started = _cut_to_last_event(path) if append else None
        self._file = open(path, "ab" if started is not None else "wb", buffering=0)  # noqa: SIM115 (open until close)
        wall, clock = time.time_ns(), time.perf_counter_ns()
        # Times count from the first start of the run, so that a resumed part stands where it belongs and the numbers
        # stay small enough for a viewer's doubles.
        self._origin = clock - (wall - started if started is not None else 0)
        self._due = time.monotonic() + WRITE_EVERY
        if started is None:
            self._write("[\n" + encode({"ph": "M", "name": "start", "args": {"unix_ns": wall}}))
        Tracer.current = self

    @contextmanager
    def span(self, name: str, *, track: str | None = None, **args: Any) -> Iterator[dict[str, Any]]:
        """Record the time spent inside, with `args` (plain JSON values); it gives them, to be added to.

        Spans of a named track may overlap.
        """
        start = time.perf_counter_ns()
        try:
            yield args
        finally:
            if self.enabled:
                self._record(name, start, time.perf_counter_ns(), args, track)

    def _record(self, name: str, start: int, end: int, args: dict[str, Any], track: str | None) -> None:
        with self._lock:
            if track is None:
                thread, number = threading.current_thread(), threading.get_native_id()
                track = self.track if thread is threading.main_thread() else thread.name
            else:  # viewers nest the spans of a thread, so those that overlap are on lanes of their own
                lanes = self._lanes.setdefault(track, {})
                free = (lane for lane, last in lanes.items() if last <= start)
                number = next(free, None) or next(self._numbers)
                lanes[number] = end
            where = {"pid": os.getpid(), "tid": number}
            times = {"ts": (start - self._origin) / 1000, "dur": (end - start) / 1000}  # µs
            event = {"ph": "X", "name": name, **where, **times}
            line = encode(event | {"args": args} if args else event)
            if self._tracks.get(where["tid"]) != track:
                self._tracks[where["tid"]] = track
                self._waiting.append(encode({"ph": "M", "name": "thread_name", **where, "args": {"name": track}}))
            self._waiting.append(line)
        if time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write everything recorded so far."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._due = time.monotonic() + WRITE_EVERY
            self._write("".join(f",\n{line}" for line in waiting))

    def close(self) -> None:
        """Write what is left and the closing bracket."""
        if Tracer.current is self:
            Tracer.current = None
        if self.enabled:
            self.flush()
            self._write("\n]\n")
            self._file.close()
            self.enabled = False

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _write(self, text: str) -> None:
        if not self.enabled:
            return
        try:
            data = text.encode()
            if self._file.write(data) != len(data):  # unbuffered: a nearly full disk takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a trace is not worth a run
            self.enabled = False
            self._file.close()
            logger.warning("no more trace: cannot write %s (%s)", self._path, error.strerror)


def span(name: str, *, role: str | None = None, track: str | None = None, **args: Any) -> Any:
    """A span in the trace of this process, if it has one: on the process's own track if that is of the `role`, else on
    the role's first; or on a `track` of several processes, and then it says whose it is (`by`).
    """
    tracer = Tracer.current
    if tracer is None:
        return nullcontext(args)
    if role is None:
        return tracer.span(name, track=track, by=tracer.track, **args)
    own = tracer.track if tracer.track.startswith(f"{role}/") else f"{role}/0"
    return tracer.span(name, track=own, **args)


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
