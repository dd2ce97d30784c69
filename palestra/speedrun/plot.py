"""The picture of a leaderboard: bits per byte over hardware FLOPs, and the frontier of what nobody has beaten."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.runs.plot import PALETTE
from palestra.speedrun.leaderboard import frontier

BLUE, RED = PALETTE[0], PALETTE[1]


def draw(rows: Sequence[dict[str, Any]], out: Path) -> Path:
    """Draw the rows to a PNG; where it is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    best = frontier(rows)
    kept = {id(row) for row in best}
    beaten = [row for row in rows if id(row) not in kept]
    axes.scatter(*_points(beaten), color="#999999", s=22, label="beaten", zorder=2)
    axes.plot(*_points(best), color=BLUE, marker="o", markersize=5, linewidth=1.4, label="frontier", zorder=3)
    for row in best:
        axes.annotate(
            row["run_name"].partition("/")[0],
            (row["training_hardware_flops"], row["eval_bits_per_byte"]),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xscale("log")
    axes.margins(x=0.14, y=0.1)
    axes.set_xlabel("hardware FLOPs of training")
    axes.set_ylabel("bits per byte")
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    path = out if out.suffix == ".png" else out.with_name(f"{out.name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    return path


def _points(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["training_hardware_flops"] for row in rows], [row["eval_bits_per_byte"] for row in rows]
