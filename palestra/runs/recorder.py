"""What a trainer reports: rows of metrics, timings, hooks, the trace and the progress line."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.runs.session import Session
from palestra.spec.base import ExperimentSpec
from palestra.spec.imports import load_named
from palestra.spec.model import plain
from palestra.track.progress import Progress
from palestra.track.sinks import SinkPlace, Table, Tracker
from palestra.track.trace import Tracer, trace_file

COLUMNS = {"steps": "step", "frames": "frame", "tokens": "tokens"}
"""A trainer's counters by their names in rows and in the status."""


def in_words(headline: Mapping[str, float]) -> str:
    """`name value` pairs: one decimal for a return of hundreds, three for a loss near 1."""
    return ", ".join(f"{name} {value:.{1 if abs(value) >= 10 else 3}f}" for name, value in headline.items())


class Recorder(AbstractContextManager["Recorder"]):
    """Opened after `session.restore()`: it continues the session's files where the restored checkpoint left them."""

    def __init__(self, session: Session, spec: ExperimentSpec, *, total: int, unit: str, show: bool):
        self.session, self.unit = session, unit
        self.step = 0
        """The step that spans belong to; set by the loop."""
        self._timings: dict[str, float] = {}  # of the next row, under time/
        project, name = spec.track.project or spec.name, f"{spec.name}-{session.seed}"
        place = SinkPlace(session.path, project, name, session.id, plain(spec), append=True)
        with ExitStack() as files:
            self.tracker = files.enter_context(Tracker(place, spec.track.sinks))
            self.tracer = files.enter_context(Tracer(session.path / "trace.json", spec.track.trace, append=True))
            self.progress = files.enter_context(Progress(total, unit, spec.name, enabled=show))
            self._files = files.pop_all()
        session.follow("metrics.jsonl", self.tracker.flush)
        session.follow("trace.json", self.tracer.flush)

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Time a block: an event of the trace, and seconds under `time/` in the next row."""
        start = time.perf_counter()
        try:
            with self.tracer.span(name, step=self.step, **args):
                yield
        finally:
            key = f"time/{name}"
            self._timings[key] = self._timings.get(key, 0.0) + time.perf_counter() - start

    def row(self, metrics: Mapping[str, float], counters: Mapping[str, int], headline: Sequence[str]) -> None:
        """Write a row; the metrics named by `headline` are shown on the progress line and in the status."""
        counts = {column: counters[counter] for counter, column in COLUMNS.items() if counter in counters}
        shown = {name: metrics[name] for name in headline if name in metrics}
        self.session.progress(**counts, headline=shown)  # raises if another process owns the folder now
        timings, self._timings = self._timings, {}
        self.tracker.log({**timings, **metrics}, **counts)
        self.progress.update(counters[self.unit], in_words(shown))

    def table(self, name: str, rows: Table, step: int) -> None:
        """Show a table in the sinks that can."""
        self.tracker.table(name, rows, step)

    def rates(self, rates: Mapping[str, float]) -> None:
        """Wall-clock rates for the next row, with keys under `time/`."""
        self._timings |= rates

    def __exit__(self, *raised: Any) -> None:
        self._files.__exit__(*raised)


class Silent(AbstractContextManager["Silent"]):
    """The recorder of another rank than the first: it has a trace, and reports nothing that the first reports too."""

    step = 0

    def __init__(self, session: Session, spec: ExperimentSpec, rank: int):
        track = f"trainer/{rank}"
        self.tracer = Tracer(session.path / trace_file(track), spec.track.trace, append=True, track=track)

    def span(self, name: str, **args: Any) -> AbstractContextManager[Any]:
        return self.tracer.span(name, step=self.step, **args)

    def row(self, metrics: Mapping[str, float], counters: Mapping[str, int], headline: Sequence[str]) -> None: ...

    def table(self, name: str, rows: Table, step: int) -> None: ...

    def rates(self, rates: Mapping[str, float]) -> None: ...

    def __exit__(self, *raised: object) -> None:
        self.tracer.close()


class HookFailed(PalestraError):
    """A hook raised; its traceback is the cause."""


@dataclass
class HookContext:
    """A hook's argument: the row about to be written, the current policy, and the run's folder."""

    step: int
    seen: int
    """Frames, or tokens of a language model, so far."""
    metrics: dict[str, float]
    policy: Any
    folder: Path
    stop: bool = False
    """Set it to True to end the run after this step, as if it were the last."""


Hook = Callable[[HookContext], dict[str, float] | None]


def load_hooks(names: list[str]) -> dict[str, Hook]:
    """The functions that a spec names, by name."""
    return {name: load_named(name, "hooks") for name in names}


def call_hooks(hooks: dict[str, Hook], context: HookContext) -> None:
    """Call each hook; numbers that it returns are added to the row."""
    for name, hook in hooks.items():
        try:
            returned = hook(context) or {}
            # .item(): NumPy and torch scalars; an array has none, and it is this hook that must be named.
            context.metrics.update({k: v.item() if hasattr(v, "item") else v for k, v in returned.items()})
        except Exception as error:
            raise HookFailed(
                f"the hook {name} raised {type(error).__name__} at step {context.step}: {error}"
            ) from error
