"""Runs the sessions of a trial: one in this process, several in parallel ones; new or resumed; stopped together."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs.folder import Trial, new_trial
from palestra.runs.lease import Lease, kept
from palestra.runs.manifest import compare, manifest
from palestra.runs.recorder import COLUMNS, in_words
from palestra.runs.run import Run
from palestra.runs.session import Session, log, read_status, state_of, stop_signals
from palestra.runs.store import LocalStore
from palestra.spec.base import ExperimentSpec
from palestra.spec.imports import known_objects
from palestra.spec.load import spec_hash, to_yaml
from palestra.spec.model import plain
from palestra.track.progress import Progress
from palestra.work import fanout
from palestra.work.fanout import STOP_SECONDS, Processes, Resources, Stop, WorkItem
from palestra.work.pool import TaskFailed


@dataclass(frozen=True)
class Launch:
    """How a run was asked for, besides its spec."""

    root: Path
    command: Sequence[str]
    resume: Trial | None = None
    allow: Sequence[str] = ()
    show: bool = True
    objects: dict[str, Any] = field(default_factory=dict)
    """What a spec file cannot hold: functions and classes by the names the spec has for them, and `env`."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The spec as plain data, for the sessions: the one in their folders is without secrets."""
    init: str | None = None
    """The folder of the model to start from, once it is found: all seeds start from the same."""


class TrialFailed(PalestraError):
    """Some sessions of a trial failed; the others ran to their end."""


def run_sessions(
    spec: ExperimentSpec,
    launch: Launch,
    session: Callable[[Path, Launch], None],
    *,
    fixed: Sequence[str],
    threads: int,
    total: int,
    unit: str,
) -> Run:
    """Run `session(folder, launch)` for every seed that is not done, with `threads` torch threads each.

    `fixed` are the fields that a checkpoint depends on: no resume can change them. `total` and `unit` are for the
    progress line.
    """
    launch = replace(launch, spec=plain(spec))
    trial = launch.resume or new_trial(
        launch.root, spec.name, seeds=spec.seeds, command=launch.command, spec=plain(spec)
    )
    # The sessions have leases of their own, but only once they have begun.
    with kept(Lease(LocalStore(trial.path))):
        folders = _prepare(spec, launch, trial, fixed, threads)
        if launch.resume is not None:
            trial.amend(seeds=spec.seeds, spec=plain(spec))  # an allowed change may have added seeds
        if len(folders) == 1:
            session(folders[0], launch)
        elif folders:
            progress = Progress(total, unit, enabled=launch.show)
            _run_in_parallel(spec.name, launch, session, trial, folders, threads, progress)
    return Run(trial.path)


def _prepare(spec: ExperimentSpec, launch: Launch, trial: Trial, fixed: Sequence[str], threads: int) -> list[Path]:
    """Make or check every session's folder; the folders of those that have work to do."""
    data, text = plain(spec), to_yaml(spec)
    made = {seed: path for seed in spec.seeds if ((path := trial.session(seed).path) / "manifest.json").exists()}
    # All are checked before any is changed.
    changes = {seed: Session.open(path).check_resume(data, launch.allow, fixed) for seed, path in made.items()}
    dropped = {one.seed for one in trial.sessions()} - set(spec.seeds)
    if dropped:
        raise UsageError(f"{trial.path} has seeds {sorted(dropped)} that the changed spec has not: start a new run")
    todo = []
    for seed in spec.seeds:
        now = manifest(spec_hash=spec_hash(spec), seed=seed, command=launch.command) | {"threads": threads}
        path = trial.session(seed).path
        if seed not in made:
            Session.create(path, spec_yaml=text, spec_data=data, manifest=now)
            todo.append(path)
            continue
        session = Session.open(path)
        for change in compare(session.manifest, now):
            log.warning("resumed numbers may differ in their last bits: %s", change)
        if changes[seed]:
            session.amend(spec_yaml=text, spec_data=data, manifest=now)
        new = [change for change in changes[seed] if change.path != "max_session"]  # more seeds change no other
        if new or state_of(path) != "done":
            todo.append(path)
    return todo


def _run_in_parallel(
    name: str,
    launch: Launch,
    session: Callable[[Path, Launch], None],
    trial: Trial,
    folders: list[Path],
    threads: int,
    progress: Progress,
) -> None:
    quiet, stop = replace(launch, show=False), Stop()
    items = [
        WorkItem(folder.name, _session, (session, folder, quiet), cores=threads, log=folder / "log.txt")
        for folder in folders
    ]
    show = partial(_show, progress, folders)
    running = fanout.run(items, Resources(os.cpu_count() or 1), Processes(name), stop=stop, progress=show)
    with progress, stop_signals(stop), closing(running) as outcomes:
        errors = {outcome.item.name: outcome.error for outcome in outcomes if outcome.error is not None}
    failures = {folder: errors[folder.name] for folder in folders if folder.name in errors}
    if stop.requested:
        raise Interrupted(_stopped(failures) + f" Continue with: palestra train --resume {trial.path}")
    _raise_failures(failures, len(folders))


def _session(session: Callable[[Path, Launch], None], folder: Path, launch: Launch) -> None:
    """In a worker."""
    with known_objects(launch.objects):
        session(folder, launch)


def _stopped(failures: dict[Path, BaseException]) -> str:
    """What became of the sessions that were asked to stop: saved, killed as they took too long, or failed before."""
    lines = []
    for folder, error in failures.items():
        if isinstance(error, TaskFailed) and error.exit_code != Interrupted.exit_code:
            lines.append(f"seed {folder.name} failed: {error.message}")
        elif isinstance(error, CancelledError):
            lines.append(
                f"seed {folder.name} did not save within {STOP_SECONDS:g} s: it goes on from its last checkpoint"
            )
    return "; ".join(lines) + "." if lines else "stopped with everything saved."


def _show(progress: Progress, folders: list[Path], states: Mapping[str, str]) -> None:
    for folder in folders:
        if (status := read_status(folder)) is not None:
            told = status["progress"]
            headline = in_words(told.get("headline", {}))
            progress.update(told.get(COLUMNS[progress.unit], 0), headline, row=f"seed {folder.name}")


def _raise_failures(failures: dict[Path, BaseException], sessions: int) -> None:
    if not failures:
        return
    # The message alone: the worker's traceback is in each session's status.json and log.txt.
    lines = [f"  seed {folder.name}: {getattr(error, 'message', error)}" for folder, error in failures.items()]
    where = next(iter(failures)).parent
    failed = TrialFailed(
        f"{len(failures)} of {sessions} sessions failed:\n"
        + "\n".join(lines)
        + f"\nTheir tracebacks are in {where}/*/log.txt"
    )
    failed.exit_code = max(getattr(error, "exit_code", 1) or 1 for error in failures.values())
    raise failed from next(iter(failures.values()))


def resumed_trial(run: Run) -> Trial:
    """The trial to resume; a session is resumed as part of its trial."""
    if run.path != run.trial.path:
        raise UsageError(f"{run.path} is one session: resume its trial, {run.trial.path}")
    return run.trial
