"""The folder of a search and its results: ranking, summary.json, trials.csv, best.yaml, plots."""

import csv
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

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
    """The folder of a search."""

    path: Path

    @property
    def info(self) -> dict[str, Any]:
        """search.json: name, id, created, command, and the spec as it was given."""
        info = read_json(self.path / NAME)
        return info | {"spec": translated(info["spec"])}

    @property
    def spec(self) -> ExperimentSpec:
        """The spec with its search."""
        return resolved(self.info["spec"])

    @property
    def best(self) -> Path:
        """The path of the best spec, written at the end."""
        return self.path / "best.yaml"

    def trial(self, number: int) -> Path:
        """The folder of a trial, whether it exists or not."""
        return self.path / "trials" / str(number)

    def summary(self) -> dict[str, Any]:
        """summary.json; empty until the search has ended."""
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def amend(self, spec: ExperimentSpec) -> None:
        """Store the spec of a search that is resumed with changes."""
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
    """The search with this path, name/id, or name (the newest of that name)."""
    for path in (Path(os.path.abspath(ref)), Path(os.path.abspath(root)) / ref):
        if (path / NAME).is_file():
            return Experiment(path)
        made = [file.parent for file in path.glob(f"*/{NAME}")]
        if made:
            return Experiment(max(made, key=lambda p: (p.name.partition("-")[0], (p / NAME).stat().st_mtime_ns)))
    raise UsageError(f"no search {str(ref)!r}: give a folder with a {NAME} in it, or the name of a search in {root}")


def _given(spec: ExperimentSpec) -> dict[str, Any]:
    """Without defaults: a trial with another algorithm must not get the defaults of this one."""
    return spec.model_dump(mode="json", exclude_unset=True)


def ranked(records: Sequence[TrialRecord], *, maximize: bool) -> list[TrialRecord]:
    """Trials with a score, best first: complete ones before pruned ones, those of a higher rung before lower ones."""
    sign = -1.0 if maximize else 1.0
    scored = [record for record in records if record.score is not None]
    return sorted(scored, key=lambda r: (r.state != "complete", -r.rung, sign * (r.score or 0.0), r.number))


def importance(trials: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of the variance of the score that each field explains by itself; many numbers in quarters."""
    scored = [trial for trial in trials if trial["score"] is not None]
    scores, shares = np.array([trial["score"] for trial in scored], float), {}
    for field in scored[0]["values"] if len(scored) > 2 and scores.std() > 0 else ():
        values = [trial["values"][field] for trial in scored]
        numbers = all(isinstance(value, int | float) for value in values) and len(set(values)) > 8
        parts = np.searchsorted(np.quantile(values, (0.25, 0.5, 0.75)), values) if numbers else list(map(str, values))
        _, place, count = np.unique(np.array(parts), return_inverse=True, return_counts=True)
        means = np.bincount(place, scores) / count
        shares[field] = float((count * (means - scores.mean()) ** 2).sum() / len(scores) / scores.var())
    return shares


def write_results(experiment: Experiment, spec: ExperimentSpec, search: SearchSpec, records: list[TrialRecord]) -> None:
    """Write summary.json, trials.csv, best.yaml and the plots, then delete the checkpoints that are not kept."""
    metric, direction = search.goal(spec.kind)
    order = ranked(records, maximize=direction == "maximize")
    # The cost of a trial is counted in frames or tokens if the kind counts them.
    units = [unit for unit in ("frames", "tokens") if unit in spec.counts]
    by = search.pruner.asha.by if search.pruner is not None else next(iter(units), "steps")
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
        "trials": [
            {
                "trial": record.number,
                "values": record.values,
                "score": record.score,
                "counted": counts[record.number],
                "state": record.state,
                "scores": {str(rung): score for rung, score in record.scores.items()},
                "reason": record.reason or None,
            }
            for record in records
        ],
    }
    with clear_write_errors(experiment.path):
        write_json(experiment.path / "summary.json", summary)
        write_bytes(experiment.path / "trials.csv", csv_bytes(_rows(summary, list(search.space))))
        if order:
            write_bytes(experiment.best, best_yaml(experiment, spec, order[0], metric).encode())
            plots = experiment.path / "plots"
            search_plots(plots, search.space, records, order, metric, maximize=direction == "maximize")
        if search.keep is not None:
            _delete_checkpoints(experiment, records, order[: search.keep])


def best_yaml(experiment: Experiment, spec: ExperimentSpec, best: TrialRecord, metric: str) -> str:
    """The best spec as a file for `palestra train`, with a warning that its score is a selected one."""
    name, seeds = f"{spec.name}/{experiment.path.name}", ", ".join(map(str, spec.seeds))
    comment = (
        f"# The best of {name}: trial {best.number}, {metric} {best.score:g}, seeds {seeds}.\n"
        "# It was selected for that score on these seeds: the score is optimistic and is not a benchmark.\n"
        f"# With fresh seeds: palestra train best.yaml seed={max(spec.seeds) + 1} max_session=4\n"
    )
    return comment + write_text(escape(with_values(given_data(spec), best.values)))


def _rows(summary: Mapping[str, Any], keys: list[str]) -> Iterator[list[Any]]:
    yield ["trial", *keys, summary["metric"], summary["by"], "state"]
    for row in summary["trials"]:
        values = [row["values"][key] for key in keys]
        cells = [json.dumps(v) if isinstance(v, list | dict) or v is None else v for v in values]
        yield [row["trial"], *cells, row["score"], row["counted"], row["state"]]


def csv_bytes(rows: Iterable[Sequence[Any]]) -> bytes:
    """Rows as a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue().encode()


def _delete_checkpoints(experiment: Experiment, records: Sequence[TrialRecord], kept: Sequence[TrialRecord]) -> None:
    """Only the best trials keep their checkpoints; all other files stay."""
    for record in records:
        if record in kept or not (experiment.trial(record.number) / "trial.json").exists():
            continue
        run = Run(experiment.trial(record.number))
        if run.state == "running":
            raise PalestraError(f"{run.path} is still running: its checkpoints are not deleted")
        for session in run.sessions:
            shutil.rmtree(session.path / checkpoint.FOLDER, ignore_errors=True)
