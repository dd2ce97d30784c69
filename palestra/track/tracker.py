"""One session's metric rows: written to metrics.jsonl at once, and passed on to the other sinks in the background."""

from pathlib import Path
from typing import Any, Self

from palestra.runs.redact import redacted
from palestra.track.sinks import Background, JsonlSink, Place, make_sink
from palestra.track.stats import Stats


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
        place = Place(session_dir, project, name, id, redacted(config), append)
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
