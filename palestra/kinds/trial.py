"""Runs the sessions of a trial: one in this process, several in parallel ones; new or resumed; stopped together."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.cluster.where import open_backend
from palestra.data.remote import open_filesystem
from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs.lease import Lease, kept
from palestra.runs.manifest import compare, manifest
from palestra.runs.plot import trial_plots
from palestra.runs.recorder import COLUMNS, in_words, load_hooks
from palestra.runs.run import Run, new_trial
from palestra.runs.session import Session, log, read_status, state_of, stop_signals
from palestra.runs.store import LocalStore, clear_write_errors, write_json
from palestra.runs.sync import Sync
from palestra.spec.base import ExperimentSpec
from palestra.spec.imports import known_objects
from palestra.spec.load import resolved, spec_hash, to_yaml
from palestra.spec.model import plain
from palestra.track.progress import Progress
from palestra.track.sinks import require_sinks
from palestra.work import fanout
from palestra.work.fanout import STOP_SECONDS, Stop, WorkItem
from palestra.work.pool import TaskFailed
from palestra.work.redact import redacted

if TYPE_CHECKING:
    import torch  # loaded where it is used: the commands do without it


@dataclass(frozen=True)
class Launch:
    """How a run was started, apart from its spec."""

    root: Path
    command: Sequence[str]
    resume: Run | None = None
    allow: Sequence[str] = ()
    show: bool = True
    objects: dict[str, Any] = field(default_factory=dict)
    """What a spec file cannot hold: functions and classes by the names the spec has for them, and `env`."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The spec as plain data, for the sessions: the one in their folders is without secrets."""
    init: str | None = None
    """The folder of the initial model, once it is found: all seeds start from the same."""
    restarts: int = 0
    """How often a seed that fails continues from its last checkpoint."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each given value of the spec came from, by its dotted path."""
    on: str | None = None
    """Where the seeds run: "ray", or the address of a Ray cluster; None: on this machine."""
    id: str | None = None
    """The id of a new run; None: one of its own."""
    sync: str | None = None
    """The URL of a place that the run's folder is copied to while it trains."""


SessionRunner = Callable[[Path, Launch], None]
"""Trains the seed whose session folder this is."""


class TrialFailed(PalestraError):
    """Some sessions of a trial failed; the others ran to their end."""


def check_spec(spec: ExperimentSpec) -> None:
    """Refuse a device that is not there, hooks that cannot be loaded and sinks that are not installed."""
    device_of(spec)
    load_hooks(spec.hooks)
    require_sinks(spec.track.sinks)


def device_of(spec: ExperimentSpec) -> "torch.device":
    """The GPU where there is one, unless the spec says otherwise."""
    import torch

    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda, but torch sees no GPU here: use `device: cpu`, or a torch built for your GPU")
    cuda = torch.cuda.is_available() and spec.device != "cpu"
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu")


def threads_each(spec: ExperimentSpec, ranks: int = 1) -> int:
    """Torch threads of one process: this machine's cores are shared by the ranks on it, or by the seeds.

    On a GPU a seed takes all of them, so that the seeds are trained one after the other: they would share its memory.
    """
    seeds = 1 if device_of(spec).type == "cuda" else spec.max_session
    return spec.threads or max(1, (os.cpu_count() or 1) // (ranks * seeds))


def in_session(train: Callable[[Session, Any, Launch], None], folder: Path, launch: Launch) -> None:
    """Call `train(session, spec, launch)` for one seed, with the torch threads of its manifest."""
    import torch

    session, threads = Session.open(folder), torch.get_num_threads()
    torch.set_num_threads(session.manifest["threads"])
    try:
        train(session, resolved(launch.spec), launch)
    finally:
        torch.set_num_threads(threads)


def run_sessions(
    spec: ExperimentSpec,
    launch: Launch,
    session: SessionRunner,
    *,
    fixed: Sequence[str],
    threads: int,
    total: int,
    unit: str,
    summary: Callable[[Run], Mapping[str, Any]],
    plots: bool = True,
) -> Run:
    """Run `session(folder, launch)` for every seed that is not done, then write the trial's summary and plots.

    `fixed` are the fields that checkpoints depend on: no resume can change them. Each session has `threads` torch
    threads. `total` and `unit` are for the progress line.
    """
    data = plain(spec)
    launch = replace(launch, spec=data)
    about = {"seeds": spec.seeds, "command": launch.command, "spec": data, "id": launch.id}
    trial = launch.resume or new_trial(launch.root, spec.name, **about)
    with _synced(trial, launch.sync):
        return _run_trial(spec, launch, trial, session, fixed, threads, total, unit, summary, plots)


def _synced(trial: Run, url: str | None) -> AbstractContextManager[object]:
    return nullcontext() if url is None else Sync(trial, url, partial(open_filesystem, url))


def _run_trial(
    spec: ExperimentSpec,
    launch: Launch,
    trial: Run,
    session: SessionRunner,
    fixed: Sequence[str],
    threads: int,
    total: int,
    unit: str,
    summary: Callable[[Run], Mapping[str, Any]],
    plots: bool,
) -> Run:
    data = launch.spec
    # The sessions have leases of their own, but only once they have started.
    with kept(Lease(LocalStore(trial.path))):
        folders = _prepare(spec, launch, trial, fixed, threads)
        origins = {"origins": dict(launch.origins)} if launch.origins else {}
        info = redacted(trial.info | {"seeds": spec.seeds, "spec": data} | origins)
        if info != trial.info:  # an allowed change of the spec, which may have added seeds
            with clear_write_errors(trial.path):
                write_json(trial.path / "trial.json", info)
        if len(folders) == 1 and launch.on is None and not launch.restarts:
            session(folders[0], launch)
        elif folders:
            progress = Progress(total, unit, enabled=launch.show)
            _run_in_parallel(spec, launch, session, trial, folders, threads, progress)
    numbers = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in summary(trial).items()}
    with clear_write_errors(trial.path):
        write_json(trial.path / "summary.json", numbers)
        if plots:
            trial_plots(trial)
    return trial


