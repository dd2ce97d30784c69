"""One trial of a search: its folder, its worker, its pause at a rung, and what can be read of it afterwards."""

import math
import os
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
from palestra.runs.store import read_json, write_json
from palestra.spec.base import ExperimentSpec
from palestra.spec.grid import with_values
from palestra.spec.kinds import runner
from palestra.spec.load import resolved
from palestra.spec.model import plain
from palestra.work.fanout import Resources

NAME = "rung.json"
HOOK = "palestra.search.trials:pause_at_rung"


def write_rung(trial: Path, metric: str, by: str, level: int) -> None:
    """Say how far a trial runs before it pauses; a trial without this file runs to its end."""
    write_json(trial / NAME, {"metric": metric, "by": by, "level": level})


def clear_rung(trial: Path) -> None:
    """Let the trial run to its end whenever it is resumed."""
    (trial / NAME).unlink(missing_ok=True)


def pause_at_rung(moment: HookContext) -> None:
    """Ask the session to stop, as SIGTERM does, at the first row with the metric at or after its rung."""
    path = moment.folder.parent.parent / NAME
    if not path.exists():
        return
    rung: dict[str, Any] = read_json(path)
    seen = moment.step if rung["by"] == "steps" else moment.seen
    if rung["metric"] in moment.metrics and seen >= rung["level"]:
        signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Rung:
    """How far a trial is to run: to its first row with the metric at `level` of `by`, or to its end before that."""

    metric: str
    by: str
    level: int | None
    """None: to the end."""


@dataclass(frozen=True)
class TrialOutcome:
    """What a trial came to: "complete", "paused" at its rung, "failed" for a reason, or "stopped" before all that."""

    state: str
    score: float | None = None
    reason: str = ""


def trial_spec(data: Mapping[str, Any], values: Mapping[str, Any], threads: int, *, pauses: bool) -> ExperimentSpec:
    """The spec of a trial: the search's data with the values of the trial, and the hook that pauses it at rungs."""
    changed = with_values(data, values) | {"threads": threads}
    if pauses:
        changed["hooks"] = [*changed.get("hooks", []), HOOK]
    return resolved(changed)


def make_trial(path: Path, spec: ExperimentSpec, command: Sequence[str]) -> Run:
    """A trial's folder with its trial.json, as any other run has; one that is there already is kept."""
    id = f"{path.parent.parent.name}/trials/{path.name}"
    return make_run(path, name=spec.name, id=id, seeds=spec.seeds, command=command, spec=plain(spec))


def run_trial(path: Path, root: Path, command: Sequence[str], gpu_share: float | None) -> None:
    """In a worker: run the trial from where it is, until it pauses, ends or fails."""
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
    """What a trial that is not running came to, read from its folder."""
    run = Run(path)
    state = run.state if run.sessions else "new"
    if state == "failed":
        return TrialOutcome("failed", reason=_reason(run))
    rows = [run.metrics(seed) for seed in run.seeds]
    if state == "done":
        return _scored("complete", [_last(each, rung.metric) for each in rows], rung.metric)
    if state in ("interrupted", "unfinished") and rung.level is not None:
        reached = [_first_at(each, rung) for each in rows]
        if all(value is not None for value in reached):
            return _scored("paused", reached, rung.metric)
    return TrialOutcome("stopped")


def counted(path: Path, by: str) -> int:
    """Steps, frames or tokens that the sessions of a trial trained, all together."""
    if not (path / "trial.json").exists():
        return 0
    told = [read_status(session.path) for session in Run(path).sessions]
    return sum(status["progress"].get(COLUMNS[by], 0) for status in told if status is not None)


def gpus() -> list[str]:
    """The GPUs that trials may use, as CUDA_VISIBLE_DEVICES names them; found without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index in range(len(list(folder.iterdir())))] if folder.is_dir() else []


def shared(parallel: int, threads: int, device: str) -> tuple[Resources, float]:
    """What so many runs at once share, with the GPUs that there are, and the share of a GPU that each then has."""
    found = [] if device == "cpu" else gpus()
    return Resources(parallel * threads, found), 1.0 / math.ceil(parallel / len(found)) if found else 0.0


def _scored(state: str, values: Sequence[float | None], metric: str) -> TrialOutcome:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < len(values):
        return TrialOutcome("failed", reason=f"{metric} is missing or not a finite number")
    return TrialOutcome(state, fmean(known))


def _last(rows: list[dict[str, Any]], metric: str) -> float | None:
    return next((row[metric] for row in reversed(rows) if metric in row), None)


def _first_at(rows: list[dict[str, Any]], rung: Rung) -> float | None:
    assert rung.level is not None
    found = (row[rung.metric] for row in rows if rung.metric in row and row[COLUMNS[rung.by]] >= rung.level)
    return next(found, None)


def _reason(run: Run) -> str:
    told = [read_status(session.path) for session in run.sessions]
    return next((status["reason"] for status in told if status is not None and status["state"] == "failed"), "failed")
