"""Trains one session on rewards: generate and judge, learn, publish, evaluate, log, save, until the steps are done."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palestra.errors import Interrupted
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.lm.trainer import Speed, profiled
from palestra.posttrain.metrics import group_metrics, silence
from palestra.rollout.event_loop import LoopLag, LoopThread, Watchdog
from palestra.rollout.executor import Executor
from palestra.rollout.records import Recording, Replay
from palestra.rollout.types import Group
from palestra.runs.due import CheckpointsDue, due
from palestra.runs.recorder import Moment, Recorder, call_hooks, load_hooks
from palestra.runs.session import Session
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.tasks.stream import NothingLeft

log = logging.getLogger("palestra.posttrain")

HEADLINE = ("eval/accuracy", "reward")
STALL_SECONDS = 60.0
"""Without progress for so long, the log tells who waits for whom."""


class Keeper(Protocol):
    """Writes the model into a checkpoint as others can load it, and reads it back."""

    def writer(self) -> Callable[[Path], None]:
        """Gathers the weights; what it gives writes them into a folder."""
        ...

    def load(self, folder: Path) -> None:
        """Take the weights that were written there."""
        ...


class Learns(Protocol):
    """Takes groups, moves the weights: `Learner` by rewards, `Distiller` by what a teacher says."""

    engine: TrainEngine

    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """The groups packed, first and in their order, with `advantages` of every token."""
        ...

    def learn(self, batch: Batch, step: int, between: Callable[[], object]) -> dict[str, float]:
        """Every optimizer step on a batch; what people look at."""
        ...

    def state(self) -> dict[str, Any]:
        """All besides the weights of the model that is trained."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        ...


class Suites(Protocol):
    """Measures the model with suites now and then, and at the end."""

    def due(self, before: dict[str, int], after: dict[str, int], last: bool) -> list[str]:
        """The names of those that are due."""
        ...

    def measure(self, labels: Sequence[str], counters: dict[str, int], look: Callable[[], None]) -> dict[str, float]:
        """The metrics of some; calls what it is given as it gets on."""
        ...


@dataclass
class Parts:
    """What the loop works with."""

    learner: Learns
    executor: Executor | Replay
    """Where groups come from."""
    writer: Engine
    """The engine that generates."""
    generator: LocalGenerator
    keeper: Keeper
    evaluate: Callable[[Callable[[], None]], dict[str, float]]
    """Metrics on what is not trained on, by the weights that are published; calls what it is given as it gets on."""
    suites: Suites
    loop: LoopThread
    """Where workflows run."""
    introduce: Callable[[], dict[str, float]]
    """Before the first step: shows a prompt, and compares the trainer's log-probabilities with the generator's."""
    silence: Callable[[Sequence[Group], dict[str, float]], str | None] = silence
    """Why nothing is learned in a step, where nothing is."""


def train(spec: PosttrainSpec | DistillSpec, session: Session, parts: Parts, *, show: bool = True) -> None:
    """Train to the end of the spec's steps, from the session's newest checkpoint if it has one."""
    with ExitStack() as stack:
        run = _Run(spec, session, parts, stack, show)
        hooks, checkpoints, saved = load_hooks(spec.hooks), CheckpointsDue(spec.every.checkpoint), run.step
        try:
            if run.step == 0:
                run.record.row(parts.introduce() | run.evaluate(), run.counters, headline=HEADLINE)
            while run.step < spec.train.steps or run.unmeasured is not None:
                if run.unmeasured is None:
                    run.unmeasured = run.learn()
                row, before = run.unmeasured  # kept until it is measured: a run that is stopped in that begins with it
                last = run.ended or run.step >= spec.train.steps
                row |= run.measure(before, last)
                if row:
                    moment = Moment(run.step, run.tokens, row, parts.learner.engine.model, session.path)
                    call_hooks(hooks, moment)
                    if moment.stop and not last:  # a hook ends the run here, as its last step would
                        last = True
                        row |= run.measure(before, last)
                    run.record.row(row, run.counters, headline=HEADLINE)
                run.unmeasured = None
                reasons = checkpoints.reasons(before, run.counters) | ({"best"} if _metric(row) else set())
                reasons |= {"temporary"} if last or session.stop_requested else set()
                if reasons:
                    run.save(reasons, row)
                    saved = run.step
                if last:
                    return
                if session.stop_requested:
                    raise _Stopped
        except _Stopped:
            if saved != run.step:
                run.save({"temporary"}, {})
            raise _interrupted(run.step, session) from None


