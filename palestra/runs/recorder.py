"""What a trainer reports: rows of metrics, timings, hooks, the trace and the progress line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from palestra.errors import PalestraError
from palestra.runs.session import Session
from palestra.spec.base import ExperimentSpec
from palestra.spec.imports import load_function
from palestra.spec.model import plain
from palestra.track.progress import Progress
from palestra.track.sinks import Stats, Tracker
from palestra.track.trace import Tracer

COLUMNS = {"steps": "step", "frames": "frame", "tokens": "tokens"}
"""How a row and the status call what a trainer counts."""


def in_words(headline: Mapping[str, float]) -> str:
    """Numbers as people read them: a return of hundreds needs one decimal, a loss near 1 three."""
    return ", ".join(f"{name} {value:.{1 if abs(value) >= 10 else 3}f}" for name, value in headline.items())


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
                    id=session.id,
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
        counts = {column: counters[counter] for counter, column in COLUMNS.items() if counter in counters}
        shown = {name: metrics[name] for name in headline if name in metrics}
        self.session.progress(**counts, headline=shown)  # raises if the folder has another owner by now
        self.tracker.log(dict(metrics), **counts)
        self.progress.update(counters[self.unit], in_words(shown))

    def rates(self, rates: Mapping[str, float]) -> None:
        """Wall-clock rates for the next row, with keys under `time/`."""
        for name, value in rates.items():
            self.stats.last(name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)


class Silent:
    """The recorder of a process that tells nothing, because another one tells the same."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Nothing is timed."""
        return nullcontext()

    def row(self, metrics: Mapping[str, float], counters: Mapping[str, int], headline: Sequence[str]) -> None:
        """Nothing is written."""

    def rates(self, rates: Mapping[str, float]) -> None:
        """Nothing is written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass


class HookFailed(PalestraError):
    """A hook raised; its traceback is the cause."""


@dataclass
class Moment:
    """What a hook sees: the row about to be written, the policy as it is now, and where the run lives."""

    step: int
    seen: int
    """Frames, or tokens of a language model, so far."""
    metrics: dict[str, float]
    policy: Any
    folder: Path
    stop: bool = False
    """Set it to True to end the run here, as if it had reached its end."""


Hook = Callable[[Moment], dict[str, float] | None]


def load_hooks(names: list[str]) -> dict[str, Hook]:
    """The functions that a spec names, by name."""
    return {name: load_function(name, "hooks") for name in names}


def call_hooks(hooks: dict[str, Hook], moment: Moment) -> None:
    """Call each hook; numbers that it returns join the row."""
    for name, hook in hooks.items():
        try:
            moment.metrics.update(hook(moment) or {})
        except Exception as error:
            raise HookFailed(f"the hook {name} raised {type(error).__name__} at step {moment.step}: {error}") from error
