"""Trains one session on rewards: generate and judge, learn, publish, evaluate, log, save, until the steps are done."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palestra.errors import Interrupted
from palestra.generate.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.lm.speed import Speed, profiled
from palestra.posttrain.metrics import group_metrics, silence
from palestra.rollout.executor import Executor
from palestra.rollout.loop import LoopThread
from palestra.rollout.records import Recording
from palestra.rollout.replay import Replay
from palestra.rollout.types import Group
from palestra.rollout.watch import LoopLag, Watchdog
from palestra.runs.due import CheckpointsDue, due
from palestra.runs.session import Session
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.tasks.stream import NothingLeft
from palestra.track.hooks import Moment, call_hooks, load_hooks
from palestra.track.recorder import Recorder

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
    learner, executor, hooks = parts.learner, parts.executor, load_hooks(spec.hooks)
    step, tokens, unevaluated = _restore(session, parts)
    log.info("seed %d: %s", session.seed, "from the start" if step == 0 else f"resumed at step {step}")
    checkpoints, speed = CheckpointsDue(spec.every.checkpoint), Speed(learner.engine)
    with ExitStack() as stack:
        record = stack.enter_context(Recorder(session, spec, total=spec.train.steps, unit="steps", show=show))
        profile = stack.enter_context(profiled(spec.train.profile, session.path / "profile.json", True))
        rollouts = stack.enter_context(Recording(session)) if spec.rollout.record else None
        watchdog = stack.enter_context(Watchdog(STALL_SECONDS, executor.describe, parts.loop.loop))
        lag = LoopLag()
        parts.loop.start(lag.run())

        got_on = (0.0, 0)

        def look() -> None:
            """Between two bursts: stop if asked to, and tell the watchdog whether anything got done."""
            nonlocal got_on
            if session.stop_requested:
                raise _Stopped
            now = (parts.writer.metrics()["generated_tokens"], executor.settled)
            if now != got_on:
                watchdog.progress()
            got_on = now

        def work(seconds: float) -> bool:
            """Generate while the trainer waits for groups."""
            look()
            return parts.generator.work(seconds)

        def evaluate() -> dict[str, float] | None:
            """None where the run was asked to stop meanwhile."""
            try:
                with speed.paused(), record.span("eval"):
                    return parts.evaluate(look)
            except _Stopped:
                return None

        def measure(labels: Sequence[str], counters: dict[str, int]) -> dict[str, float] | None:
            """None where the run was asked to stop meanwhile."""

            def busy() -> None:
                look()
                watchdog.progress()

            if not labels:
                return {}
            try:
                with speed.paused(), record.span("suites"):
                    return parts.suites.measure(labels, counters, busy)
            except _Stopped:
                return None

        def overlap() -> None:
            """Generate between micro-batches, where answers may be older than the weights."""
            watchdog.progress()
            if spec.rollout.staleness > 0:
                executor.collect()
                executor.admit()
                parts.writer.burst()

        if step == 0:
            record.row(parts.introduce() | (evaluate() or {}), {"steps": 0, "tokens": 0}, headline=HEADLINE)
        saved, last = step, step >= spec.train.steps and unevaluated is None
        while not last:
            before = {"steps": step, "tokens": tokens}
            if unevaluated is None:
                try:
                    with record.span("rollout"):
                        groups, filtered = executor.take(work)
                except _Stopped:
                    if saved != step:
                        _save(session, parts, before, {"temporary"}, {})
                    raise _interrupted(step, session) from None
                except NothingLeft as reason:
                    log.warning("the run ends at step %d: %s", step, reason)
                    row = evaluate() or {}
                    row |= measure(parts.suites.due(before, before, True), before) or {}
                    record.row(row, before, headline=HEADLINE)
                    _save(session, parts, before, {"temporary", "best"} if _metric(row) else {"temporary"}, row)
                    return
                with record.span("train"), profile(step + 1):
                    batch = learner.prepare(groups, step)
                    learned = learner.learn(batch, step, overlap)
                with record.span("publish"):
                    parts.writer.publish(learner.engine.weights(), step + 1, keep_cache=spec.rollout.keep_cache)
                    executor.publish(step + 1)
                if rollouts is not None:
                    with record.span("record"):
                        rollouts.write(step + 1, groups, filtered, batch)
                step, row = step + 1, {}
                tokens += sum(t.drawn for group in [*groups, *filtered] for t in group.trajectories)
                counters = {"steps": step, "tokens": tokens}
                if step >= spec.train.steps or any(
                    due(each, before, counters) for each in (spec.every.eval, spec.every.log)
                ):
                    judged = group_metrics(groups, filtered, step - 1) if groups else {}  # none where answers are given
                    row = learned | judged | executor.metrics() | lag.take()
                    record.rates(speed.since_last(tokens))
                    why = parts.silence(groups, row)
                    if why is not None:
                        log.warning("step %d: nothing is learned: %s", step, why)
            else:  # stopped in the middle of an evaluation: it begins with that
                (row, before), unevaluated = unevaluated, None
                counters = {"steps": step, "tokens": tokens}
            last, reasons = step >= spec.train.steps, checkpoints.reasons(before, counters)
            evaluated = last or due(spec.every.eval, before, counters)
            measured = parts.suites.due(before, counters, last)
            if evaluated or measured:
                found = evaluate() if evaluated else {}
                of_suites = None if found is None else measure(measured, counters)
                if found is None or of_suites is None:
                    executor.collect()
                    _save(session, parts, counters, {"temporary"}, {}, unevaluated=[row, before])
                    raise _interrupted(step, session)
                row |= found | of_suites
            if row:
                moment = Moment(step, tokens, row, learner.engine.model, session.path)
                call_hooks(hooks, moment)
                if moment.stop and not last:  # a hook ends the run here, as its last step would
                    last = True
                    row |= {} if evaluated else evaluate() or {}
                    rest = [one for one in parts.suites.due(before, counters, last) if one not in measured]
                    row |= measure(rest, counters) or {}
                record.row(row, counters, headline=HEADLINE)
            stop = session.stop_requested
            reasons |= ({"best"} if _metric(row) else set()) | ({"temporary"} if last or stop else set())
            if reasons:
                with record.span("checkpoint"):
                    executor.collect()
                    _save(session, parts, counters, reasons, row)
                saved = step
            if stop and not last:
                raise _interrupted(step, session)


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

    And, where it was stopped in the middle of an evaluation, that step's row and the counters before the step.
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
    return state["steps"], state["tokens"], state["unevaluated"]


def _save(
    session: Session,
    parts: Parts,
    counters: dict[str, int],
    reasons: set[str],
    row: dict[str, float],
    unevaluated: list[Any] | None = None,
) -> None:
    state = {
        **counters,
        "unevaluated": unevaluated,
        "learner": parts.learner.state(),
        "executor": parts.executor.state(),
    }
    log.info("step %d: checkpoint (%s)", counters["steps"], ", ".join(sorted(reasons)))
    metric = _metric(row)
    session.checkpoint(
        counters["steps"],
        state,
        reasons=reasons,
        score=None if metric is None else row[metric],
        metric=metric,
        counters=counters,
        model=parts.keeper.writer(),
    )
