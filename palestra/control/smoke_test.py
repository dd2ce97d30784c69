"""`palestra dev`: a tiny run that checks gradients, updates and losses of every part."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from palestra.control.envs.make import Factory, evaluation_vector, make_single
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.control.nets.actor_critic import Flat
from palestra.control.optim import Shaped
from palestra.control.seeding import stream
from palestra.control.trainer import ControlTrainer
from palestra.control.video import has_display, play, write_video
from palestra.errors import PalestraError, UsageError
from palestra.spec.base import ExperimentSpec
from palestra.spec.kinds.control import ControlSpec, OffPolicySpec

STEPS = 3
HORIZON = 64  # vector steps in a step, at most
EPISODES = 2
LARGEST_NORM = 1e5  # of a gradient, as in SLM-Lab's own check


class Insane(PalestraError):
    """A check of `palestra dev` failed."""


@dataclass
class SmokeReport:
    """What was checked, a line each, and what was wrong."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def note(self, good: bool, what: str) -> None:
        """Add a line to those that passed or failed."""
        (self.passed if good else self.failed).append(what)


@dataclass
class _Part:
    """The parameters of one part of the learner (a trunk, a head, the critics' weights): as they began, and where."""

    now: Callable[[], list[Tensor]]
    before: list[Tensor]

    @classmethod
    def of(cls, now: Callable[[], list[Tensor]]) -> "_Part":
        return cls(now, [tensor.detach().clone() for tensor in now()])

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self.before)

    def moved(self) -> float:
        """How far its parameters are from where they began."""
        pairs = zip(self.now(), self.before, strict=True)
        return math.sqrt(sum(float((now.detach() - then).double().square().sum()) for now, then in pairs))


