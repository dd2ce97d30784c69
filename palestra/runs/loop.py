"""The one training loop: step → measure → report → save → stop if requested; what is pending survives a kill.

A kind that trains provides a `Trainer`: its step, its measurements and its state. Everything around it is here.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from palestra.errors import Interrupted
from palestra.runs.checkpoint import Checkpoint
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.recorder import HookContext, Recorder, Silent, call_hooks, load_hooks
from palestra.runs.session import Session
from palestra.spec.base import ExperimentSpec
from palestra.spec.model import Cadence

log = logging.getLogger("palestra.runs")

Counters = Mapping[str, int]
"""Steps so far, and frames or tokens."""
Row = dict[str, float]
Value = TypeVar("Value")


class Stopped(Exception):
    """A stop was requested in the middle of a step or of a measurement."""


class Trainer(Protocol):
    """What a kind provides to the loop."""

    @property
    def headline(self) -> tuple[str, ...]:
        """The metrics shown while it trains."""

    @property
    def counters(self) -> dict[str, int]:
        """`steps` so far, and `frames` or `tokens`."""

    @property
    def done(self) -> bool:
        """Whether no step is left."""

    @property
    def policy(self) -> Any:
        """Passed to hooks."""

    def first_row(self) -> Row | None:
        """Measurements before the first step; None for no such row."""

    def step(self) -> None:
        """One step. It may raise `Stopped` as long as it has changed nothing."""

    def metrics(self) -> Row:
        """Metrics of the last step; called only when a row is due."""

    def due(self, before: Counters, last: bool) -> list[str]:
        """The measurements that are due after the step that began at `before`; `eval` is one with a score."""

    def measure(self, names: Sequence[str]) -> Row:
        """Their metrics. It may raise `Stopped`: a resumed run then starts with them."""

    def score(self, row: Row) -> tuple[str, float] | None:
        """The metric that ranks checkpoints and its value, higher is better; None if it was not measured."""

    def paused(self) -> AbstractContextManager[None]:
        """Excludes what is not training from rates."""

    def state(self) -> dict[str, Any]:
        """Everything the rest of the run depends on. Taking it changes nothing."""

    def model(self) -> Callable[..., None] | None:
        """Writes the model into a checkpoint's folder, in a form that others can load."""


class Saver(Protocol):
    """How a checkpoint is written."""

    def save(self, write: Callable[[Any, Any], object] | None, state: dict[str, Any], model: Any) -> None:
        """Save a state and a model by `write`, which rank 0 has; it may go on after this returns."""

    def settle(self, *, wait: bool = True) -> None:
        """Raise the error of a save that goes on, if it has failed; with `wait` when it is done."""


class AtOnce:
    """By one process, while it waits."""

    def save(self, write: Callable[[Any, Any], object] | None, state: dict[str, Any], model: Any) -> None:
        assert write is not None
        write(state, model)

    def settle(self, *, wait: bool = True) -> None:
        pass


AT_ONCE = AtOnce()


