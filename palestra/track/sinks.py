"""Where metric rows and tables go: metrics.jsonl at once; TensorBoard, W&B, SwanLab and Trackio in the background."""

import importlib.util
import json
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from palestra.errors import MissingExtra, PalestraError
from palestra.work.redact import redacted, secrets

WAITING_ROWS = 1000  # rows a background sink may lag behind before rows are left out
CLOSE_SECONDS = 15.0  # what a background sink gets to finish at the end of a run
CELL = 8000  # characters of a text in a table

Table = Sequence[Mapping[str, Any]]
"""Rows with the same columns: numbers and texts."""

logger = logging.getLogger("palestra.track")


class JsonlSink:
    """One JSON object a line, in the file when `write` returns. NaN and infinities are written as json reads them back.

    `append` continues a file and first cuts a last line that a kill left torn.
    """

    def __init__(self, path: Path, append: bool = False, line: Callable[[dict[str, Any]], bytes] | None = None) -> None:
        """`line` is how a row is written: `json_line`, or `long_line`."""
        self.path, self._line = path, line or json_line
        if append and path.exists():
            data = path.read_bytes()
            if not data.endswith(b"\n"):
                os.truncate(path, data.rfind(b"\n") + 1)
        self._file: IO[bytes] = open(path, "ab" if append else "wb")  # noqa: SIM115 (open until close)

    def write(self, *rows: dict[str, Any]) -> None:
        """Append rows."""
        try:
            known = secrets()
            self._file.write(b"".join([self._line(redacted(row, known)) for row in rows]))
            self._file.flush()
        except OSError as error:
            raise PalestraError(f"Cannot write {self.path}: {error.strerror}. Make room, then resume.") from error

    def flush(self) -> None:
        """Make sure that the rows survive a power cut too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_line(row: dict[str, Any]) -> bytes:
    """A row as a line of JSON."""
    return f"{json.dumps(row, default=lambda x: x.item())}\n".encode()  # .item(): NumPy and torch scalars


def long_line(row: dict[str, Any]) -> bytes:
    """The same for rows of thousands of numbers, ten times as fast: while one is encoded no other thread runs."""
    import orjson

    if _finite(row):  # it knows no other numbers
        # Neither keys that are no strings nor integers beyond 64 bits nor half characters.
        with suppress(TypeError):
            return orjson.dumps(row, lambda x: x.item(), orjson.OPT_APPEND_NEWLINE)
    return json_line(row)


def _finite(value: Any) -> bool:
    """Whether all numbers are finite; False too where their sum is too large."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, (list, tuple)):
        numbers = not value or isinstance(value[0], (int, float))
        with suppress(TypeError, OverflowError):  # other things follow the first, or a huge integer
            return math.isfinite(sum(value)) if numbers else all(map(_finite, value))
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@dataclass(frozen=True)
class SinkPlace:
    """What a service shows of a session."""

    folder: Path
    project: str
    name: str
    id: str
    """The session's, by which a service recognizes a resumed run."""
    config: dict[str, Any]
    """The resolved spec."""
    append: bool = False
    """Whether the session is resumed: its file and the services' runs are continued."""

    @property
    def about(self) -> dict[str, Any]:
        """What identifies and describes the run to a service."""
        return {"project": self.project, "name": self.name, "id": self.id, "config": self.config}


class Sink:
    """A service that takes rows of numbers, and tables; its methods are called from one background thread."""

    run: Any
    """Set by `open`: the service's run, with `log` and `finish`."""

    def __init__(self, place: SinkPlace) -> None:
        self.place = place

    def open(self) -> None:
        """Import the service's package and start its run; may be slow."""

    def write(self, row: dict[str, float], step: int) -> None:
        """Log one row; W&B ignores steps that it already has from before a kill."""
        self.run.log(row, step=step)

    def table(self, name: str, rows: Table, step: int) -> None:
        """Log a table; a service that shows none leaves it out."""

    def close(self) -> None:
        """Finish the service's run."""
        self.run.finish()


class TensorBoardSink(Sink):
    """Event files in `<session>/tensorboard`, written by the tensorboard package alone (no torch, no tensorflow)."""

    def open(self) -> None:
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self.events = import_module("tensorboard.compat.proto.event_pb2")
        self.summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self.tensors = import_module("tensorboard.util.tensor_util")
        self.writer = writer.EventFileWriter(str(self.place.folder / "tensorboard"), max_queue_size=1000, flush_secs=5)
        self.purge = self.place.append

    def write(self, row: dict[str, float], step: int) -> None:
        self._add([self.summaries.Summary.Value(tag=key, simple_value=value) for key, value in row.items()], step)

    def table(self, name: str, rows: Table, step: int) -> None:
        """A matrix of texts, each of them a block of code: cells are Markdown, and completions are not."""
        cells = [[_indented(str(value)) for value in row.values()] for row in rows]
        about = self.summaries.SummaryMetadata(plugin_data={"plugin_name": "text"})
        tensor = self.tensors.make_tensor_proto([list(rows[0]), *cells])
        self._add([self.summaries.Summary.Value(tag=name, metadata=about, tensor=tensor)], step)

    def _add(self, values: list[Any], step: int) -> None:
        Event = self.events.Event
        if self.purge:  # TensorBoard drops what the killed run wrote from this step on
            session = self.events.SessionLog(status=self.events.SessionLog.START)
            self.writer.add_event(Event(step=step, wall_time=time.time(), session_log=session))
            self.purge = False
        summary = self.summaries.Summary(value=values)
        self.writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        self.writer.close()


