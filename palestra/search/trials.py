"""One trial of a search: its folder, its worker, its pause at a rung, and its outcome."""

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.errors import Interrupted, PalestraError
from palestra.kinds.trial import Launch
from palestra.runs.recorder import COLUMNS, HookContext
from palestra.runs.run import Run
from palestra.runs.run import make_trial as make_run
from palestra.runs.session import read_status
from palestra.runs.store import read_json
from palestra.spec.base import ExperimentSpec
from palestra.spec.grid import with_values
from palestra.spec.kinds import runner
from palestra.spec.load import resolved
from palestra.spec.model import plain
from palestra.work.fanout import Resources

RUNG = "rung.json"
"""How far a trial runs before it pauses; a trial without this file runs to its end."""
HOOK = "palestra.search.trials:pause_at_rung"


def pause_at_rung(moment: HookContext) -> None:
    """Stop the session, as SIGTERM does, at the first row with the metric at or after its rung."""
    path = moment.folder.parent.parent / RUNG
    if not path.exists():
        return
    rung: dict[str, Any] = read_json(path)
    seen = moment.step if rung["by"] == "steps" else moment.seen
    if rung["metric"] in moment.metrics and seen >= rung["level"]:
        signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Rung:
    """How far a trial runs: to its first row with the metric at `level` of `by`, or to its end before that."""

    metric: str
    by: str
    level: int | None
    """None: to the end."""


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended: "complete", "paused" at its rung, "failed" for a reason, or "stopped" before its rung."""

    state: str
    score: float | None = None
    reason: str = ""


def trial_spec(data: Mapping[str, Any], values: Mapping[str, Any], threads: int, *, pauses: bool) -> ExperimentSpec:
    """The spec of a trial: the search's data with the values of the trial, and the hook that pauses it at rungs."""
    changed = with_values(data, values) | {"threads": threads}
    if pauses:
        changed["hooks"] = [*changed.get("hooks", []), HOOK]
    return resolved(changed)


def make_trial(path: Path, spec: ExperimentSpec, command: Sequence[str], *, name: str, id: str) -> Run:
    """A trial's folder with its trial.json, as any other run has; an existing one is kept."""
    return make_run(path, name=name, id=id, seeds=spec.seeds, command=command, spec=plain(spec))


def run_trial(path: Path, root: Path, command: Sequence[str], gpu_share: float | None) -> None:
    """In a worker: continue the trial until it pauses, ends or fails."""
    if gpu_share is not None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(gpu_share)
    trial = Run(path)
    spec = resolved(trial.info["spec"])
    try:
        runner(spec.kind)(spec, Launch(root, command, trial, show=False))
    except PalestraError as error:
        if error.exit_code != Interrupted.exit_code:
            raise


def trial_outcome(path: Path, rung: Rung) -> TrialOutcome:
    """The outcome of a trial that is not running, read from its folder."""
    run = Run(path)
    state = run.state if run.sessions else "new"
    if state == "failed":
        reasons = [status["reason"] for status in _statuses(run) if status["state"] == "failed"]
        return TrialOutcome("failed", reason=next(iter(reasons), "failed"))
    rows = [[row for row in run.metrics(seed) if rung.metric in row] for seed in run.seeds]
    if state == "done":
        return _scored("complete", [of_seed[-1:] for of_seed in rows], rung.metric)
    if state in ("interrupted", "unfinished") and rung.level is not None:
        reached = [[row for row in of_seed if row[COLUMNS[rung.by]] >= rung.level][:1] for of_seed in rows]
        if all(reached):
            return _scored("paused", reached, rung.metric)
    return TrialOutcome("stopped")


def _scored(state: str, rows: Sequence[Sequence[dict[str, Any]]], metric: str) -> TrialOutcome:
    """The mean over seeds of the metric in the one row of each."""
    values = [row[metric] for of_seed in rows for row in of_seed]
    values = [value for value in values if value is not None and math.isfinite(value)]
    if len(values) < len(rows):
        return TrialOutcome("failed", reason=f"{metric} is missing or non-finite")
    return TrialOutcome(state, fmean(values))


def counted(path: Path, by: str) -> int:
    """Steps, frames or tokens that all sessions of a trial have trained together."""
    if not (path / "trial.json").exists():
        return 0
    return sum(status["progress"].get(COLUMNS[by], 0) for status in _statuses(Run(path)))


def _statuses(run: Run) -> list[dict[str, Any]]:
    return [status for session in run.sessions if (status := read_status(session.path)) is not None]


def shared(parallel: int, threads: int, device: str, available: Resources) -> tuple[Resources, float]:
    """The cores and GPUs that `parallel` runs share, and the fraction of a GPU that each gets."""
    names = () if device == "cpu" else available.gpus
    share = 1.0 / math.ceil(parallel / len(names)) if names else 0.0
    return Resources(parallel * threads, names, available.memory), share
