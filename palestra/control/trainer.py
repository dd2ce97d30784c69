"""Trains one session of a control spec: collect, learn, evaluate, log, save, until the frames are used up."""

import logging
import math
import time
from contextlib import closing
from typing import Any

import torch

from palestra.control.algorithms import ALGORITHMS
from palestra.control.collector import Collector, NotFinite
from palestra.control.compiling import should_compile
from palestra.control.envs.make import Factory, evaluation_vector, make_vector
from palestra.control.envs.snapshot import vector_exactness
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.control.policy import Policy
from palestra.control.seeding import load_random_state, random_state, seed_everything, stream
from palestra.errors import Interrupted
from palestra.runs.due import CheckpointsDue, due
from palestra.runs.session import Session
from palestra.spec.kinds.control import ControlSpec
from palestra.track.hooks import Moment, call_hooks, load_hooks
from palestra.track.recorder import Recorder

log = logging.getLogger("palestra.control")


class Learner:
    """One session's whole state in one place: policy, algorithm, environments, generators and counters."""

    def __init__(self, spec: ControlSpec, seed: int, factory: Factory | None, *, compile: bool):
        seed_everything(seed)
        self.seed, self.steps, self.name, self.compiled = seed, 0, spec.algorithm.name, compile
        device = torch.device("cuda" if spec.device == "cuda" else "cpu")
        self.generator = torch.Generator().manual_seed(stream(seed, "policy"))
        self.env = make_vector(spec.env, spec.env.num_envs, factory)
        self.policy = Policy.of(self.env.single_observation_space, self.env.single_action_space, spec.net, device)
        self.collector = Collector(
            Stepper(self.env, spec.env.id), spec.algorithm.horizon, self.policy.head.shape, self.policy.head.dtype
        )
        algorithm = ALGORITHMS[spec.algorithm.name]
        self.algorithm = algorithm(spec.algorithm, self.policy, self.collector, self.generator, compile=compile)

    @property
    def counters(self) -> dict[str, int]:
        """Policy improvements and environment transitions so far."""
        return {"steps": self.steps, "frames": self.collector.frame}

    def improve(self, progress: float) -> dict[str, float]:
        """One policy improvement; a row of metrics of the collecting policy and of the algorithm."""
        metrics = self.algorithm.step(progress)
        self.steps += 1
        broken = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            raise NotFinite(
                f"training has diverged at step {self.steps}: {', '.join(broken)}. The last checkpoint is from before: "
                "start again with a smaller algorithm.lr or algorithm.max_grad_norm."
            )
        return self.collector.metrics() | {f"{self.name}/{metric}": value for metric, value in metrics.items()}

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Reset the environments, or continue from `state()`."""
        self.collector.reset(stream(self.seed, "env"))
        if saved is None:
            return
        self.steps = saved["steps"]
        self.algorithm.load_state(saved["algorithm"])
        self.collector.load_state(saved["collector"])
        self.generator.set_state(saved["generator"])
        load_random_state(saved["random"])

    def state(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on. Taking it changes nothing."""
        return {
            "steps": self.steps,
            "compiled": self.compiled,
            "algorithm": self.algorithm.state(),
            "collector": self.collector.state(),
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
        last = learner.collector.frame >= spec.train.frames
        while not last:
            before, started = learner.counters, time.perf_counter()
            row = learner.improve(before["frames"] / spec.train.frames)
            counters = learner.counters
            last = counters["frames"] >= spec.train.frames
            record.stats.last("time/fps", (counters["frames"] - before["frames"]) / (time.perf_counter() - started))

            reasons, score = checkpoints.reasons(before, counters), None
            if last or due(spec.every.eval, before, counters):
                with record.span("eval"):
                    # A seed of its own for every evaluation: nothing to remember, and a resumed run repeats it.
                    seed = stream(session.seed, "eval", learner.steps)
                    row |= evaluate(learner.policy, evaluator, spec.eval.episodes, seed).metrics()
                score = row["eval/return"]
                reasons.add("best")
            if last or score is not None or due(spec.every.log, before, counters):
                moment = Moment(learner.steps, learner.collector.frame, row, learner.policy, session.path)
                call_hooks(hooks, moment)
                last = last or moment.stop
                record.row(row, counters, headline=("return", "eval/return"))

            if last or session.stop_requested:
                reasons.add("temporary")
            if reasons:
                log.info("step %d: checkpoint (%s)", learner.steps, ", ".join(sorted(reasons)))
                metric = None if score is None else "eval/return"
                with record.span("checkpoint"):
                    session.checkpoint(
                        learner.steps, learner.state(), reasons=reasons, score=score, metric=metric, counters=counters
                    )
            if session.stop_requested and not last:
                raise Interrupted(
                    f"stopped at frame {counters['frames']} with everything saved; continue with: "
                    f"palestra train --resume {session.path.parent.parent}"
                )
