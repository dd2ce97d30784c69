"""Where metric rows go: metrics.jsonl at once; TensorBoard, W&B, SwanLab and Trackio in the background."""

import contextlib
import importlib.util
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol, Self

from palestra.errors import MissingExtra, PalestraError
from palestra.work.redact import redact, redacted

WAITING_ROWS = 1000  # rows a background sink may lag behind before rows are left out
CLOSE_SECONDS = 15.0  # what a background sink gets to finish at the end of a run

logger = logging.getLogger("palestra.track")


class JsonlSink:
    """One JSON object a line, in the file when `write` returns. NaN and infinities are written as json reads them back.

    `append` continues a file and first cuts a last line that a kill left torn.
    """

    def __init__(self, path: Path, append: bool = False) -> None:
        self.path = path
        if append and path.exists():
            _cut_torn_line(path)
        self._file: IO[bytes] = open(path, "ab" if append else "wb")  # noqa: SIM115 (open until close)

    def write(self, *rows: dict[str, Any]) -> None:
        """Append rows."""
        text = "".join(map(json_line, rows))
        try:
            self._file.write(redact(text).encode())
            self._file.flush()
        except OSError as error:
            raise PalestraError(
                f"Cannot write {self.path}: {error.strerror}. Make room, then resume the run."
            ) from error

    def flush(self) -> None:
        """Make sure that the rows survive a power cut too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON."""
    return json.dumps(row, default=lambda x: x.item()) + "\n"  # .item(): NumPy and torch scalars


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


@dataclass(frozen=True)
class SinkPlace:
    """What a service shows of a session: `id` is the same again when the session is resumed."""

    folder: Path
    project: str
    name: str
    id: str
    config: dict[str, Any]
    append: bool


class Sink(Protocol):
    """A service that takes rows of numbers; all three are called from one background thread."""

    def open(self) -> None:
        """Import the service's package and start its run; may be slow."""

    def write(self, row: dict[str, float], step: int) -> None:
        """Take one row."""

    def close(self) -> None:
        """Finish the service's run."""


