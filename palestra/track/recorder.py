"""All that a trainer tells while it trains: rows of metrics, timings, the trace and the progress line."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from palestra.runs.session import Session
from palestra.spec.base import ExperimentSpec
from palestra.spec.plain import plain
from palestra.track.progress import Progress
from palestra.track.stats import Stats
from palestra.track.trace import Tracer
from palestra.track.tracker import Tracker


class Recorder:
    """Opened after `session.restore()`: it goes on where the restored checkpoint left the session's files."""

    def __init__(self, session: Session, spec: ExperimentSpec, *, total: int, unit: str, show: bool):
        self.session, self.unit = session, unit
        self.stats = Stats()
        with ExitStack() as files:
            self.tracker = files.enter_context(
                Tracker(
                    session.path,
                    list(spec.track.sinks),
                    project=spec.track.project or spec.name,
                    name=f"{spec.name}-{session.seed}",
                    config=plain(spec),
                    stats=self.stats,
                    append=True,
                )
            )
            self.tracer = files.enter_context(Tracer(session.path / "trace.json", spec.track.trace, append=True))
            self.progress = files.enter_context(Progress(total, unit, spec.name, enabled=show))
            self._files = files.pop_all()
        session.follow("metrics.jsonl", self.tracker.flush)
        session.follow("trace.json", self.tracer.flush)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A stretch of work: on the trace, and as seconds under `time/` in the next row."""
        with self.tracer.span(name), self.stats.timer(name):
            yield

    def row(self, metrics: Mapping[str, float], counters: Mapping[str, int], headline: Sequence[str]) -> None:
        """Write a row; those of its metrics that `headline` names are what people see of it."""
        step, frame = counters["steps"], counters.get("frames")
        shown = {name: metrics[name] for name in headline if name in metrics}
        self.session.progress(step=step, frame=frame, headline=shown)  # raises if the folder has another owner by now
        self.tracker.log(dict(metrics), step, frame)
        self.progress.update(counters[self.unit], " ".join(f"{name} {value:.1f}" for name, value in shown.items()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)