class WandbSink(Sink):
    """Weights & Biases; WANDB_MODE=offline keeps the run in the session's folder."""

    def open(self) -> None:
        wandb, place = import_module("wandb"), self.place
        # Without a key wandb prompts for one at the terminal, which a background thread must never do.
        at_terminal = sys.stdin is not None and sys.stdin.isatty()
        if wandb.setup().settings.mode == "online" and at_terminal and not wandb.api.api_key:
            raise PalestraError("no W&B API key: run `wandb login`, or set WANDB_MODE=offline")
        self.run = wandb.init(
            **place.about,
            dir=place.folder,
            resume="allow" if place.append else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        if self.run.url:
            logger.info("W&B: %s", self.run.url)

    def table(self, name: str, rows: Table, step: int) -> None:
        table = import_module("wandb").Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({name: table}, step=step)


class SwanlabSink(Sink):
    """SwanLab; SWANLAB_MODE=offline keeps the run in the session's folder."""

    def open(self) -> None:
        swanlab, place = import_module("swanlab"), self.place
        self.run = swanlab.init(
            **place.about,
            log_dir=str(place.folder / "swanlab"),
            resume="allow" if place.append else None,
            settings=swanlab.Settings(interactive=False),  # no prompts from the background
        )

    def table(self, name: str, rows: Table, step: int) -> None:
        table = import_module("swanlab").echarts.Table()
        table.add(list(rows[0]), [list(row.values()) for row in rows])
        self.run.log({name: table}, step=step)


class TrackioSink(Sink):
    """Trackio: a local database, or the Space or server that the TRACKIO_ variables name."""

    def open(self) -> None:
        place, resume = self.place, "allow" if self.place.append else "never"
        # Trackio identifies runs by name, so the id is the name.
        self.run = import_module("trackio").init(
            place.project, name=place.id, group=place.name, config=place.config, resume=resume
        )

    def table(self, name: str, rows: Table, step: int) -> None:
        table = import_module("trackio").Table(data=[dict(row) for row in rows])
        self.run.log({name: table}, step=step)


SINKS: dict[str, type[Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "swanlab": SwanlabSink,
    "trackio": TrackioSink,
}


def require_sinks(names: Iterable[str]) -> None:
    """Raise for the first sink whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(f"The {name} sink", name)


class Background:
    """Runs a sink in its own thread: whatever the service does, training neither stops nor waits.

    A sink that fails is dropped with one warning; one that is too slow misses rows. metrics.jsonl has them all.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._name = type(sink).__name__
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING_ROWS)
        self._failed = self._lagging = False
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def write(self, row: dict[str, float], step: int) -> None:
        """Queue one row and return at once."""
        self._put(partial(self._sink.write, row, step), step)

    def table(self, name: str, rows: Table, step: int) -> None:
        """Queue a table and return at once."""
        self._put(partial(self._sink.table, name, rows, step), step)

    def _put(self, call: Callable[[], None], step: int) -> None:
        if self._failed:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            if not self._lagging:
                logger.warning("%s is too slow and misses rows from step %d on", self._name, step)
            self._lagging = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the sink finish within `seconds`; after that it is abandoned."""
        deadline = time.monotonic() + seconds
        with suppress(queue.Full):
            self._calls.put(None, timeout=0 if self._failed else seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s did not finish within %g s and is left behind", self._name, seconds)

    def _work(self) -> None:
        try:
            self._sink.open()
            while (call := self._calls.get()) is not None:
                call()
            self._sink.close()
        except Exception as error:  # a service's failure must not become the run's
            self._failed = True
            logger.warning("%s failed and gets no more rows: %s: %s", self._name, type(error).__name__, error)


class Tracker(AbstractContextManager["Tracker"]):
    """Logs rows of one session: to metrics.jsonl, and to the sinks named (tensorboard, wandb, swanlab, trackio)."""

    def __init__(self, place: SinkPlace, sinks: Sequence[str] = ()) -> None:
        require_sinks(sinks)
        self._jsonl = JsonlSink(place.folder / "metrics.jsonl", place.append)
        place = replace(place, config=redacted(place.config))
        self._others = [Background(SINKS[name](place)) for name in sinks]

    def log(self, row: dict[str, Any], step: int, **counts: int) -> dict[str, Any]:
        """Write one row and return it: `step`, the other counts (`frame`, `tokens`), then the metrics.

        Wall-clock metrics have keys under `time/`, so that two runs can be compared number for number without them.
        """
        full = {"step": step, **counts, **row}
        self._jsonl.write(full)
        numbers = {key: float(value) for key, value in full.items() if key != "step" and _is_number(value)}
        for sink in self._others:
            sink.write(numbers, step)
        return full

    def table(self, name: str, rows: Table, step: int) -> None:
        """Send a table to the sinks that show one, without secrets and with long texts truncated."""
        if not self._others or not rows:
            return
        short = [{key: _short(value) for key, value in row.items()} for row in redacted(list(rows))]
        for sink in self._others:
            sink.table(name, short, step)

    def flush(self) -> None:
        """Make sure that every row logged is in metrics.jsonl on disk."""
        self._jsonl.flush()

    def close(self) -> None:
        """Give the background sinks a little time to finish, then close."""
        for sink in self._others:
            sink.close()
        self._jsonl.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def _short(value: Any) -> Any:
    return value[:CELL] + " …" if isinstance(value, str) and len(value) > CELL else value


def _indented(text: str) -> str:
    return "".join(f"    {line}" for line in text.splitlines(keepends=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "item")
