"""What is not a run: searches, pipelines, benchmarks and speedruns under the folders given."""

from pathlib import Path
from typing import Any

from palestra.bench import results as bench
from palestra.data.steps.shards import COUNTS, DROPPED
from palestra.errors import PalestraError
from palestra.runs.run import NAME
from palestra.runs.store import read_json
from palestra.search.results import Experiment, importance
from palestra.speedrun.leaderboard import read_rows
from palestra.view.places import DAMAGED, Places
from palestra.view.runs import tail


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


def _pipeline(path: Path) -> list[dict[str, Any]]:
    record = read_json(path)
    for step in record["steps"]:
        if NAME.fullmatch(step["address"]):  # no path out of the folder
            for key, name in (("counts", COUNTS), ("samples", DROPPED)):
                file = path.parent / step["address"] / name
                step[key] = read_json(file) if file.is_file() and not file.is_symlink() else {}
            step["log"] = tail(path.parent / ".steps" / step["address"] / "log.txt", None, 20_000)["text"]
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
