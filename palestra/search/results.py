"""An experiment's folder and what a search came to: the ranking, summary.json, trials.csv, best.yaml, plots."""

import csv
import io
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError, UsageError
from palestra.runs import checkpoint
from palestra.runs.run import Run
from palestra.runs.store import clear_write_errors, read_json, write_bytes, write_json
from palestra.search.plots import search_plots
from palestra.search.study import TrialRecord
from palestra.search.trials import counted
from palestra.spec.base import ExperimentSpec
from palestra.spec.blocks import SearchSpec
from palestra.spec.compose import escape
from palestra.spec.grid import given_data, with_values
from palestra.spec.load import resolved
from palestra.spec.renames import translated
from palestra.spec.source import write_text
from palestra.work.redact import redacted

NAME = "search.json"


@dataclass(frozen=True)
class Experiment:
    """A search as its readers see it."""

    path: Path

    @property
    def info(self) -> dict[str, Any]:
        """What search.json says: name, id, created, command, and the spec as it was given."""
        info = read_json(self.path / NAME)
        return info | {"spec": translated(info["spec"])}

    @property
    def root(self) -> Path:
        """The folder of all runs."""
        return self.path.parent.parent

    @property
    def spec(self) -> ExperimentSpec:
        """The spec with its search."""
        return resolved(self.info["spec"])

    @property
    def best(self) -> Path:
        """Where the best spec is written at the end."""
        return self.path / "best.yaml"

    def trial(self, number: int) -> Path:
        """The folder of a trial, made or not."""
        return self.path / "trials" / str(number)

    def summary(self) -> dict[str, Any]:
        """What the trials came to (summary.json); empty until the search has ended."""
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def amend(self, spec: ExperimentSpec) -> None:
        """Store a search that is continued with changes."""
        with clear_write_errors(self.path):
            write_json(self.path / NAME, self.info | {"spec": _given(spec)})


def new_experiment(root: Path, spec: ExperimentSpec, command: Sequence[str]) -> Experiment:
    """Make the folder of a new search."""
    now = datetime.now(UTC)
    path = Path(os.path.abspath(root)) / spec.name / f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:4]}"
    info = {
        "name": spec.name,
        "id": path.name,
        "created": now.isoformat(timespec="seconds"),
        "command": redacted(list(command)),
        "spec": _given(spec),
    }
    with clear_write_errors(path):
        (path / "trials").mkdir(parents=True)
        (path / "plots").mkdir()
        write_json(path / NAME, info)
    return Experiment(path)


def find_experiment(ref: str | Path, root: Path) -> Experiment:
    """The search meant by a path, name/id, or a name (its newest)."""
    for path in (Path(os.path.abspath(ref)), Path(os.path.abspath(root)) / ref):
        if (path / NAME).is_file():
            return Experiment(path)
        made = [file.parent for file in path.glob(f"*/{NAME}")]
        if made:
            return Experiment(max(made, key=_age))
    raise UsageError(f"no search {str(ref)!r}: give the folder of one, with a {NAME} in it, or its name in {root}")


def _age(path: Path) -> tuple[str, int]:
    return path.name.partition("-")[0], (path / NAME).stat().st_mtime_ns


def _given(spec: ExperimentSpec) -> dict[str, Any]:
    """Without defaults: a trial with another algorithm must not be given the defaults of this one."""
    return spec.model_dump(mode="json", exclude_unset=True)


def ranked(records: Sequence[TrialRecord], *, maximize: bool) -> list[TrialRecord]:
    """Trials with a score, best first: complete ones before pruned ones, those of a higher rung before lower ones."""
    sign = -1.0 if maximize else 1.0
    scored = [(record, record.score) for record in records if record.score is not None]
    scored.sort(key=lambda one: (one[0].state != "complete", -one[0].rung, sign * one[1], one[0].number))
    return [record for record, _ in scored]


def write_results(experiment: Experiment, spec: ExperimentSpec, search: SearchSpec, records: list[TrialRecord]) -> None:
    """Write summary.json, trials.csv, best.yaml and the plots, then delete the checkpoints that are not kept."""
    metric, direction = search.goal(spec.kind)
    order = ranked(records, maximize=direction == "maximize")
    by = _by(spec, search)
    counts = {record.number: counted(experiment.trial(record.number), by) for record in records}
    complete = [counts[record.number] for record in records if record.state == "complete"]
    summary = {
        "metric": metric,
        "direction": direction,
        "by": by,
        "seeds": spec.seeds,
        "best": order[0].number if order else None,
        "score": order[0].score if order else None,
        "counted": sum(counts.values()),
        "counted_if_all_ran": max(complete) * len(records) if complete else None,
        "trials": [_row(record, counts[record.number]) for record in records],
    }
    with clear_write_errors(experiment.path):
        write_json(experiment.path / "summary.json", summary)
        write_bytes(experiment.path / "trials.csv", _csv(records, list(search.space), counts, metric, by).encode())
        if order:
            write_bytes(experiment.best, best_yaml(experiment, spec, order[0], metric).encode())
            search_plots(
                experiment.path / "plots", search.space, records, order, metric, maximize=direction == "maximize"
            )
        if search.keep is not None:
            _delete_checkpoints(experiment, records, order[: search.keep])


def best_yaml(experiment: Experiment, spec: ExperimentSpec, best: TrialRecord, metric: str) -> str:
    """The best spec as a file for `palestra train`, with a word on what its score is worth."""
    seeds = ", ".join(map(str, spec.seeds))
    fresh = max(spec.seeds) + 1
    told = [
        f"The best of {spec.name}/{experiment.path.name}: trial {best.number}, {metric} {best.score:g}, seeds {seeds}.",
        "It was chosen for that score, with these seeds: the score says nothing of others, and is no benchmark.",
        f"With fresh ones: palestra train best.yaml seed={fresh} max_session=4",
    ]
    text = write_text(escape(with_values(given_data(spec), best.values)))
    return "".join(f"# {line}\n" for line in told) + text


def _by(spec: ExperimentSpec, search: SearchSpec) -> str:
    """What the cost of a trial is counted in: frames or tokens where the kind counts them."""
    if search.pruner is not None:
        return search.pruner.asha.by
    return next((unit for unit in ("frames", "tokens") if unit in spec.counts), "steps")


def _row(record: TrialRecord, count: int) -> dict[str, Any]:
    return {
        "trial": record.number,
        "values": record.values,
        "score": record.score,
        "counted": count,
        "state": record.state,
        "scores": {str(rung): score for rung, score in record.scores.items()},
        "reason": record.reason or None,
    }


def _csv(records: Sequence[TrialRecord], keys: list[str], counts: dict[int, int], metric: str, by: str) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["trial", *keys, metric, by, "state"])
    for record in records:
        values = [_cell(record.values[key]) for key in keys]
        score = "" if record.score is None else record.score
        writer.writerow([record.number, *values, score, counts[record.number], record.state])
    return file.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) or value is None else value


def _delete_checkpoints(experiment: Experiment, records: Sequence[TrialRecord], kept: Sequence[TrialRecord]) -> None:
    """Only the best keep theirs; all else of the other trials stays."""
    for record in records:
        if record in kept or not (experiment.trial(record.number) / "trial.json").exists():
            continue
        run = Run(experiment.trial(record.number))
        if run.state == "running":
            raise PalestraError(f"{run.path} is still running: its checkpoints are not deleted")
        for session in run.sessions:
            shutil.rmtree(session.path / checkpoint.FOLDER, ignore_errors=True)