class Together(Protocol):
    """The processes that train together; all run the same loop, rank 0 decides and writes."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""

    def from_first(self, value: Value) -> Value:
        """The value of rank 0."""

    @property
    def saver(self) -> Saver:
        """Saves the state and the model of all."""


class Alone:
    """One process."""

    first, saver = True, AT_ONCE

    def from_first(self, value: Value) -> Value:
        return value


ALONE = Alone()


def restore(session: Session, ranks: Together = ALONE) -> Checkpoint | None:
    """The newest checkpoint, on every rank; None for a new run."""
    saved = session.restore() if ranks.first else None
    path = ranks.from_first(None if saved is None else saved.meta.path)
    if ranks.first:
        log.info("seed %d: %s", session.seed, "from the start" if saved is None else f"resumed at step {saved.step}")
    return None if path is None else saved or load_checkpoint(path, verify=False)  # rank 0 has


def run(
    spec: ExperimentSpec,
    session: Session,
    trainer: Trainer,
    record: Recorder | Silent,
    saved: Checkpoint | None,
    ranks: Together = ALONE,
) -> None:
    """Train to the end or until a stop is requested; everything is then saved, and a resumed run continues exactly."""
    loop = _Loop(spec, session, trainer, record, ranks, None if saved is None else saved.state.get("pending"))
    try:
        loop.begin()
        while loop.pending is not None or not trainer.done:
            row, before = loop.pending or loop.step()
            last = trainer.done
            loop.measure(row, before, last)
            last = loop.report(row, before, last)
            loop.save(row, before, last)
            ranks.saver.settle(wait=last or loop.stopping)
            if last:
                return
            if loop.stopping:
                raise loop.interrupted()
    except Stopped:
        if loop.saved != loop.steps:
            loop.checkpoint({"temporary"}, None)
        ranks.saver.settle()
        raise loop.interrupted() from None


@dataclass
class _Loop:
    """A running session: what is pending, what was measured of it, and what was saved."""

    spec: ExperimentSpec
    session: Session
    trainer: Trainer
    record: Recorder | Silent
    ranks: Together
    pending: list[Any] | None
    """The row of a step and the counters before it, until it is reported: a run stopped before that resumes with it."""

    def __post_init__(self) -> None:
        self.hooks, self.checkpoints = load_hooks(self.spec.hooks), CheckpointsDue(self.spec.every.checkpoint)
        self.measured: set[str] = set()
        self.saved, self.stopping, self.record.step = self.steps, False, self.steps

    @property
    def steps(self) -> int:
        return self.trainer.counters["steps"]

    def begin(self) -> None:
        if self.steps == 0 and (row := self.trainer.first_row()) is not None:
            self.record.row(row, self.trainer.counters, headline=self.trainer.headline)

    def step(self) -> list[Any]:
        before = self.trainer.counters
        self.record.step = before["steps"] + 1
        self.trainer.step()
        log_due = due(self.spec.every.log, before, self.trainer.counters)
        row_due = log_due or "eval" in self.trainer.due(before, self.trainer.done)
        self.pending, self.measured = [self.trainer.metrics() if row_due else {}, before], set()
        return self.pending

    def measure(self, row: Row, before: Counters, last: bool) -> None:
        names = [name for name in self.trainer.due(before, last) if name not in self.measured]
        row |= self.trainer.measure(names) if names else {}
        self.measured |= set(names)

    def report(self, row: Row, before: Counters, last: bool) -> bool:
        """Hooks, metrics, progress; whether this is the last step, which a hook may request."""
        if row:
            counters = self.trainer.counters
            seen = counters.get("frames", counters.get("tokens", 0))
            context = HookContext(self.steps, seen, row, self.trainer.policy, self.session.path)
            if self.ranks.first:
                call_hooks(self.hooks, context)
            if self.ranks.from_first(context.stop) and not last:
                last = True
                self.measure(row, before, last)
            self.record.row(row, counters, headline=self.trainer.headline)
        self.pending = None
        return last

    def save(self, row: Row, before: Counters, last: bool) -> None:
        """A checkpoint where one is due: by its cadence, as the best or the last one, or to stop."""
        reasons = self.checkpoints.reasons(before, self.trainer.counters)
        # Clocks and signals differ between ranks.
        self.stopping, reasons = self.ranks.from_first((self.session.stop_requested, reasons))
        score = self.trainer.score(row)
        reasons |= {"best"} if score is not None else set()
        reasons |= {"temporary"} if last or self.stopping else set()
        if reasons:
            self.checkpoint(reasons, score)

    def interrupted(self) -> Interrupted:
        counters = self.trainer.counters
        unit = "frame" if "frames" in counters else "step"
        what = "with everything saved" if self.steps else "before the first step"
        return Interrupted(
            f"stopped at {unit} {counters[f'{unit}s']} {what}; continue with: "
            f"palestra train --resume {self.session.path.parent.parent}"
        )

    def checkpoint(self, reasons: set[str], score: tuple[str, float] | None) -> None:
        with self.trainer.paused(), self.record.span("checkpoint"):
            model = self.trainer.model()  # on every rank, of which each has its part
            state = {**self.trainer.state(), "pending": self.pending}
            write = None
            if self.ranks.first:
                log.info("step %d: checkpoint (%s)", self.steps, ", ".join(sorted(reasons)))
                metric, value = score or (None, None)
                about = {"score": value, "metric": metric, "counters": self.trainer.counters}
                write = self.session.saving(self.steps, reasons=reasons, **about)
            self.ranks.saver.save(write, state, model)
        self.saved = self.steps


def due(cadence: Cadence | None, before: Counters, after: Counters) -> bool:
    """Whether a counted cadence is due between `before` and `after`; stateless, so a resumed run agrees."""
    return cadence is not None and cadence.crossed(before[cadence.unit], after[cadence.unit])


class CheckpointsDue:
    """Why a checkpoint is due: "temporary" by the clock (only the newest stays), "kept" by steps or frames.

    A counted cadence starts where those before it in the list end: 2 steps until 10, 5 steps until 20, 10 steps.
    """

    def __init__(self, cadences: Sequence[Cadence]):
        self.counted = [cadence for cadence in cadences if not cadence.is_time]
        self.timed = min((cadence.seconds for cadence in cadences if cadence.is_time), default=None)
        self._since = time.monotonic()

    def reasons(self, before: Counters, after: Counters) -> set[str]:
        """Empty when none is due."""
        reasons, begin = set(), dict.fromkeys(before, 0)
        for cadence in self.counted:
            if due(cadence, {unit: max(count, begin[unit]) for unit, count in before.items()}, after):
                reasons.add("kept")
            begin[cadence.unit] = max(begin[cadence.unit], int(cadence.until or 0))
        if self.timed is not None and time.monotonic() - self._since >= self.timed:
            self._since = time.monotonic()
            reasons.add("temporary")
        return reasons
