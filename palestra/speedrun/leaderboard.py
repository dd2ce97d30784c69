"""The leaderboard of a folder of submissions, and the plot of its Pareto frontier."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError, UsageError
from palestra.runs.plot import PALETTE, new_figure, style_axes
from palestra.runs.store import read_json
from palestra.speedrun.submission import NAME, SCORE

COPIED = (
    *("seed", "description", "model_size", "total_tokens", "model_flops", "training_hardware_flops"),
    *("training_time", "commit", "run_completion_timestamp"),
)
"""The keys of a submission that a row of the leaderboard has too."""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """A row for every run in every speedrun.json below a folder, fewest bits per byte first."""
    files = sorted(folder.rglob(NAME))
    if not files:
        raise UsageError(f"no {NAME} in {folder}: `palestra speedrun run` writes submissions")
    rows = [_row(entry["run_info"], path, folder) for path in files for entry in _entries(path)]
    best = {id(row) for row in frontier(rows)}
    ordered = sorted(rows, key=lambda row: (row["eval_bits_per_byte"], row["training_hardware_flops"]))
    return [{**row, "pareto": id(row) in best} for row in ordered]


def frontier(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The Pareto frontier, cheapest first: rows with fewer bits per byte than all of the same or a lower cost."""
    best: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: (row["training_hardware_flops"], row["eval_bits_per_byte"])):
        if not best or row["eval_bits_per_byte"] < best[-1]["eval_bits_per_byte"]:
            best.append(row)
    return best


def _entries(path: Path) -> list[dict[str, Any]]:
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("runs"), list):
        raise PalestraError(f"{path} is not a submission: expected a mapping with a list 'runs'")
    return data["runs"]


def _row(info: dict[str, Any], path: Path, folder: Path) -> dict[str, Any]:
    try:
        return {
            "run_name": info["run"],
            **{key: info[key] for key in COPIED},
            "results_filepath": str(path.relative_to(folder)),
            "author": info["author"]["name"],
            "mfu": info["model_flops"] / info["training_hardware_flops"],
            "eval_bits_per_byte": info[SCORE],
            "device": f"{info['num_devices']} × {info['resources']['device']}",
        }
    except KeyError as error:
        raise PalestraError(f"{path} is not a complete submission: it lacks {error}") from error


def draw(rows: Sequence[dict[str, Any]], out: Path) -> Path:
    """Plot bits per byte over hardware FLOPs as a PNG; returns its path."""
    figure = new_figure(7.2, 4.4)
    axes = figure.add_subplot()
    best = frontier(rows)
    beaten = [row for row in rows if row not in best]
    axes.scatter(*_points(beaten), color="#999999", s=22, label="beaten", zorder=2)
    axes.plot(*_points(best), color=PALETTE[0], marker="o", markersize=5, linewidth=1.4, label="frontier", zorder=3)
    for row in best:
        point = (row["training_hardware_flops"], row["eval_bits_per_byte"])
        name = row["run_name"].partition("/")[0]
        axes.annotate(name, point, xytext=(6, 5), textcoords="offset points", fontsize=8)
    style_axes(axes)
    axes.set_xscale("log")
    axes.margins(x=0.14, y=0.1)
    axes.set_xlabel("hardware FLOPs of training")
    axes.set_ylabel("bits per byte")
    axes.legend(frameon=False, fontsize=9)
    path = out if out.suffix == ".png" else out.with_name(f"{out.name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def _points(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["training_hardware_flops"] for row in rows], [row["eval_bits_per_byte"] for row in rows]
