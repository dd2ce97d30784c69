"""Runs the sessions of a trial: one in this process, several in parallel ones; new or resumed; stopped together."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs.folder import Trial, new_trial
from palestra.runs.lease import Lease
from palestra.runs.manifest import compare, manifest
from palestra.runs.run import Run
from palestra.runs.session import Session, log
from palestra.runs.status import read_status, state_of
from palestra.runs.stop import stop_signals
from palestra.runs.store import LocalStore
from palestra.spec.base import ExperimentSpec
from palestra.spec.difference import spec_hash
from palestra.spec.load import to_yaml
from palestra.spec.plain import plain
from palestra.track.progress import Progress
from palestra.work.pool import Pool, Task

STOP_SECONDS = 60.0  # for sessions to save after they were asked to stop
LOOK_SECONDS = 0.25  # between two looks at the sessions


@dataclass(frozen=True)
class Launch:
    """How a run was asked for, besides its spec."""

    root: Path
    command: Sequence[str]
    resume: Trial | None = None
    allow: Sequence[str] = ()
    show: bool = True
    objects: dict[str, Any] = field(default_factory=dict)
    """What a spec file cannot hold: an environment given as a Python object."""


class TrialFailed(PalestraError):
    """Some sessions of a trial failed; the others ran to their end."""


def run_sessions(
    spec: ExperimentSpec,
    launch: Launch,
    session: Callable[[Path, Launch], None],
    *,
    threads: int,
    total: int,
    unit: str,
) -> Run:
    """Run `session(folder, launch)` for every seed that is not done, with `threads` torch threads each.

    `total` and `unit` are for the progress line.
    """
    parallel = min(spec.max_session, max(1, (os.cpu_count() or 1) // threads))
    trial = launch.resume or new_trial(
        launch.root, spec.name, seeds=spec.seeds, command=launch.command, spec=plain(spec)
    )
    folders = _prepare(spec, launch, trial, threads)
    if launch.resume is not None:
        trial.amend(seeds=spec.seeds, spec=plain(spec))  # an allowed change may have added seeds
    if len(folders) == 1:
        session(folders[0], launch)
    elif folders:
        _run_in_parallel(spec, launch, session, trial, folders, parallel, threads, total, unit)
    return Run(trial.path)


def _prepare(spec: ExperimentSpec, launch: Launch, trial: Trial, threads: int) -> list[Path]:
    """Make or check every session's folder; the folders of those that have work to do."""
    data, text = plain(spec), to_yaml(spec)
    todo = []
    for seed in spec.seeds:
        now = manifest(spec_hash=spec_hash(spec), seed=seed, command=launch.command) | {"threads": threads}
        path = trial.session(seed).path
        if not (path / "manifest.json").exists():
            Session.create(path, spec_yaml=text, spec_data=data, manifest=now)
            todo.append(path)
            continue
        made = Session.open(path)
        changed = made.check_resume(data, launch.allow)
        for change in compare(made.manifest, now):
            log.warning("resumed numbers may differ in their last bits: %s", change)
        if changed:
            made.amend(spec_yaml=text, spec_data=data, manifest=now)
        if changed or state_of(path) != "done":
            todo.append(path)
    return todo


def _run_in_parallel(
    spec: ExperimentSpec,
    launch: Launch,
    session: Callable[[Path, Launch], None],
    trial: Trial,
    folders: list[Path],
    parallel: int,
    threads: int,
    total: int,
    unit: str,
) -> None:
    lease = Lease(LocalStore(trial.path))
    lease.acquire()  # the sessions have leases too, but only once they have begun
    quiet = Launch(launch.root, launch.command, show=False, objects=launch.objects)
    stop: list[bool] = []
    try:
        with (
            Progress(total, unit, enabled=launch.show) as progress,
            Pool(parallel, threads=threads, name=spec.name) as pool,
            stop_signals(lambda: stop.append(True)),
        ):
            tasks = {folder: pool.submit(session, folder, quiet, log=folder / "log.txt") for folder in folders}
            while not all(task.done() for task in tasks.values()) and not stop:
                time.sleep(LOOK_SECONDS)
                lease.renew()
                for folder in folders:
                    _show(progress, folder, unit)
            if stop:
                pool.stop(STOP_SECONDS)
            for folder in folders:
                _show(progress, folder, unit)
    finally:
        lease.release()
    if stop:
        raise Interrupted(f"stopped with everything saved; continue with: palestra train --resume {trial.path}")
    _raise_failures(tasks)


def _show(progress: Progress, folder: Path, unit: str) -> None:
    status = read_status(folder)
    if status is None:
        return
    told = status["progress"]
    headline = " ".join(f"{name} {value:.1f}" for name, value in told.get("headline", {}).items())
    progress.update(told.get(unit.removesuffix("s"), 0), headline, row=f"seed {folder.name}")


def _raise_failures(tasks: dict[Path, Task]) -> None:
    failures = {folder: error for folder, task in tasks.items() if (error := task.exception()) is not None}
    if not failures:
        return
    # The message alone: the worker's traceback is in each session's status.json and log.txt.
    lines = [f"  seed {folder.name}: {getattr(error, 'message', error)}" for folder, error in failures.items()]
    where = next(iter(failures)).parent
    failed = TrialFailed(
        f"{len(failures)} of {len(tasks)} sessions failed:\n"
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
