"""Trains one session of a control spec: collect, learn, evaluate, log, save, until the frames are used up."""

import logging
import math
import time
from contextlib import closing
from typing import Any

import torch

from palestra.control.algorithms import ALGORITHMS, check_actions
from palestra.control.algorithms.base import Parts
from palestra.control.envs.make import Factory, evaluation_vector, make_vector
from palestra.control.envs.snapshot import vector_exactness
from palestra.control.envs.stepping import Stepper
from palestra.control.episodes import NotFinite
from palestra.control.evaluation import evaluate
from palestra.control.optim import products, should_compile
from palestra.control.seeding import load_random_state, random_state, seed_everything, stream
from palestra.errors import Interrupted
from palestra.runs.due import CheckpointsDue, due
from palestra.runs.recorder import Moment, Recorder, call_hooks, load_hooks
from palestra.runs.session import Session
from palestra.spec.kinds.control import ControlSpec

log = logging.getLogger("palestra.control")


class Learner:
    """One session's whole state in one place: policy, algorithm, environments, generators and counters."""

    def __init__(self, spec: ControlSpec, seed: int, factory: Factory | None, *, compile: bool):
        seed_everything(seed)
        self.seed, self.steps, self.name, self.compiled = seed, 0, spec.algorithm.name, compile
        self.evaluated, self.last_evaluated = 0, 0  # frames of all evaluations, and of the last one
        device = torch.device("cuda" if spec.device == "cuda" else "cpu")
        self.env = make_vector(spec.env, spec.env.num_envs, factory)
        parts = Parts.of(spec, Stepper(self.env, spec.env.id), stream(seed, "policy"), device, compile=compile)
        self.generator, self.precision = parts.generator, spec.train.precision
        check_actions(spec, parts.head)
        self.algorithm = ALGORITHMS[spec.algorithm.name](parts)
        self.policy, self.episodes = self.algorithm.policy, self.algorithm.episodes

    @property
    def counters(self) -> dict[str, int]:
        """Policy improvements and environment transitions so far."""
        return {"steps": self.steps, "frames": self.episodes.frame}

    def improve(self, progress: float) -> dict[str, float]:
        """One policy improvement; a row of metrics of the collecting policy and of the algorithm."""
        with products(self.precision):
            metrics = self.algorithm.step(progress)
        self.steps += 1
        broken = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            raise NotFinite(
                f"training has diverged at step {self.steps}: {', '.join(broken)}. The last checkpoint is from before: "
                "start again with a smaller algorithm.lr or algorithm.max_grad_norm."
            )
        return self.episodes.metrics() | {f"{self.name}/{metric}": value for metric, value in metrics.items()}

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Reset the environments, or continue from `state()`."""
        self.episodes.reset(stream(self.seed, "env"))
        if saved is None:
            return
        self.steps, self.evaluated, self.last_evaluated = saved["steps"], saved["evaluated"], saved["last_evaluated"]
        self.algorithm.load_state(saved["algorithm"])
        self.generator.set_state(saved["generator"])
        load_random_state(saved["random"])

    def evaluation_due(self, spec: ControlSpec, before: dict[str, int]) -> bool:
        """Whether one is due after the step that began at `before`; auto also asks what it would cost in frames."""
        if not due(spec.evaluations, before, self.counters):
            return False
        if spec.every.eval != "auto":
            return True
        lengths = [length for _, length in self.episodes.recent]
        one = max(self.last_evaluated, spec.eval.episodes * sum(lengths) / max(1, len(lengths)))
        return bool(lengths) and spec.affords(self.evaluated, one, self.episodes.frame)

    def evaluate(
        self, spec: ControlSpec, evaluator: Stepper, row: dict[str, float], session: Session, record: Recorder
    ) -> bool:
        """Add an evaluation to the row; False if the session was asked to stop in the middle of it."""
        # A seed of its own for every evaluation: nothing to remember, and a resumed run repeats it.
        seed, began = stream(self.seed, "eval", self.steps), time.perf_counter()
        with record.span("eval"):
            done = evaluate(self.policy, evaluator, spec.eval.episodes, seed, stop=lambda: session.stop_requested)
        if done is None:
            return False
        row |= done.metrics()
        self.evaluated, self.last_evaluated = self.evaluated + done.frames, done.frames
        seconds, share = time.perf_counter() - began, self.evaluated / self.episodes.frame
        told = f"step {self.steps}: evaluation of {len(done.returns)} episodes took {seconds:.1f} s"
        log.info(f"{told} ({done.frames} frames; {share:.1%} of those of training so far)")
        return True

    def state(self, unevaluated: list[Any] | None = None) -> dict[str, Any]:
        """Everything that the rest of the run depends on. Taking it changes nothing.

        `unevaluated` is the row of a step whose evaluation is still to be done, and the counters before that step.
        """
        return {
            "unevaluated": unevaluated,
            "steps": self.steps,
            "evaluated": self.evaluated,
            "last_evaluated": self.last_evaluated,
            "compiled": self.compiled,
            "algorithm": self.algorithm.state(),
            "generator": self.generator.get_state(),
            "random": random_state(),
        }


def train(spec: ControlSpec, session: Session, *, factory: Factory | None = None, show: bool = True) -> None:
    """Train the session's seed to the end of the spec's frames, from its newest checkpoint if it has one."""
    hooks = load_hooks(spec.hooks)
    saved = session.restore()
    # A compiled update rounds differently: a resumed run goes on as it began.
    compile = should_compile(spec) if saved is None else saved.state["compiled"]
    learner = Learner(spec, session.seed, factory, compile=compile)
    evaluation_env = evaluation_vector(spec.env, min(spec.eval.num_envs, spec.eval.episodes), factory)
    evaluator = Stepper(evaluation_env, spec.env.id)
    learner.algorithm.folder = session.path
    learner.begin(None if saved is None else saved.state)
    log.info("seed %d: %s", session.seed, "from the start" if saved is None else f"resumed at step {saved.step}")
    if (inexact := vector_exactness(learner.env)) is not None:
        log.warning(inexact)

    checkpoints = CheckpointsDue(spec.every.checkpoint)
    total = spec.steps * spec.frames_per_step
    with (
        closing(learner.env),
        closing(evaluation_env),
        Recorder(session, spec, total=total, unit="frames", show=show) as record,
    ):
        learner.algorithm.span = record.span
        row, before = (saved.state["unevaluated"] if saved is not None else None) or (None, learner.counters)
        last = row is None and learner.episodes.frame >= spec.train.frames
        while not last:
            if row is None:
                before, started = learner.counters, time.perf_counter()
                row = learner.improve(before["frames"] / spec.train.frames)
                speed = (learner.episodes.frame - before["frames"]) / (time.perf_counter() - started)
                record.stats.last("time/fps", speed)
            counters = learner.counters
            last = counters["frames"] >= spec.train.frames
            reasons = checkpoints.reasons(before, counters)
            evaluated = last or learner.evaluation_due(spec, before)
            if evaluated and not learner.evaluate(spec, evaluator, row, session, record):
                # Asked to stop in the middle of it: the resumed run begins with this evaluation.
                session.checkpoint(
                    learner.steps, learner.state(unevaluated=[row, before]), reasons={"temporary"}, counters=counters
                )
                raise _interrupted(session, counters)
            if evaluated or due(spec.every.log, before, counters):
                moment = Moment(learner.steps, learner.episodes.frame, row, learner.policy, session.path)
                call_hooks(hooks, moment)
                if moment.stop and not evaluated:
                    evaluated = learner.evaluate(spec, evaluator, row, session, record)
                last = last or moment.stop
                record.row(row, counters, headline=("return", "eval/return"))

            if evaluated:
                reasons.add("best")
            if last or session.stop_requested:
                reasons.add("temporary")
            if reasons:
                log.info("step %d: checkpoint (%s)", learner.steps, ", ".join(sorted(reasons)))
                score = row["eval/return"] if evaluated else None
                metric = "eval/return" if evaluated else None
                with record.span("checkpoint"):
                    session.checkpoint(
                        learner.steps, learner.state(), reasons=reasons, score=score, metric=metric, counters=counters
                    )
            if session.stop_requested and not last:
                raise _interrupted(session, counters)
            row = None


def _interrupted(session: Session, counters: dict[str, int]) -> Interrupted:
    return Interrupted(
        f"stopped at frame {counters['frames']} with everything saved; continue with: "
        f"palestra train --resume {session.path.parent.parent}"
    )
