"""What is done with the policy of a control run after training: evaluate it, watch it, export it."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from palestra.control.envs.make import Factory, evaluation_vector, factory_of, make_single
from palestra.control.envs.stepping import Stepper
from palestra.control.episodes import stored_dtype
from palestra.control.evaluation import evaluate, has_display, play, tiled, video_path, write_video
from palestra.control.export import export, format_of
from palestra.control.memory.replay import Replay
from palestra.control.nets.heads import ActionHead
from palestra.control.seeding import stream
from palestra.control.transitions import READERS, write_transitions
from palestra.errors import UsageError
from palestra.kinds.control import load
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.run import Run
from palestra.spec.imports import OBJECT
from palestra.spec.kinds.control import ControlSpec, OffPolicySpec
from palestra.spec.load import resolved


def evaluate_run(run: Run, *, episodes: int, which: str, seed: int, env: Any = None) -> dict[str, Any]:
    """Returns of whole episodes with the most likely actions, for each seed of a run that has a checkpoint.

    Intervals are 95 % of the mean: 1.96 standard errors over the episodes of a seed and, over several seeds, over their
    means, which is narrow for few of them.
    """
    spec, factory = _spec_of(run), _factory(run, env)
    seeds = []
    with closing(evaluation_vector(spec.env, min(spec.eval.num_envs, episodes), factory)) as vector:
        stepper = Stepper(vector, spec.env.id)
        for session in run.sessions:
            done = evaluate(load(session, which), stepper, episodes, stream(seed, "eval", 0))
            assert done is not None
            length, returns = float(done.lengths.mean()), done.returns
            seeds.append({"seed": session.seed, **_interval(returns), "length": length, "returns": returns.tolist()})
    means = np.array([row["mean"] for row in seeds])
    whole = _interval(means if len(means) > 1 else np.array(seeds[0]["returns"]))
    about = {"run": str(run.path), "env": spec.env.id, "which": which, "episodes": episodes, "seed": seed}
    return about | whole | {"seeds": seeds}


def _interval(numbers: np.ndarray) -> dict[str, float]:
    std = float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0
    return {"mean": float(numbers.mean()), "std": std, "interval": 1.96 * std / len(numbers) ** 0.5}


def enjoy(
    run: Run, *, episodes: int, out: Path | None, which: str, seed: int, env: Any = None, grid: bool = False
) -> str:
    """Show a run's policy in a window, or as a video without a display or with `out`; the mean return as text.

    With `grid` the episodes are side by side in one video.
    """
    spec, factory = _spec_of(run), _factory(run, env)
    path = video_path(out or run.path / "plots" / "enjoy.gif")
    window = out is None and not grid and has_display()
    mode = "human" if window else "rgb_array"
    if not window:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen even to draw into memory
    made = make_single(spec.env, factory, render_mode=mode)
    try:
        returns, videos = play(load(run, which), made, episodes, seed)
    finally:
        made.close()
    result = f"return {sum(returns) / len(returns):.1f} over {len(returns)} episode{'s' if len(returns) > 1 else ''}"
    if window:
        return result
    frames = tiled(videos) if grid else [frame for video in videos for frame in video]
    write_video(frames, path, made.metadata.get("render_fps", 30))
    return f"{result}: {path}"


def export_run(run: Run, *, out: Path, to: str | None, which: str, env: Any = None) -> str:
    """Write a run's policy as a file that runs without Palestra, or its transitions; a sentence on what is in it."""
    spec = _spec_of(run)
    form = to if to == "transitions" else format_of(out, to)
    if form == "transitions" and out.suffix in READERS:
        raise UsageError(f"{out}: transitions are written as .npz")
    with closing(make_single(spec.env, _factory(run, env))) as made:
        space = made.observation_space
    assert space.dtype is not None
    dtype = stored_dtype(space.dtype)
    if form != "transitions":
        return export(load(run, which), dtype, out, form)
    written = write_transitions(*_memory(run, spec, which, dtype), out)
    return f"{out}: {written} transitions of {spec.env.id}"


def _memory(run: Run, spec: ControlSpec, which: str, dtype: np.dtype) -> tuple[Replay, ActionHead]:
    """The replay memory of a checkpoint with single steps and γ = 1, and the action head of its policy."""
    path = run.checkpoint(which)
    state = load_checkpoint(path).state["algorithm"]
    if not isinstance(spec.algorithm, OffPolicySpec):
        raise UsageError(
            f"{run.path} has no replay memory: {spec.algorithm.name} is not off-policy. Use dqn, sac or td3"
        )
    shape, head = tuple(state["policy"]["obs_shape"]), ActionHead(state["policy"]["actions"])
    made = (spec.algorithm.buffer, spec.env.num_envs, shape, dtype, head.shape, head.dtype)
    memory = Replay(*made, gamma=1.0, frame_stack=spec.env.frame_stack)
    memory.load_state(state["memory"], path.parent.parent / "replay")
    return memory, head


def _spec_of(run: Run) -> ControlSpec:
    spec = resolved(run.spec)
    if not isinstance(spec, ControlSpec):
        raise UsageError(f"{run.path} is of kind {spec.kind}, which has no episodes: use palestra chat")
    return spec


def _factory(run: Run, env: Any) -> Factory | None:
    """Makes the environment that a run was given as an object; None for one that its spec names."""
    name = run.spec["env"]["id"]
    if env is None and name.startswith(OBJECT):
        raise UsageError(
            f"{run.path} was trained in the Python object {name.removeprefix(OBJECT)}: "
            "call palestra.load(run).act from Python"
        )
    return None if env is None else factory_of(env)
