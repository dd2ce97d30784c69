"""`palestra dev`: a tiny run that checks gradients, updates and losses of every part."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from palestra.control.envs.make import Factory, evaluation_vector, make_single
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate, has_display, play, write_video
from palestra.control.optim import Adam, FlatNet, FunctionalNet, Trained
from palestra.control.seeding import stream
from palestra.control.trainer import ControlTrainer
from palestra.errors import PalestraError, UsageError
from palestra.spec.base import ExperimentSpec
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.off_policy import OffPolicySpec

STEPS = 3
HORIZON = 64  # vector steps in a step, at most
EPISODES = 2
LARGEST_NORM = 1e5  # of a gradient, as in SLM-Lab's own check


class SmokeTestFailed(PalestraError):
    """A check of `palestra dev` failed."""


def tiny(spec: ControlSpec) -> ControlSpec:
    """The spec reduced to three steps, with learning from the first, uncompiled, on the same networks."""
    algorithm: Any = spec.algorithm
    if isinstance(algorithm, OffPolicySpec):
        every = algorithm.update_every
        horizon = every * max(1, min(algorithm.horizon, HORIZON) // every)
        # Enough gradient steps for delayed ones, and no more memory than three steps fill.
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
    """Check a spec and report each check; with `video` also show an episode, written there without a display."""
    if not isinstance(spec, ControlSpec):
        raise UsageError(f"palestra dev checks specs of kind control; this one is of kind {spec.kind}")
    learner = check_learning(spec, tell=tell)
    if video is None:
        return
    window = has_display()
    if not window:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen even to draw into memory
    env = make_single(spec.env, None, render_mode="human" if window else "rgb_array")
    with closing(env):
        returns, videos = play(learner.policy, env, 1, spec.seed)
        tell(f"shown   an episode of return {returns[0]:.4g}" + ("" if window else f": {video}"))
        if not window:
            write_video(videos[0], video, env.metadata.get("render_fps", 30))


def check_learning(
    spec: ControlSpec, factory: Factory | None = None, *, tell: Callable[[str], None] = print
) -> ControlTrainer:
    """Train a tiny version of the spec and check it; returns the learner or raises `SmokeTestFailed`."""
    small = tiny(spec)
    learner = ControlTrainer(small, small.seed, factory, compile=False)
    with closing(learner.env):
        learner.begin(None)
        checks = inspect(learner, small)
        env = evaluation_vector(small.env, EPISODES, factory)
        with closing(env):
            done = evaluate(learner.policy, Stepper(env, small.env.id), EPISODES, stream(small.seed, "eval", 0))
        assert done is not None
        returned = done.metrics()["eval/return"]
        checks.append((math.isfinite(returned), f"evaluation: {EPISODES} episodes, return {returned:.4g}"))
    for good, line in sorted(checks, key=lambda check: not check[0]):
        tell(f"{'ok' if good else 'failed':6}  {line}")
    failed = [line for good, line in checks if not good]
    if failed:
        raise SmokeTestFailed(f"{len(failed)} of {len(checks)} checks failed:\n" + "\n".join(failed))
    return learner


def inspect(learner: ControlTrainer, spec: ControlSpec) -> list[tuple[bool, str]]:
    """Improve the policy a few times and check every part of the learner: whether each check passed, and a line."""
    parts = parts_of(learner)
    before = {name: [tensor.clone() for tensor in tensors] for name, tensors in parts.items()}
    with recorded_gradient_norms() as norms:
        # Raises where a loss is not finite.
        rows = [learner.improve(learner.episodes.frame / spec.train.frames) for _ in range(STEPS)]
    updates = learner.algorithm.updates
    losses = sorted({name for row in rows for name in row if name.endswith("loss")})
    largest = max(norms, default=0.0)
    good = all(map(math.isfinite, norms)) and 0 < largest < LARGEST_NORM
    expected = "" if good else f", expected between 0 and {LARGEST_NORM:g}"
    checks = [
        (updates > 0, f"{updates} gradient steps in {STEPS} steps of {spec.frames_per_step} frames"),
        (bool(losses), f"losses are finite: {', '.join(losses) or 'none was reported'}"),
        (good, f"{len(norms)} gradients, the norm of the largest is {largest:.3g}{expected}"),
    ]
    for name, tensors in parts.items():
        squares = [(now - then).double().square().sum() for now, then in zip(tensors, before[name], strict=True)]
        moved, size = math.sqrt(sum(map(float, squares))), sum(tensor.numel() for tensor in tensors)
        how = f"moved by {moved:.3g}" if 0 < moved < math.inf else "did not change" if moved == 0 else "is not finite"
        checks.append((0 < moved < math.inf, f"{name} ({size:,} parameters): {how}"))
    return checks


@contextmanager
def recorded_gradient_norms() -> Iterator[list[float]]:
    """The norms of all gradients computed in the block: every algorithm computes them by `torch.autograd.grad`."""
    norms: list[float] = []
    original = torch.autograd.grad

    def watched(*args: Any, **kwargs: Any) -> Any:
        gradients = original(*args, **kwargs)
        norms.append(math.sqrt(sum(float(part.double().square().sum()) for part in gradients if part is not None)))
        return gradients

    torch.autograd.grad = watched
    try:
        yield norms
    finally:
        torch.autograd.grad = original


def parts_of(learner: ControlTrainer) -> dict[str, list[Tensor]]:
    """The learned parameters by network and first module in it, in the memory that updates change.

    A network is trained in place, or has its parameters in a vector of one of the algorithm's named tuples
    (`optim.FunctionalNet`).
    """
    algorithm = vars(learner.algorithm)
    functional = [value for value in algorithm.values() if isinstance(value, FunctionalNet)]
    named = [("policy", name, p) for name, p in learner.policy.net.named_parameters()]
    for network, value in algorithm.items():
        module = value.net if isinstance(value, FlatNet) else value
        if isinstance(module, nn.Module) and module is not learner.policy.net:
            named += [(network, name, p) for name, p in module.named_parameters()]
        elif isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, Adam | Trained):
            record: Any = value
            for field_name, part in record._asdict().items():
                vector = getattr(part, "vector", part)
                size = vector.numel() if isinstance(vector, Tensor) else None
                net = next((net for net in functional if size == sum(net.sizes)), None)
                if net is not None and vector is not getattr(net, "vector", None):  # else the policy's own
                    named += zip(repeat(field_name), net.names, vector.split(net.sizes), strict=False)
    parts: dict[str, list[Tensor]] = {}
    for network, name, parameter in named:
        parts.setdefault(f"{network}.{name.partition('.')[0]}", []).append(parameter.detach())
    return parts
