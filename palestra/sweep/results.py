"""What a sweep came to: every run with its place on the axes, its size and its score, as rows and as a picture."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from palestra.runs.plot import LINE_STYLES, PALETTE
from palestra.runs.run import Run
from palestra.runs.store import clear_write_errors, read_json, write_bytes, write_json
from palestra.spec.base import ExperimentSpec
from palestra.spec.blocks import METRICS, label
from palestra.spec.load import resolved

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MARKERS = "osD^v<>"
PANELS = 12  # more cannot be read


def comparison(summary: Mapping[str, Any], out: Path) -> list[Path]:
    """Draw the runs of a summary that have a score to `out`.png and `out`.svg; none where fewer than two have."""
    rows = [row for row in summary["runs"] if row["score"] is not None and math.isfinite(row["score"])]
    axes = _varied(rows)
    if len(rows) < 2 or not axes:
        return []
    from matplotlib.figure import Figure

    x, lines, rest = roles(axes)
    panels = list(dict.fromkeys(tuple(label(row["at"].get(axis)) for axis in rest) for row in rows))[:PANELS]
    columns = min(4, len(panels))
    height = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(1.6 + 4.4 * columns, 3.6 * height), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False, sharey=True)
    for index, panel in enumerate(panels):
        drawn: Axes = grid[index // columns][index % columns]
        here = [row for row in rows if tuple(label(row["at"].get(axis)) for axis in rest) == panel]
        _panel(drawn, here, x, axes[x], lines, [] if lines is None else axes[lines])
        drawn.set_title(", ".join(f"{axis} {text}" for axis, text in zip(rest, panel, strict=True)), fontsize=10)
        if index % columns == 0:
            drawn.set_ylabel(_words(summary["metric"]))
    for index in range(len(panels), height * columns):
        grid[index // columns][index % columns].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = [out.with_name(f"{out.name}.{ending}") for ending in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=160)
    return paths


def roles(axes: Mapping[str, Sequence[Any]]) -> tuple[str, str | None, list[str]]:
    """Which axis runs along, which makes the lines, and which make panels: numbers along, the shortest in color."""
    numeric = [name for name, settings in axes.items() if _are_numbers(settings) and len(settings) > 1]
    x = (numeric or list(axes))[-1]
    others = [name for name in axes if name != x and len(axes[name]) <= len(PALETTE)]
    lines = min(others, key=lambda name: (len(axes[name]), -list(axes).index(name)), default=None)
    return x, lines, [name for name in axes if name not in (x, lines)]


def _varied(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The axes on which the runs differ, and the settings on each: numbers in order, all else as they come."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for axis, value in row["at"].items():
            found.setdefault(axis, {})[label(value)] = value
    varied = {axis: list(settings.values()) for axis, settings in found.items() if len(settings) > 1}
    return {axis: sorted(values) if _are_numbers(values) else values for axis, values in varied.items()}


def _panel(
    drawn: "Axes",
    rows: Sequence[Mapping[str, Any]],
    x: str,
    along: Sequence[Any],
    lines: str | None,
    settings: Sequence[Any],
) -> None:
    numeric = _are_numbers(along)
    order = {label(value): index for index, value in enumerate(along)}
    several = 1
    for index, setting in enumerate(settings or [None]):
        mine = [row for row in rows if lines is None or label(row["at"].get(lines)) == label(setting)]
        mine = sorted((row for row in mine if x in row["at"]), key=lambda row: order[label(row["at"][x])])
        if not mine:
            continue
        places = [row["at"][x] if numeric else order[label(row["at"][x])] for row in mine]
        seeds = [list(row["by_seed"].values()) or [row["score"]] for row in mine]
        spread = [stdev(values) if len(values) > 1 else 0.0 for values in seeds]
        several = max(several, *map(len, seeds))
        drawn.errorbar(
            places,
            [fmean(values) for values in seeds],
            yerr=spread if any(spread) else None,
            color=PALETTE[index % len(PALETTE)],
            linestyle=LINE_STYLES[index // len(PALETTE) % len(LINE_STYLES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=6,
            markerfacecolor="none",
            capsize=3,
            linewidth=1.4,
            label=None if lines is None else label(setting),
        )
    if numeric and min(along) > 0 and max(along) / min(along) >= 4:
        drawn.set_xscale("log")
        drawn.set_xticks(list(along), [label(value) for value in along])
        drawn.minorticks_off()
    elif not numeric:
        drawn.set_xticks(range(len(along)), [label(value) for value in along])
    drawn.set_xlabel(x)
    drawn.grid(color="#DDDDDD", linewidth=0.6)
    drawn.spines[["top", "right"]].set_visible(False)
    if lines is not None:
        over = f"{lines} (mean ± standard deviation of {several} seeds)" if several > 1 else lines
        drawn.legend(frameon=False, fontsize=9, title=over, title_fontsize=8, alignment="left")


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _words(metric: str) -> str:
    return metric.replace("eval/", "evaluation ").replace("/", " ").replace("_", " ")


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


def summarize(folder: Path) -> dict[str, Any]:
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
    better = max if direction == "maximize" else min
    best = better(scored, key=lambda row: row["score"])["run"] if scored else None
    return {"group": folder.name, "metric": metric, "direction": direction, "best": best, "runs": rows}


def write_results(folder: Path) -> dict[str, Any]:
    """Write summary.json, runs.csv and, where runs have scores, plots/comparison.png and .svg; the summary."""
    summary = summarize(folder)
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