class _Run:
    """A session at work: how far it is, and the parts of a step."""

    def __init__(self, spec: PosttrainSpec | DistillSpec, session: Session, parts: Parts, stack: ExitStack, show: bool):
        self.spec, self.session, self.parts = spec, session, parts
        self.step, self.tokens, self.unmeasured = _restore(session, parts)
        self.ended = False
        """Whether there is nothing left to learn from."""
        log.info("seed %d: %s", session.seed, f"resumed at step {self.step}" if self.step else "from the start")
        self.speed = Speed(parts.learner.engine)
        self.record = stack.enter_context(Recorder(session, spec, total=spec.train.steps, unit="steps", show=show))
        self._profile = stack.enter_context(profiled(spec.train.profile, session.path / "profile.json", True))
        self._rollouts = stack.enter_context(Recording(session)) if spec.rollout.record else None
        self._watchdog = stack.enter_context(Watchdog(STALL_SECONDS, parts.executor.describe, parts.loop.loop))
        self._lag, self._got_on = LoopLag(), (0.0, 0)
        self._measured: set[str] = set()
        parts.loop.start(self._lag.run())

    @property
    def counters(self) -> dict[str, int]:
        """How far it is."""
        return {"steps": self.step, "tokens": self.tokens}

    def learn(self) -> list[Any]:
        """One step: groups, gradients, new weights for the generator.

        What it tells, if that is due now, and the counters before it.
        """
        spec, parts, before, span = self.spec, self.parts, self.counters, self.record.span
        try:
            with span("rollout"):
                groups, filtered = parts.executor.take(self._work)
        except NothingLeft as reason:
            log.warning("the run ends at step %d: %s", self.step, reason)
            self.ended = True
            return [{}, before]
        with span("train"), self._profile(self.step + 1):
            batch = parts.learner.prepare(groups, self.step)
            learned = parts.learner.learn(batch, self.step, self._overlap)
        with span("publish"):
            weights = parts.learner.engine.weights()
            parts.writer.publish(weights, self.step + 1, keep_cache=spec.rollout.keep_cache)
            parts.executor.publish(self.step + 1)
        if self._rollouts is not None:
            with span("record"):
                self._rollouts.write(self.step + 1, groups, filtered, batch)
        self.step, self._measured = self.step + 1, set()
        self.tokens += sum(t.drawn for group in [*groups, *filtered] for t in group.trajectories)
        told = any(due(each, before, self.counters) for each in (spec.every.eval, spec.every.log))
        if not told and self.step < spec.train.steps:
            return [{}, before]
        judged = group_metrics(groups, filtered, self.step - 1) if groups else {}  # none where answers are given
        row = learned | judged | parts.executor.metrics() | self._lag.take()
        if timeouts := row.get("status/timeout"):
            log.warning(
                "step %d: the verifier took longer than rollout.verify_seconds = %g (or its task's own limit) for "
                "%.1f %% of the completions; they count with reward 0 (rollout.on_timeout)",
                self.step, spec.rollout.verify_seconds, 100 * timeouts,
            )  # fmt: skip
        self.record.rates(self.speed.since_last(self.tokens))
        if (why := parts.silence(groups, row)) is not None:
            log.warning("step %d: nothing is learned: %s", self.step, why)
        return [row, before]

    def evaluate(self) -> dict[str, float]:
        """Metrics on held-out problems by the published weights."""
        with self.speed.paused(), self.record.span("eval"):
            return self.parts.evaluate(self._look)

    def measure(self, before: dict[str, int], last: bool) -> dict[str, float]:
        """Metrics on held-out problems and of suites, where they are due and have not been measured in this step."""
        found, suites = {}, self.parts.suites
        if (last or due(self.spec.every.eval, before, self.counters)) and "eval" not in self._measured:
            found = self.evaluate()
            self._measured.add("eval")
        labels = [one for one in suites.due(before, self.counters, last) if f"suite/{one}" not in self._measured]
        if labels:
            with self.speed.paused(), self.record.span("suites"):
                found |= suites.measure(labels, self.counters, self._busy)
            self._measured |= {f"suite/{label}" for label in labels}
        return found

    def save(self, reasons: set[str], row: dict[str, float]) -> None:
        """Write a checkpoint; `row` tells how good the weights are."""
        with self.record.span("checkpoint"):
            self.parts.executor.collect()
            state = {
                **self.counters,
                "unmeasured": self.unmeasured,
                "learner": self.parts.learner.state(),
                "executor": self.parts.executor.state(),
            }
            log.info("step %d: checkpoint (%s)", self.step, ", ".join(sorted(reasons)))
            metric = _metric(row)
            self.session.checkpoint(
                self.step,
                state,
                reasons=reasons,
                score=None if metric is None else row[metric],
                metric=metric,
                counters=self.counters,
                model=self.parts.keeper.writer(),
            )

    def _look(self) -> None:
        """Between two bursts: stop if asked to, and tell the watchdog whether anything got done."""
        if self.session.stop_requested:
            raise _Stopped
        now = (self.parts.writer.metrics()["generated_tokens"], self.parts.executor.settled)
        if now != self._got_on:
            self._watchdog.progress()
        self._got_on = now

    def _busy(self) -> None:
        """The same for work that the generator has no part in."""
        self._look()
        self._watchdog.progress()

    def _work(self, seconds: float) -> bool:
        """Generate while the trainer waits for groups."""
        self._look()
        return self.parts.generator.work(seconds)

    def _overlap(self) -> None:
        """Generate between micro-batches, where answers may be older than the weights."""
        self._watchdog.progress()
        if self.spec.rollout.staleness > 0:
            self.parts.executor.collect()
            self.parts.executor.admit()
            self.parts.writer.burst()


class _Stopped(Exception):
    """The run was asked to stop while it generated."""


def _metric(row: dict[str, float]) -> str | None:
    """What checkpoints are compared by: greedy accuracy, else that of a random answer; None without an evaluation."""
    return next((name for name in ("eval/accuracy", "eval/pass@1") if name in row), None)


def _interrupted(step: int, session: Session) -> Interrupted:
    what = "with everything saved" if step else "before the first step was done"
    return Interrupted(
        f"stopped at step {step} {what}; continue with: palestra train --resume {session.path.parent.parent}"
    )


def _restore(session: Session, parts: Parts) -> tuple[int, int, list[Any] | None]:
    """Continue from the newest checkpoint: the steps and tokens so far.

    And, where it was stopped while it measured, that step's row and the counters before the step.
    """
    saved = session.restore()
    if saved is None:
        parts.writer.publish(parts.learner.engine.weights(), 0)
        return 0, 0, None
    state = saved.state
    parts.keeper.load(saved.meta.path / "model")
    parts.learner.load_state(state["learner"])
    parts.executor.load_state(state["executor"])
    parts.writer.publish(parts.learner.engine.weights(), state["steps"])
    return state["steps"], state["tokens"], state["unmeasured"]