def tiny(spec: ControlSpec) -> ControlSpec:
    """The spec cut down to three steps, with learning from the first, uncompiled, on the same networks."""
    algorithm: Any = spec.algorithm
    if isinstance(algorithm, OffPolicySpec):
        every = algorithm.update_every
        horizon = every * max(1, min(algorithm.horizon, HORIZON) // every)
        # Enough gradient steps that delayed ones come too, and never more memory than three steps fill.
        frames = STEPS * horizon * spec.env.num_envs
        start = min(algorithm.start, spec.env.num_envs * (algorithm.n_step + 1))
        buffer = max(start, min(algorithm.buffer, 2 * frames), spec.env.num_envs * (algorithm.n_step + 1))
        cut: dict[str, Any] = {"horizon": horizon, "start": start, "buffer": buffer}
        if getattr(algorithm, "target_every", None) is not None:
            cut["target_every"] = min(algorithm.target_every, STEPS)
        algorithm = algorithm.model_copy(update=cut)
    frames = STEPS * algorithm.horizon * spec.env.num_envs
    train = spec.train.model_copy(update={"frames": frames, "compile": "off"})
    evaluation = spec.eval.model_copy(update={"episodes": EPISODES, "num_envs": EPISODES})
    return spec.model_copy(update={"algorithm": algorithm, "train": train, "eval": evaluation, "max_session": 1})


def try_out(spec: ExperimentSpec, tell: Callable[[str], None], video: Path | None = None) -> None:
    """Check a spec and say what was checked; with `video`, show an episode too, written there without a display."""
    if not isinstance(spec, ControlSpec):
        raise UsageError(f"palestra dev tries out specs of kind control, and this one is of kind {spec.kind}")
    learner = check_learning(spec, tell=tell)
    if video is None:
        return
    window = has_display()
    if not window:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen even to draw into memory
    env = make_single(spec.env, None, render_mode="human" if window else "rgb_array")
    with closing(env):
        returns, frames = play(learner.policy, env, 1, spec.seed)
        tell(f"shown   an episode of return {returns[0]:.4g}" + ("" if window else f": {video}"))
        if not window:
            write_video(frames, video, env.metadata.get("render_fps", 30))


def check_learning(
    spec: ControlSpec, factory: Factory | None = None, *, tell: Callable[[str], None] = print
) -> ControlTrainer:
    """Train a tiny version of the spec and check it; returns the learner, raises `Insane` with what was wrong."""
    small = tiny(spec)
    learner = ControlTrainer(small, small.seed, factory, compile=False)
    with closing(learner.env):
        learner.begin(None)
        report = inspect(learner, small)
        env = evaluation_vector(small.env, EPISODES, factory)
        with closing(env):
            done = evaluate(learner.policy, Stepper(env, small.env.id), EPISODES, stream(small.seed, "eval", 0))
        assert done is not None
        returned = done.metrics()["eval/return"]
        report.note(math.isfinite(returned), f"evaluation: {EPISODES} episodes, return {returned:.4g}")
    for line in report.passed:
        tell(f"ok      {line}")
    for line in report.failed:
        tell(f"failed  {line}")
    if report.failed:
        raise Insane(
            f"{len(report.failed)} of {len(report.failed) + len(report.passed)} checks failed:\n"
            + "\n".join(report.failed)
        )
    return learner


def inspect(learner: ControlTrainer, spec: ControlSpec) -> SmokeReport:
    """Improve the policy a few times and look at every part of the learner."""
    report, rows = SmokeReport(), []
    parts = {name: _Part.of(now) for name, now in parts_of(learner)}
    with taken_gradients() as norms:
        for _ in range(STEPS):
            rows.append(
                learner.improve(learner.episodes.frame / spec.train.frames)
            )  # raises where a loss is not finite
    updates = learner.algorithm.updates
    losses = sorted({name for row in rows for name in row if name.endswith("loss")})
    report.note(updates > 0, f"{updates} gradient steps in {STEPS} steps of {spec.frames_per_step} frames")
    report.note(bool(losses), f"losses are finite: {', '.join(losses) or 'none was reported'}")
    largest = max(norms, default=0.0)
    good = all(map(math.isfinite, norms)) and 0 < largest < LARGEST_NORM
    expected = "" if good else f", expected between 0 and {LARGEST_NORM:g}"
    report.note(good, f"{len(norms)} gradients, the norm of the largest is {largest:.3g}{expected}")
    for name, part in parts.items():
        moved = part.moved()
        how = f"moved by {moved:.3g}" if 0 < moved < math.inf else "did not change" if moved == 0 else "is not finite"
        report.note(0 < moved < math.inf, f"{name} ({part.size:,} parameters): {how}")
    return report


@contextmanager
def taken_gradients() -> Iterator[list[float]]:
    """The norms of all gradients that are taken in the block: every algorithm takes them by `torch.autograd.grad`."""
    norms: list[float] = []
    original = torch.autograd.grad

    def watched(*args: Any, **kwargs: Any) -> Any:
        gradients = original(*args, **kwargs)
        norms.append(math.sqrt(sum(float(one.double().square().sum()) for one in gradients if one is not None)))
        return gradients

    torch.autograd.grad = watched
    try:
        yield norms
    finally:
        torch.autograd.grad = original


def parts_of(learner: ControlTrainer) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """What the algorithm learns, by network and first module in it: names and what gives the parameters as they are.

    A network is trained in place (the one that acts), or is the shape of vectors that are (`vectors.Shaped`).
    """
    algorithm = vars(learner.algorithm)
    shapes = [value for value in algorithm.values() if isinstance(value, Shaped)]
    yield from _grouped("policy", [(name, lambda p=p: p) for name, p in learner.policy.net.named_parameters()])
    for name, value in algorithm.items():
        value = value.net if isinstance(value, Flat) else value
        if isinstance(value, nn.Module) and value is not learner.policy.net:
            yield from _grouped(name, [(inner, lambda p=p: p) for inner, p in value.named_parameters()])
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            record: Any = value
            for field_name, held in record._asdict().items():
                vector = getattr(held, "vector", held)
                size = vector.numel() if isinstance(vector, Tensor) else None
                fitting = [shape for shape in shapes if size == sum(shape.sizes)]
                if fitting:
                    yield from _grouped(field_name, _views(fitting[0], vector))


def _views(shape: Shaped, vector: Tensor) -> list[tuple[str, Callable[[], Tensor]]]:
    parts = zip(shape.names, vector.split(shape.sizes), strict=True)
    return [(name, lambda part=part: part) for name, part in parts]


def _grouped(
    network: str, parameters: list[tuple[str, Callable[[], Tensor]]]
) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    groups: dict[str, list[Callable[[], Tensor]]] = {}
    for name, now in parameters:
        groups.setdefault(f"{network}.{name.partition('.')[0]}", []).append(now)
    for name, members in groups.items():
        yield name, lambda members=members: [now() for now in members]