def _prepare(spec: ExperimentSpec, launch: Launch, trial: Run, fixed: Sequence[str], threads: int) -> list[Path]:
    """Make or check every session's folder; the folders of those that have work to do."""
    data, text = plain(spec), to_yaml(spec)
    made = {seed: path for seed in spec.seeds if ((path := trial.session(seed)) / "manifest.json").exists()}
    # All are checked before any is changed.
    changes = {seed: Session.open(path).check_resume(data, launch.allow, fixed) for seed, path in made.items()}
    dropped = {session.seed for session in trial.sessions} - set(spec.seeds)
    if dropped:
        raise UsageError(f"{trial.path} has seeds {sorted(dropped)} that the changed spec lacks: start a new run")
    todo = []
    for seed in spec.seeds:
        now = manifest(spec_hash=spec_hash(spec), seed=seed, command=launch.command, device=spec.device)
        now["threads"] = threads
        path = trial.session(seed)
        if seed not in made:
            Session.create(path, spec_yaml=text, spec_data=data, manifest=now)
            todo.append(path)
            continue
        session = Session.open(path)
        for change in compare(session.manifest, now):
            log.warning("resumed numbers may differ in their last bits: %s", change)
        if changes[seed]:
            session.amend(spec_yaml=text, spec_data=data, manifest=now)
        # More seeds change no other.
        if state_of(path) != "done" or any(change.path != "max_session" for change in changes[seed]):
            todo.append(path)
    return todo


def _run_in_parallel(
    spec: ExperimentSpec,
    launch: Launch,
    session: SessionRunner,
    trial: Run,
    folders: list[Path],
    threads: int,
    progress: Progress,
) -> None:
    quiet, stop = replace(launch, show=False, on=None), Stop()
    backend, available = open_backend(launch.on, spec.name, spec=None if launch.objects else launch.spec)
    gpu = 1.0 if launch.on is not None and device_of(spec).type == "cuda" else 0.0
    items = [
        WorkItem(
            folder.name,
            _in_worker,
            (session, folder, quiet),
            cores=threads,
            gpu=gpu,
            retries=launch.restarts,
            log=folder / "log.txt",
        )
        for folder in folders
    ]
    show = partial(_show, progress, folders)
    running = fanout.run(items, available, backend, stop=stop, progress=show)
    with progress, stop_signals(stop), closing(running) as outcomes:
        errors = {outcome.item.name: outcome.error for outcome in outcomes if outcome.error is not None}
    failures = {folder: errors[folder.name] for folder in folders if folder.name in errors}
    if stop.requested:
        raise Interrupted(_stopped(failures) + f" Continue with: palestra train --resume {trial.path}")
    if failures:
        # The message alone: the worker's traceback is in each session's status.json and log.txt.
        lines = [f"  seed {folder.name}: {getattr(error, 'message', error)}" for folder, error in failures.items()]
        failed = TrialFailed(
            f"{len(failures)} of {len(folders)} sessions failed:\n"
            + "\n".join(lines)
            + f"\nTheir tracebacks are in {folders[0].parent}/*/log.txt"
        )
        failed.exit_code = max(getattr(error, "exit_code", 1) or 1 for error in failures.values())
        raise failed from next(iter(failures.values()))


def _in_worker(session: SessionRunner, folder: Path, launch: Launch) -> None:
    with known_objects(launch.objects):
        session(folder, launch)


def _stopped(failures: dict[Path, BaseException]) -> str:
    """The outcome of a requested stop: all saved, or which seeds failed before it or did not save in time."""
    lines = []
    for folder, error in failures.items():
        if isinstance(error, TaskFailed) and error.exit_code != Interrupted.exit_code:
            lines.append(f"seed {folder.name} failed: {error.message}")
        elif isinstance(error, CancelledError):
            lines.append(
                f"seed {folder.name} did not save within {STOP_SECONDS:g} s: it resumes from its last checkpoint"
            )
    return "; ".join(lines) + "." if lines else "stopped with everything saved."


def _show(progress: Progress, folders: list[Path], states: Mapping[str, str]) -> None:
    for folder in folders:
        if (status := read_status(folder)) is not None:
            row = status["progress"]
            headline = in_words(row.get("headline", {}))
            progress.update(row.get(COLUMNS[progress.unit], 0), headline, row=f"seed {folder.name}")


def resumed_trial(run: Run) -> Run:
    """The trial to resume; a session is resumed as part of its trial."""
    if run.path != run.trial.path:
        raise UsageError(f"{run.path} is one session: resume its trial, {run.trial.path}")
    return run
