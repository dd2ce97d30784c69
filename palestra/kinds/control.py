"""The kind `control`: deep RL in Gymnasium environments."""

import logging
import os
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch

from palestra.control.actions import ActionHead
from palestra.control.envs.make import factory_of, make_single, make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import random_episodes
from palestra.control.policy import Policy
from palestra.control.seeding import stream
from palestra.control.trainer import train
from palestra.control.trial_metrics import consistency, session_metrics, trial_metrics
from palestra.control.watch import has_display, play, write_video
from palestra.errors import UsageError
from palestra.kinds.trial import Launch, run_sessions
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.plot import trial_plots
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.load import load as load_spec
from palestra.track.hooks import load_hooks

log = logging.getLogger("palestra.control")

RANDOM_EPISODES = 100


def run(spec: ControlSpec, launch: Launch) -> Run:
    """Train every seed of the spec, then summarise and plot the trial."""
    factory = _factory(spec, launch)
    # A spec that cannot run ends here, before there is a folder for it.
    probe = make_single(spec.env, factory)
    ActionHead.of(probe.action_space)
    probe.close()
    load_hooks(spec.hooks)
    # One thread by default: networks this small gain nothing from a second, and lose a lot where its core is busy.
    trial = run_sessions(
        spec, launch, run_session, threads=spec.threads or 1, total=spec.steps * spec.frames_per_step, unit="frames"
    )
    trial.trial.write_summary(summarise(trial, spec, launch))
    trial_plots(trial)
    return trial


def run_session(folder: Path, launch: Launch) -> None:
    """Train the one seed whose session folder this is."""
    session = Session.open(folder)
    spec = load_spec(folder / "spec.yaml").spec
    assert isinstance(spec, ControlSpec)
    threads = torch.get_num_threads()
    torch.set_num_threads(session.manifest["threads"])
    try:
        with session:
            train(spec, session, factory=_factory(spec, launch), show=launch.show)
    finally:
        torch.set_num_threads(threads)


def load(run: Run, which: str = "best") -> Policy:
    """The policy of a checkpoint of a run, ready to act."""
    spec = load_spec(run.spec).spec
    assert isinstance(spec, ControlSpec)
    return Policy.restored(load_checkpoint(run.checkpoint(which)).state["algorithm"]["policy"], spec.net)


def enjoy(run: Run, *, episodes: int, out: Path | None, which: str, seed: int, env: Any = None) -> str:
    """Show a run's policy in a window, or as a video where there is none or `out` is given; says what was seen."""
    spec = load_spec(run.spec).spec
    assert isinstance(spec, ControlSpec)
    if env is None and spec.env.id.startswith("object:"):
        raise UsageError(
            f"{run.path} was trained in the object {spec.env.id[7:]}: call palestra.load(run).act from Python"
        )
    window = out is None and has_display()
    mode = "human" if window else "rgb_array"
    if not window:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame looks for a screen even to draw into memory
    made = make_single(spec.env, None if env is None else factory_of(env), render_mode=mode)
    try:
        returns, frames = play(load(run, which), made, episodes, seed)
    finally:
        made.close()
    seen = f"return {sum(returns) / len(returns):.1f} over {len(returns)} episode{'s' if len(returns) > 1 else ''}"
    if window:
        return seen
    path = out or run.path / "plots" / "enjoy.gif"
    write_video(frames, path, made.metadata.get("render_fps", 30))
    return f"{seen}: {path}"


def summarise(trial: Run, spec: ControlSpec, launch: Launch) -> dict[str, Any]:
    """SLM-Lab's trial metrics, and the last evaluation of each session."""
    stepper = Stepper(make_vector(spec.env, min(RANDOM_EPISODES, 20), _factory(spec, launch)), spec.env.id)
    baseline = float(random_episodes(stepper, RANDOM_EPISODES, stream(spec.seed, "random")).returns.mean())
    rows = {seed: [row for row in trial.metrics(seed) if "return" in row] for seed in trial.seeds}
    rows = {seed: logged for seed, logged in rows.items() if logged}
    evaluated = {seed: [row["eval/return"] for row in logged if "eval/return" in row] for seed, logged in rows.items()}
    last = {seed: values[-1] for seed, values in evaluated.items() if values}
    summary: dict[str, Any] = {"random_return": baseline, "eval/return_by_seed": last}
    if last:
        summary |= {"eval/return": fmean(last.values()), "eval/return_std": pstdev(last.values())}
    if not rows:
        return summary
    updates = f"{spec.algorithm.name}/updates"
    sessions = []
    for logged in rows.values():
        done, optimizer_steps = 0, []
        for row in logged:
            done += row[updates]
            optimizer_steps.append(done)
        sessions.append(
            session_metrics([r["return"] for r in logged], [r["frame"] for r in logged], optimizer_steps, baseline)
        )
    returns = [[row["return"] for row in logged] for logged in rows.values()]
    return summary | trial_metrics(sessions) | {"consistency": consistency(returns, baseline)}


def _factory(spec: ControlSpec, launch: Launch) -> Any:
    given = launch.objects.get("env")
    return None if given is None else factory_of(given)
