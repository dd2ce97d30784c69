"""Trains one session on rewards: a step is rollout → train → publish; `runs.loop` does the rest."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palestra.evaluate.completions import Evaluation
from palestra.evaluate.records import record_rows
from palestra.generate.types import DrivenGenerator
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.lm.trainer import Keeper, Speed, SuiteRunner, profiled
from palestra.posttrain.metrics import check_mismatch, completion_rows, group_metrics, mismatch_bound
from palestra.rollout.event_loop import LoopLag, LoopThread, RolloutWatchdog
from palestra.rollout.executor import Executor
from palestra.rollout.records import Recording, RolloutReplay
from palestra.rollout.types import Group
from palestra.runs.checkpoint import Checkpoint
from palestra.runs.loop import Counters, Row, Stopped, due, restore, run
from palestra.runs.recorder import Recorder, Silent
from palestra.runs.session import Session
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.tasks.stream import NothingLeft

log = logging.getLogger("palestra.posttrain")

STALL_SECONDS = 60.0
"""Without progress for this long, the watchdog logs what each rollout waits for."""


class GroupLearner(Protocol):
    """Turns rollout groups into optimizer steps: `Learner` by rewards, `Distiller` by a teacher's distributions."""

    engine: TrainEngine

    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """The groups packed, first and in their order, with `advantages` of every token."""

    def learn(self, batch: Batch, step: int, between: Callable[[], object]) -> dict[str, float]:
        """Every optimizer step on a batch, with `between` called between micro-batches; its metrics."""

    def why_no_gradient(self, groups: Sequence[Group], row: Row) -> str | None:
        """Why nothing was learned in a step, if nothing was."""

    def state(self) -> dict[str, Any]:
        """Everything but the weights of the model that is trained."""

    def load_state(self, state: dict[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from `state()`, of which the shards of several ranks lie in a checkpoint."""


@dataclass
class PosttrainParts:
    """What a session is made of."""

    learner: GroupLearner
    rollout: "RolloutParts | None"
    """Where groups come from; None on all ranks but the first, which get them from it."""
    keeper: Keeper
    evaluate: Callable[[Callable[[], None]], Evaluation]
    """Evaluates held-out problems, by the published weights; its argument is called between bursts."""
    suites: SuiteRunner
    self_test: Callable[[], dict[str, float]]
    """Before the first step: logs a prompt, and compares the trainer's log-probabilities with the generator's."""


@dataclass
class RolloutParts:
    """What makes completions."""

    executor: Executor | RolloutReplay
    generator: DrivenGenerator
    loop: LoopThread
    """Where workflows run."""


def train(spec: PosttrainSpec | DistillSpec, session: Session, parts: PosttrainParts, *, show: bool = True) -> None:
    """Train to the end of the spec's steps, from the session's newest checkpoint if it has one."""
    ranks = parts.learner.engine.ranks
    saved = restore(session, ranks)
    with ExitStack() as stack:
        trainer = PosttrainTrainer(spec, session, parts, saved, stack, show)
        run(spec, session, trainer, trainer.record, saved, ranks)


class PosttrainTrainer:
    """The trainer of the kinds `posttrain` and `distill`, for `runs.loop`."""

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
        self.ranks = parts.learner.engine.ranks
        self.steps = self.tokens = 0
        self.exhausted = False
        """Whether no prompts are left."""
        if saved is not None:
            self.steps, self.tokens = saved.state["steps"], saved.state["tokens"]
            parts.keeper.load(saved.meta.path / "model")
            parts.learner.load_state(saved.state["learner"], saved.meta.path)
        weights = parts.learner.engine.weights()
        self.speed = Speed(parts.learner.engine)
        self._groups: list[Group] = []
        self._filtered: list[Group] = []
        self._learned: Row = {}
        self._timeouts = 0.0
        """The largest share of completions of a step whose verifier's time ran out, as far as it was told."""
        self._bound = mismatch_bound(spec)
        self._rollouts: Recording | None = None
        first = parts.rollout
        profile = session.path / "profile.json"
        self._profile = stack.enter_context(profiled(spec.train.profile, profile, first is not None))
        self.record: Recorder | Silent = stack.enter_context(
            Silent(session, spec, self.ranks.rank)
            if first is None
            else Recorder(session, spec, total=spec.train.steps, unit="steps", show=show)
        )
        if first is None:
            return
        if saved is not None:
            first.executor.load_state(saved.state["executor"])
        first.generator.load(weights, self.steps)
        self._rollouts = stack.enter_context(Recording(session)) if spec.rollout.record else None
        self._watchdog = stack.enter_context(RolloutWatchdog(STALL_SECONDS, first.executor.describe, first.loop.loop))
        self._lag, self._last_progress = LoopLag(), (0.0, 0)
        first.loop.start(self._lag.run())

    @property
    def rollout(self) -> RolloutParts:
        """Of the first rank."""
        assert self.parts.rollout is not None
        return self.parts.rollout

    @property
    def counters(self) -> dict[str, int]:
        return {"steps": self.steps, "tokens": self.tokens}

    @property
    def done(self) -> bool:
        return self.exhausted or self.steps >= self.spec.train.steps

    def first_row(self) -> Row:
        """The self-test, and an evaluation of the initial model."""
        return self.parts.self_test() | self.measure(["eval"])

    def step(self) -> None:
        """Rollout → train → publish."""
        learner, span, version = self.parts.learner, self.record.span, self.steps + 1
        try:
            with span("rollout"):
                groups, filtered = self.ranks.on_first(lambda: self.rollout.executor.take(self._work))
        except NothingLeft as reason:
            log.warning("the run ends at step %d: %s", self.steps, reason)
            self.exhausted = True
            return
        with span("train"), self._profile(version):
            batch = learner.prepare(groups, self.steps)
            if self.spec.rollout.record == "tokens":
                batch = learner.engine.with_scores(batch, temperature=self.spec.rollout.temperature)
            self._learned = learner.learn(batch, self.steps, self._overlap)
        if self._bound is not None and (k3 := self._learned.get("mismatch")) is not None:
            check_mismatch(k3, self._bound)
        with span("publish", version=version):
            weights = learner.engine.weights()
            if self.ranks.first:
                self.rollout.generator.load(weights, version, keep_cache=self.spec.rollout.keep_cache)
                self.rollout.executor.publish(version)
        if self._rollouts is not None:
            with span("record"):
                self._rollouts.write(version, groups, filtered, batch)
        self._overlap()  # the device generates while metrics are computed
        self.steps, self._groups, self._filtered = version, groups, filtered
        self.tokens += sum(t.sampled for group in [*groups, *filtered] for t in group.trajectories)

    def metrics(self) -> Row:
        """Of the groups, the gradient steps and the executor."""
        if self.exhausted:
            return {}
        groups = self._groups  # empty if distillation trains on given completions alone
        rewards = group_metrics(groups, self._filtered, self.steps - 1) if groups else {}
        generated = self.ranks.on_first(self._generated)
        row = self._learned | rewards | generated
        if (timeouts := row.get("status/timeout", 0.0)) > 2 * self._timeouts:
            self._timeouts = timeouts
            log.warning(
                "step %d: the verifier took longer than rollout.verify_seconds = %g (or its task's own limit) for "
                "%.1f %% of the completions; they count with reward 0 (rollout.on_timeout). The next warning is at "
                "twice as many; `palestra plot --metric status/timeout` shows them all",
                self.steps, self.spec.rollout.verify_seconds, 100 * timeouts,
            )  # fmt: skip
        self.record.rates(self.speed.since_last(self.tokens))
        self.record.table("completions/rollouts", completion_rows(groups, self.steps), self.steps)
        if (why := self.parts.learner.why_no_gradient(groups, row)) is not None:
            log.warning("step %d: nothing is learned: %s", self.steps, why)
        return row

    def _generated(self) -> Row:
        return self.rollout.executor.metrics() | self.rollout.generator.counters() | self._lag.take()

    def due(self, before: Counters, last: bool) -> list[str]:
        """Held-out problems, and suites by their names."""
        names = ["eval"] if last or due(self.spec.every.eval, before, self.counters) else []
        return names + [f"suite/{label}" for label in self.parts.suites.due(before, self.counters, last)]

    def measure(self, names: Sequence[str]) -> Row:
        """By the published weights."""
        row: Row = {}
        labels = [name.removeprefix("suite/") for name in names if name.startswith("suite/")]
        with self.speed.paused():
            if "eval" in names:
                with self.record.span("eval"):
                    row |= self.ranks.on_first(self._evaluated)
            if labels:
                with self.record.span("suites"):
                    row |= self.parts.suites.measure(labels, self.counters, self._check_busy)
        return row

    def _evaluated(self) -> Row:
        evaluation = self.parts.evaluate(self._check)
        self.record.table("completions/eval", record_rows(evaluation.records, self.steps), self.steps)
        return evaluation.metrics

    def score(self, row: Row) -> tuple[str, float] | None:
        """Greedy accuracy, else that of a sampled completion."""
        return next(((name, row[name]) for name in ("eval/accuracy", "eval/pass@1") if name in row), None)

    def paused(self) -> AbstractContextManager[None]:
        return self.speed.paused()

    def state(self) -> dict[str, Any]:
        """Counters, learner, and the groups in flight."""
        state: dict[str, Any] = {**self.counters, "learner": self.parts.learner.state()}
        if self.ranks.first:
            self.rollout.executor.collect()
            state["executor"] = self.rollout.executor.state()
        return state

    def model(self) -> Callable[..., None]:
        return self.parts.keeper.writer()

    def _check(self) -> None:
        """Between two bursts: stop if requested, and let the watchdog know of progress."""
        if self.session.stop_requested:
            raise Stopped
        now = (self.rollout.generator.generated, self.rollout.executor.settled)
        if now != self._last_progress:
            self._watchdog.progress()
        self._last_progress = now

    def _check_busy(self) -> None:
        """The same during work without the generator."""
        self._check()
        self._watchdog.progress()

    def _work(self, seconds: float) -> bool:
        """Generate while the trainer waits for groups."""
        self._check()
        return self.rollout.generator.work(seconds)

    def _overlap(self) -> None:
        """Generate beside the training, if completions may be off-policy."""
        if not self.ranks.first:
            return
        self._watchdog.progress()
        if self.spec.rollout.staleness > 0:
            self.rollout.executor.collect()
            with suppress(NothingLeft):  # the next step says so
                self.rollout.executor.admit()
            self.rollout.generator.overlap()
