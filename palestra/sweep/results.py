"""What a sweep came to: every run of its group with where it is on the axes, its size and its score."""

import csv
import io
from pathlib import Path
from typing import Any

from palestra.runs.run import Run
from palestra.runs.store import clear_write_errors, read_json, write_bytes, write_json
from palestra.spec.base import ExperimentSpec
from palestra.spec.load import resolved
from palestra.spec.search import METRICS
from palestra.spec.sweep import label
from palestra.sweep.plot import comparison

POINT = "point.json"
SIZES = ("parameters", "active parameters", "steps", "tokens", "training FLOPs")
"""What a plan tells of a run, as far as its kind knows it."""


def sizes(spec: ExperimentSpec) -> dict[str, int | float]:
    """Parameters, active parameters, steps or frames, tokens and FLOPs of a run, as far as the spec alone says."""
    derived = {name: value for name, value in spec.derived().items() if name in SIZES}
    if "parameters" in derived:
        derived.setdefault("active parameters", derived["parameters"])
    train = getattr(spec, "train", None)
    counted = {unit: getattr(train, unit) for unit in ("steps", "frames") if hasattr(train, unit)}
    found = {**derived, **counted}
    order = [*SIZES[:3], "frames", *SIZES[3:]]
    return {name: value for name in order if isinstance(value := found.get(name), int | float)}


def summarise(folder: Path) -> dict[str, Any]:
    """All runs of a group that have begun, by their names, and what they are compared by."""
    rows, metric, direction = [], None, None
    for path in sorted(folder.glob(f"*/{POINT}")):
        if not (path.parent / "trial.json").exists():
            continue
        run = Run(path.parent)
        spec = resolved(run.trial.info["spec"])
        metric, direction = METRICS.get(spec.kind, (None, None))
        told = run.summary()
        rows.append(
            {
                "run": path.parent.name,
                "at": read_json(path)["at"],
                "state": run.state if run.sessions else "new",
                **sizes(spec),
                "score": None if metric is None else told.get(metric),
                "by_seed": told.get(f"{metric}_by_seed", {}),
            }
        )
    scored = [row for row in rows if row["score"] is not None]
    better = max if direction == "maximise" else min
    best = better(scored, key=lambda row: row["score"])["run"] if scored else None
    return {"group": folder.name, "metric": metric, "direction": direction, "best": best, "runs": rows}


def write_results(folder: Path) -> dict[str, Any]:
    """Write summary.json, runs.csv and, where runs have scores, plots/comparison.png and .svg; the summary."""
    summary = summarise(folder)
    with clear_write_errors(folder):
        write_json(folder / "summary.json", summary)
        write_bytes(folder / "runs.csv", _table(summary).encode())
        comparison(summary, folder / "plots" / "comparison")
    return summary


def _table(summary: dict[str, Any]) -> str:
    axes = list(dict.fromkeys(axis for row in summary["runs"] for axis in row["at"]))
    columns = [name for name in (*SIZES[:3], "frames", *SIZES[3:]) if any(name in row for row in summary["runs"])]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", *axes, "state", *columns, summary["metric"] or "score"])
    for row in summary["runs"]:
        at = [label(row["at"][axis]) if axis in row["at"] else "" for axis in axes]
        writer.writerow([row["run"], *at, row["state"], *(row.get(name, "") for name in columns), row["score"]])
    return out.getvalue()
