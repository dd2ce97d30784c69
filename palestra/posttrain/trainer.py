"""Trains one session on rewards: a step is rollout → train → publish; `runs.loop` does the rest."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.lm.trainer import Keeper, Speed, SuiteRunner, profiled
from palestra.posttrain.metrics import group_metrics, silence
from palestra.rollout.event_loop import LoopLag, LoopThread, RolloutWatchdog
from palestra.rollout.executor import Executor
from palestra.rollout.records import Recording, RolloutReplay
from palestra.rollout.types import Group
from palestra.runs.checkpoint import Checkpoint
from palestra.runs.loop import Counters, Row, Stopped, due, restore, run
from palestra.runs.recorder import Recorder
from palestra.runs.session import Session
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.tasks.stream import NothingLeft

log = logging.getLogger("palestra.posttrain")

STALL_SECONDS = 60.0
"""Without progress for this long, the log tells who waits for whom."""


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


@dataclass
class PosttrainParts:
    """What a session works with."""

    learner: Learns
    executor: Executor | RolloutReplay
    """Where groups come from."""
    writer: Engine
    """The engine that generates."""
    generator: LocalGenerator
    keeper: Keeper
    evaluate: Callable[[Callable[[], None]], dict[str, float]]
    """Metrics on what is not trained on, by the weights that are published; calls what it is given as it gets on."""
    suites: SuiteRunner
    loop: LoopThread
    """Where workflows run."""
    introduce: Callable[[], dict[str, float]]
    """Before the first step: shows a prompt, and compares the trainer's log-probabilities with the generator's."""
    silence: Callable[[Sequence[Group], dict[str, float]], str | None] = silence
    """Why nothing is learned in a step, where nothing is."""


def train(spec: PosttrainSpec | DistillSpec, session: Session, parts: PosttrainParts, *, show: bool = True) -> None:
    """Train to the end of the spec's steps, from the session's newest checkpoint if it has one."""
    saved = restore(session)
    with ExitStack() as stack:
        trainer = PosttrainTrainer(spec, session, parts, saved, stack, show)
        run(spec, session, trainer, trainer.record, saved)


class PosttrainTrainer:
    """A session at work."""

    headline = ("eval/accuracy", "reward")

    def __init__(
        self,
        spec: PosttrainSpec | DistillSpec,
        session: Session,
        parts: PosttrainParts,
        saved: Checkpoint | None,
        stack: ExitStack,
        show: bool,
    ):
        self.spec, self.session, self.parts, self.policy = spec, session, parts, parts.learner.engine.model
        self.steps = self.tokens = 0
        self.ended = False
        """Whether there is nothing left to learn from."""
        if saved is not None:
            self.steps, self.tokens = saved.state["steps"], saved.state["tokens"]
            parts.keeper.load(saved.meta.path / "model")
            parts.learner.load_state(saved.state["learner"])
            parts.executor.load_state(saved.state["executor"])
        parts.writer.publish(parts.learner.engine.weights(), self.steps)
        self.speed = Speed(parts.learner.engine)
        self.record = stack.enter_context(Recorder(session, spec, total=spec.train.steps, unit="steps", show=show))
        self._profile = stack.enter_context(profiled(spec.train.profile, session.path / "profile.json", True))
        self._rollouts = stack.enter_context(Recording(session)) if spec.rollout.record else None
        self._watchdog = stack.enter_context(RolloutWatchdog(STALL_SECONDS, parts.executor.describe, parts.loop.loop))
        self._lag, self._got_on = LoopLag(), (0.0, 0)
        self._groups: list[Group] = []
        self._filtered: list[Group] = []
        self._learned: Row = {}
        parts.loop.start(self._lag.run())

    @property
    def counters(self) -> dict[str, int]:
        return {"steps": self.steps, "tokens": self.tokens}

    @property
    def done(self) -> bool:
        return self.ended or self.steps >= self.spec.train.steps

    def first_row(self) -> Row:
        """The trainer beside the generator, and an evaluation of the model as it starts."""
        return self.parts.introduce() | self.measure(["eval"])

    def step(self) -> None:
        """Rollout → train → publish."""
        parts, span = self.parts, self.record.span
        try:
            with span("rollout"):
                groups, filtered = parts.executor.take(self._work)
        except NothingLeft as reason:
            log.warning("the run ends at step %d: %s", self.steps, reason)
            self.ended = True
            return
        with span("train"), self._profile(self.steps + 1):
            batch = parts.learner.prepare(groups, self.steps)
            self._learned = parts.learner.learn(batch, self.steps, self._overlap)
        with span("publish"):
            weights, version = parts.learner.engine.weights(), self.steps + 1
            parts.writer.publish(weights, version, keep_cache=self.spec.rollout.keep_cache)
            parts.executor.publish(version)
        if self._rollouts is not None:
            with span("record"):
                self._rollouts.write(version, groups, filtered, batch)
        self.steps, self._groups, self._filtered = version, groups, filtered
        self.tokens += sum(t.sampled for group in [*groups, *filtered] for t in group.trajectories)

    def metrics(self) -> Row:
        """Of the groups, the gradient steps and the executor."""
        if self.ended:
            return {}
        groups = self._groups
        judged = group_metrics(groups, self._filtered, self.steps - 1) if groups else {}  # none where these are given
        row = self._learned | judged | self.parts.executor.metrics() | self._lag.take()
        if timeouts := row.get("status/timeout"):
            log.warning(
                "step %d: the verifier took longer than rollout.verify_seconds = %g (or its task's own limit) for "
                "%.1f %% of the completions; they count with reward 0 (rollout.on_timeout)",
                self.steps, self.spec.rollout.verify_seconds, 100 * timeouts,
            )  # fmt: skip
        self.record.rates(self.speed.since_last(self.tokens))
        if (why := self.parts.silence(groups, row)) is not None:
            log.warning("step %d: nothing is learned: %s", self.steps, why)
        return row

    def due(self, before: Counters, last: bool) -> list[str]:
        """Held-out problems, and suites by their names."""
        names = ["eval"] if last or due(self.spec.every.eval, before, self.counters) else []
        return names + [f"suite/{label}" for label in self.parts.suites.due(before, self.counters, last)]

    def measure(self, names: Sequence[str]) -> Row:
        """By the published weights."""
        found: Row = {}
        labels = [name.removeprefix("suite/") for name in names if name.startswith("suite/")]
        with self.speed.paused():
            if "eval" in names:
                with self.record.span("eval"):
                    found |= self.parts.evaluate(self._look)
            if labels:
                with self.record.span("suites"):
                    found |= self.parts.suites.measure(labels, self.counters, self._busy)
        return found

    def score(self, row: Row) -> tuple[str, float] | None:
        """Greedy accuracy, else that of a sampled completion."""
        return next(((name, row[name]) for name in ("eval/accuracy", "eval/pass@1") if name in row), None)

    def paused(self) -> AbstractContextManager[None]:
        return self.speed.paused()

    def state(self) -> dict[str, Any]:
        """Counters, learner, and the groups that are under way."""
        self.parts.executor.collect()
        return {**self.counters, "learner": self.parts.learner.state(), "executor": self.parts.executor.state()}

    def model(self) -> Callable[[Path], None]:
        return self.parts.keeper.writer()

    def _look(self) -> None:
        """Between two bursts: stop if asked to, and tell the watchdog whether anything got done."""
        if self.session.stop_requested:
            raise Stopped
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
        """Generate between micro-batches, where completions may be older than the weights."""
        self._watchdog.progress()
        if self.spec.rollout.staleness > 0:
            self.parts.executor.collect()
            self.parts.executor.admit()
            self.parts.writer.burst()
