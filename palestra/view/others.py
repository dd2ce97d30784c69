"""What is not a run: searches, pipelines, benchmarks and speedruns under the folders given."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palestra.bench import results as bench
from palestra.data.readers import COUNTS
from palestra.data.steps.shards import DROPPED
from palestra.errors import PalestraError
from palestra.runs.run import NAME
from palestra.runs.store import read_json
from palestra.search.results import Experiment
from palestra.speedrun.leaderboard import read_rows
from palestra.view.places import DAMAGED, Places
from palestra.view.runs import tail

LOG_BYTES = 20_000


def others(places: Places) -> dict[str, Any]:
    """All of them, by what they are; `damaged` says which could not be read."""
    readers = {"search.json": ("searches", _search), "benchmarks.jsonl": ("benchmarks", _benchmarks),
               "speedrun.json": ("speedruns", _speedruns)}  # fmt: skip
    found: dict[str, list[Any]] = {"searches": [], "pipelines": [], "benchmarks": [], "speedruns": [], "damaged": []}
    for path in places.files():
        key, read = readers.get(path.name, ("pipelines", _pipeline))
        try:
            found[key] += read(path)
        except (PalestraError, *DAMAGED) as error:
            found["damaged"].append(f"{path.name} in {path.parent.name}: {error}")
    return found


def _search(path: Path) -> list[dict[str, Any]]:
    experiment = Experiment(path.parent)
    summary, info = experiment.summary(), experiment.info
    about = {key: info[key] for key in ("name", "id", "created")}
    return [about | {"summary": summary, "importance": importance(summary.get("trials", []))}]


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


def _pipeline(path: Path) -> list[dict[str, Any]]:
    record = read_json(path)
    for step in record["steps"]:
        if NAME.fullmatch(step["address"]):  # no path out of the folder
            for key, name in (("counts", COUNTS), ("samples", DROPPED)):
                file = path.parent / step["address"] / name
                step[key] = read_json(file) if file.is_file() and not file.is_symlink() else {}
            step["log"] = tail(path.parent / ".steps" / step["address"] / "log.txt", None, LOG_BYTES)["text"]
    return [record]


def _speedruns(path: Path) -> list[dict[str, Any]]:
    columns = {"bits per byte": "eval_bits_per_byte", "run": "run_name", "author": "author",
               "FLOPs": "training_hardware_flops", "device": "device", "frontier": "pareto"}  # fmt: skip
    return [{label: row[key] for label, key in columns.items()} for row in read_rows(path.parent)]


def _benchmarks(path: Path) -> list[dict[str, Any]]:
    return [
        {"spec": spec, "env": of.records[0].env, "frames": of.records[0].frames, "mean": of.mean, "IQM": of.iqm,
         "low": of.interval[0], "high": of.interval[1], "seeds": len(of.scores), "machine": of.records[0].machine}
        for (spec, _), of in bench.results(bench.read(path)).items()
    ]  # fmt: skip
