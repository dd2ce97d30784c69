"""Trains one session of a control spec: one step collects and learns; `runs.loop` does the rest."""

import logging
import math
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from palestra.control.algorithms import algorithm_of, check_actions
from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.envs.make import Factory, MakeVector, evaluation_vector, make_single, make_vector
from palestra.control.envs.snapshot import vector_exactness
from palestra.control.envs.stepping import Stepper
from palestra.control.episodes import NotFinite
from palestra.control.evaluation import evaluate, play, write_video
from palestra.control.hooks import Hooks
from palestra.control.optim import keep_freed_memory, products, should_compile
from palestra.control.sb3 import initial
from palestra.control.seeding import load_random_state, random_state, seed_everything, stream
from palestra.errors import UsageError
from palestra.runs.loop import Counters, Row, Stopped, due, restore, run
from palestra.runs.recorder import Recorder
from palestra.runs.session import Session
from palestra.spec.kinds.control import ControlSpec

log = logging.getLogger("palestra.control")


def train(
    spec: ControlSpec,
    session: Session,
    *,
    factory: Factory | None = None,
    make: MakeVector = make_vector,
    make_evaluated: MakeVector = make_vector,
    show: bool = True,
) -> None:
    """Train the session's seed to the end of the spec's frames, from its newest checkpoint if it has one."""
    saved = restore(session)
    # A compiled update rounds differently: a resumed run keeps the mode it started with.
    compile = should_compile(spec) if saved is None else saved.state["compiled"]
    trainer = ControlTrainer(spec, session.seed, factory, make, compile=compile)
    evaluation_env = evaluation_vector(spec.env, min(spec.eval.num_envs, spec.eval.episodes), factory, make_evaluated)
    trainer.algorithm.folder = session.path / "replay"
    trainer.hooks = Hooks(spec, trainer.policy, session.path)
    trainer.hooks.listen(trainer.episodes)
    trainer.begin(None if saved is None else saved.state)
    if (inexact := vector_exactness(trainer.env)) is not None:
        log.warning(inexact)
    total = spec.steps * spec.frames_per_step
    with (
        closing(trainer.env),
        closing(evaluation_env),
        Recorder(session, spec, total=total, unit="frames", show=show) as record,
    ):
        trainer.session, trainer.record, trainer.evaluator = session, record, Stepper(evaluation_env, spec.env.id)
        trainer.algorithm.span = record.span
        run(spec, session, trainer, record, saved)