class TensorBoardSink:
    """Event files in `<session>/tensorboard`, written by the tensorboard package alone (no torch, no tensorflow)."""

    def __init__(self, place: SinkPlace) -> None:
        self.place = place

    def open(self) -> None:
        """Start a new event file."""
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self.events = import_module("tensorboard.compat.proto.event_pb2")
        self.summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self.writer = writer.EventFileWriter(str(self.place.folder / "tensorboard"), max_queue_size=1000, flush_secs=5)
        self.purge = self.place.append

    def write(self, row: dict[str, float], step: int) -> None:
        """Add one scalar for each number."""
        Event, Summary = self.events.Event, self.summaries.Summary
        if self.purge:  # tells TensorBoard to forget what the killed run wrote from this step on
            session = self.events.SessionLog(status=self.events.SessionLog.START)
            self.writer.add_event(Event(step=step, wall_time=time.time(), session_log=session))
            self.purge = False
        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in row.items()])
        self.writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class WandbSink:
    """Weights & Biases; WANDB_MODE=offline keeps the run in the session's folder."""

    def __init__(self, place: SinkPlace) -> None:
        self.place = place

    def open(self) -> None:
        """Start the W&B run, or take it up again."""
        wandb = import_module("wandb")
        # Without a key wandb asks for one at the terminal, where nobody expects a question from the background.
        if wandb.setup().settings.mode == "online" and _at_terminal() and not wandb.api.api_key:
            raise PalestraError("there is no W&B API key: run `wandb login`, or set WANDB_MODE=offline")
        self.run = wandb.init(
            project=self.place.project,
            name=self.place.name,
            id=self.place.id,
            dir=self.place.folder,
            config=self.place.config,
            resume="allow" if self.place.append else None,
            settings=wandb.Settings(console="off", silent=True),
        )
        if self.run.url:
            logger.info("W&B: %s", self.run.url)

    def write(self, row: dict[str, float], step: int) -> None:
        """Log one row; steps that the service already has from before a kill are left as they are."""
        self.run.log(row, step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class SwanlabSink:
    """SwanLab; SWANLAB_MODE=offline keeps the run in the session's folder."""

    def __init__(self, place: SinkPlace) -> None:
        self.place = place

    def open(self) -> None:
        """Start the SwanLab run, or take it up again."""
        swanlab = import_module("swanlab")
        self.run = swanlab.init(
            project=self.place.project,
            name=self.place.name,
            id=self.place.id,
            log_dir=str(self.place.folder / "swanlab"),
            config=self.place.config,
            resume="allow" if self.place.append else None,
            settings=swanlab.Settings(interactive=False),  # never a question from the background
        )

    def write(self, row: dict[str, float], step: int) -> None:
        """Log one row."""
        self.run.log(row, step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class TrackioSink:
    """Trackio: a local database, or the Space or server that the TRACKIO_ variables name."""

    def __init__(self, place: SinkPlace) -> None:
        self.place = place

    def open(self) -> None:
        """Start the Trackio run, or take it up again; Trackio knows runs by name, so the id is the name."""
        trackio = import_module("trackio")
        resume = "allow" if self.place.append else "never"
        self.run = trackio.init(
            self.place.project, name=self.place.id, group=self.place.name, config=self.place.config, resume=resume
        )

    def write(self, row: dict[str, float], step: int) -> None:
        """Log one row."""
        self.run.log(row, step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


SINKS: dict[str, Any] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "swanlab": SwanlabSink,
    "trackio": TrackioSink,
}


def make_sink(name: str, place: SinkPlace) -> Sink:
    """Return the sink called `name`, not yet opened; a package that is not installed is an error now, not later."""
    require_sinks([name])
    return SINKS[name](place)


def require_sinks(names: Iterable[str]) -> None:
    """Raise for the first sink whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(f"The {name} sink", name)


class Background:
    """Runs a sink in a thread of its own: whatever the service does, training neither stops nor waits.

    A sink that fails is warned about once and dropped; one that is too slow misses rows. metrics.jsonl has them all.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._name = type(sink).__name__
        self._rows: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(WAITING_ROWS)
        self._failed = self._lagging = False
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def write(self, row: dict[str, float], step: int) -> None:
        """Hand over one row and return at once."""
        if self._failed:
            return
        try:
            self._rows.put_nowait((row, step))
        except queue.Full:
            if not self._lagging:
                logger.warning("%s is too slow and misses rows from step %d on", self._name, step)
            self._lagging = True

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the sink finish within `seconds`; after that it is left behind."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=0 if self._failed else seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s did not finish within %g s and is left behind", self._name, seconds)

    def _work(self) -> None:
        try:
            self._sink.open()
            while (item := self._rows.get()) is not None:
                self._sink.write(*item)
            self._sink.close()
        except Exception as error:  # a service's failure must not become the run's
            self._failed = True
            logger.warning("%s failed and gets no more rows: %s: %s", self._name, type(error).__name__, error)


class Stats:
    """Collects numbers by key and exports them as one flat row of floats. One thread owns it."""

    def __init__(self) -> None:
        self._row: dict[str, float] = {}

    def last(self, key: str, value: float) -> None:
        """Record a number; the latest is exported."""
        self._row[key] = float(value)

    @contextmanager
    def timer(self, key: str) -> Iterator[None]:
        """Add the seconds spent inside to `time/<key>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{key}"
            self._row[key] = self._row.get(key, 0.0) + time.perf_counter() - start

    def export(self) -> dict[str, float]:
        """Return everything recorded since the last export, and forget it."""
        row, self._row = self._row, {}
        return row


class Tracker:
    """Logs rows of one session.

    `sinks` names the sinks beside metrics.jsonl: tensorboard, wandb, swanlab, trackio. `id` is the session's, by which
    services know a run again. `config` is the resolved spec, shown by those that show one. Rows of `stats`, if given,
    are exported into each row. `append` continues a resumed session: the file is continued and the services' runs are
    taken up again.
    """

    def __init__(
        self,
        session_dir: Path,
        sinks: list[str],
        *,
        project: str,
        name: str,
        id: str,
        config: dict[str, Any],
        stats: Stats | None = None,
        append: bool = False,
    ) -> None:
        self._stats = stats
        place = SinkPlace(session_dir, project, name, id, redacted(config), append)
        others = [make_sink(sink, place) for sink in sinks]
        self._jsonl = JsonlSink(session_dir / "metrics.jsonl", append)
        self._others = [Background(sink) for sink in others]

    def log(self, row: dict[str, Any], step: int, **counts: int) -> dict[str, Any]:
        """Write one row and return it: `step`, the other counts (`frame`, `tokens`), then metrics, `stats` first.

        Wall-clock numbers have keys under `time/`, so that two runs can be compared number for number without them.
        """
        full = {"step": step, **counts, **(self._stats.export() if self._stats else {}), **row}
        self._jsonl.write(full)
        numbers = {key: float(value) for key, value in full.items() if key != "step" and _is_number(value)}
        for sink in self._others:
            sink.write(numbers, step)
        return full

    def flush(self) -> None:
        """Make sure that every row logged is in metrics.jsonl on disk."""
        self._jsonl.flush()

    def close(self) -> None:
        """Give the background sinks a little time to finish, then close."""
        for sink in self._others:
            sink.close()
        self._jsonl.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "item")