def make_video_env(spec: ControlSpec, factory: Factory | None) -> gym.Env:
    """An environment that draws its pictures in memory."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen even to draw into memory
    return make_single(spec.env, factory, render_mode="rgb_array")


def check_pictures(spec: ControlSpec, factory: Factory | None) -> None:
    """Refuse `every.video` for an environment that gives no pictures here."""
    with closing(make_video_env(spec, factory)) as env:
        try:
            env.reset(seed=0)
            picture = env.render()
        except Exception as error:
            raised = f"{spec.env.id} cannot be drawn here ({type(error).__name__}: {error})"
            raise UsageError(f"every.video: {raised}: set it to null, or install what drawing needs") from error
    if not hasattr(picture, "shape"):
        raise UsageError(f"every.video: {spec.env.id} gives no pictures with render_mode='rgb_array': set it to null")


class ControlTrainer:
    """One session's whole state in one place: policy, algorithm, environments, generators and counters."""

    headline = ("return", "eval/return")
    session: Session
    record: Recorder
    evaluator: Stepper
    hooks: Hooks | None = None

    def __init__(
        self, spec: ControlSpec, seed: int, factory: Factory | None, make: MakeVector = make_vector, *, compile: bool
    ):
        seed_everything(seed)
        keep_freed_memory()
        self.spec, self.seed, self.steps, self.compiled = spec, seed, 0, compile
        self.factory = factory
        self.evaluated, self.last_evaluated = 0, 0  # frames of all evaluations, and of the last one
        device = torch.device("cuda" if spec.device == "cuda" else "cpu")
        self.env = make(spec.env, spec.env.num_envs, factory)
        parts = AlgorithmParts.of(spec, Stepper(self.env, spec.env.id), stream(seed, "policy"), device, compile=compile)
        self.generator = parts.generator
        check_actions(spec, parts.head)
        self.algorithm = algorithm_of(spec)(parts)
        self.policy, self.episodes = self.algorithm.policy, self.algorithm.episodes
        self._metrics: Row = {}

    @property
    def counters(self) -> dict[str, int]:
        """Policy improvements and environment transitions so far."""
        return {"steps": self.steps, "frames": self.episodes.frame}

    @property
    def done(self) -> bool:
        return self.episodes.frame >= self.spec.train.frames or (self.hooks is not None and self.hooks.stop)

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Reset the environments, or continue from `state()`."""
        self.episodes.reset(stream(self.seed, "env"))
        if saved is None and self.spec.init is not None:
            self.algorithm.begin_from(initial(Path(self.spec.init), self.algorithm))
        if saved is None:
            return
        self.steps, self.evaluated, self.last_evaluated = saved["steps"], saved["evaluated"], saved["last_evaluated"]
        self.algorithm.load_state(saved["algorithm"])
        if self.hooks is not None:
            self.hooks.load_state(saved.get("hooks", {}))
        self.generator.set_state(saved["generator"])
        load_random_state(saved["random"])

    def first_row(self) -> Row | None:
        """The evaluation of the policy that a run starts from."""
        return None if self.spec.init is None else self.measure(["eval"])

    def step(self) -> None:
        """Collect and learn: one policy improvement."""
        frames, started = self.episodes.frame, time.perf_counter()
        self.improve(frames / self.spec.train.frames)
        self.record.rates({"time/fps": (self.episodes.frame - frames) / (time.perf_counter() - started)})

    def improve(self, progress: float) -> Row:
        """One policy improvement; metrics of the algorithm."""
        with products(self.spec.train.precision):
            self._metrics = self.algorithm.step(progress)
        self.steps += 1
        non_finite = [f"{name} is {value}" for name, value in self._metrics.items() if not math.isfinite(value)]
        if non_finite:
            raise NotFinite(
                f"training diverged at step {self.steps}: {', '.join(non_finite)}. The last checkpoint is from before: "
                "start again with a smaller algorithm.lr or algorithm.max_grad_norm."
            )
        return self._metrics

    def metrics(self) -> Row:
        """Of the collecting policy and of the algorithm."""
        name = self.spec.algorithm.name
        hooks = {} if self.hooks is None else self.hooks.metrics()
        algorithm = {f"{name}/{metric}": value for metric, value in self._metrics.items()}
        return self.episodes.metrics() | algorithm | hooks

    def due(self, before: Counters, last: bool) -> list[str]:
        """An evaluation, a video; `every.eval: auto` also limits the cost of evaluations in frames."""
        video = ["video"] if due(self.spec.every.video, before, self.counters) else []
        return [*self._evaluation_due(before, last), *video]

    def _evaluation_due(self, before: Counters, last: bool) -> list[str]:
        spec = self.spec
        if last or (due(spec.evaluations, before, self.counters) and (spec.every.eval != "auto" or spec.offline)):
            return ["eval"]
        lengths = [length for _, length in self.episodes.recent]
        if not lengths or not due(spec.evaluations, before, self.counters):
            return []
        cost = max(self.last_evaluated, spec.eval.episodes * sum(lengths) / len(lengths))
        return ["eval"] if spec.affords(self.evaluated, cost, self.episodes.frame) else []

    def measure(self, names: Sequence[str]) -> Row:
        """Whole episodes in environments of their own."""
        if "video" in names:
            self._write_video()
        return self._evaluate() if "eval" in names else {}

    def _write_video(self) -> None:
        """One episode as a GIF, written beside and renamed."""
        folder, seed = self.session.path / "videos", stream(self.seed, "video", self.steps)
        with self.record.span("video"), closing(make_video_env(self.spec, self.factory)) as env:
            _, (frames,) = play(self.policy, env, 1, seed)
            write_video(frames, folder / ".partial.gif", env.metadata.get("render_fps", 30))
        (folder / ".partial.gif").rename(folder / f"frame_{self.episodes.frame:09d}.gif")

    def _evaluate(self) -> Row:
        # A seed of its own for every evaluation: no state to save, and a resumed run repeats it.
        seed, began, episodes = stream(self.seed, "eval", self.steps), time.perf_counter(), self.spec.eval.episodes
        with self.record.span("eval"):
            done = evaluate(self.policy, self.evaluator, episodes, seed, stop=lambda: self.session.stop_requested)
        if done is None:
            raise Stopped
        self.evaluated, self.last_evaluated = self.evaluated + done.frames, done.frames
        seconds, share = time.perf_counter() - began, self.evaluated / max(1, self.episodes.frame)
        took = f"step {self.steps}: evaluation of {len(done.returns)} episodes took {seconds:.1f} s"
        log.info(f"{took} ({done.frames} frames; {share:.1%} of those of training so far)")
        return done.metrics()

    def score(self, row: Row) -> tuple[str, float] | None:
        return ("eval/return", row["eval/return"]) if "eval/return" in row else None

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def state(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on. Taking it changes nothing."""
        return {
            "steps": self.steps,
            "evaluated": self.evaluated,
            "last_evaluated": self.last_evaluated,
            "compiled": self.compiled,
            "algorithm": self.algorithm.state(),
            "generator": self.generator.get_state(),
            "random": random_state(),
            **({} if self.hooks is None else {"hooks": self.hooks.state()}),
        }

    def model(self) -> None:
        """The policy is in the state."""
