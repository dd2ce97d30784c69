"""Results of a sweep: every run with its settings, its size and its score, as rows and as a plot."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from palestra.runs.plot import LINE_STYLES, PALETTE, new_figure, save_figure, style_axes, words
from palestra.runs.run import Run
from palestra.runs.store import clear_write_errors, read_json, write_bytes, write_json
from palestra.search.results import csv_bytes
from palestra.spec.base import ExperimentSpec
from palestra.spec.blocks import METRICS, label
from palestra.spec.load import resolved

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MARKERS = "osD^v<>"
PANELS = 12  # more cannot be read


def comparison(summary: Mapping[str, Any], out: Path) -> list[Path]:
    """Plot the runs that have a score to `out`.png and `out`.svg; nothing where fewer than two have one."""
    rows = [row for row in summary["runs"] if row["score"] is not None and math.isfinite(row["score"])]
    varied = _varied(rows)
    if len(rows) < 2 or not varied:
        return []
    x, lines, rest = roles(varied)
    panels: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault(tuple(label(row["at"].get(axis)) for axis in rest), []).append(row)
    columns = min(4, len(panels), PANELS)
    height = math.ceil(min(len(panels), PANELS) / columns)
    figure = new_figure(1.6 + 4.4 * columns, 3.6 * height)
    first = None
    for index, (settings, here) in enumerate(list(panels.items())[:PANELS]):
        axes = figure.add_subplot(height, columns, index + 1, sharey=first)
        first = first or axes
        _panel(axes, here, x, varied[x], lines, [] if lines is None else varied[lines])
        axes.set_title(", ".join(f"{axis} {text}" for axis, text in zip(rest, settings, strict=True)), fontsize=10)
        if index % columns == 0:
            axes.set_ylabel(words(summary["metric"]))
    return save_figure(figure, out)


def roles(axes: Mapping[str, Sequence[Any]]) -> tuple[str, str | None, list[str]]:
    """The axis along x (a numeric one if possible), the one of the lines (the shortest), and those of the panels."""
    numeric = [name for name, settings in axes.items() if _are_numbers(settings) and len(settings) > 1]
    x = (numeric or list(axes))[-1]
    others = [name for name in axes if name != x and len(axes[name]) <= len(PALETTE)]
    lines = min(others, key=lambda name: (len(axes[name]), -list(axes).index(name)), default=None)
    return x, lines, [name for name in axes if name not in (x, lines)]


def _varied(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The axes on which the runs differ, and the settings on each: numbers in order, others as they appear."""
    settings: dict[str, dict[str, Any]] = {}
    for row in rows:
        for axis, value in row["at"].items():
            settings.setdefault(axis, {})[label(value)] = value
    varied = {axis: list(values.values()) for axis, values in settings.items() if len(values) > 1}
    return {axis: sorted(values) if _are_numbers(values) else values for axis, values in varied.items()}


def _panel(
    axes: "Axes",
    rows: Sequence[Mapping[str, Any]],
    x: str,
    along: Sequence[Any],
    lines: str | None,
    settings: Sequence[Any],
) -> None:
    numeric = _are_numbers(along)
    order = {label(value): index for index, value in enumerate(along)}
    seeds_of = {row["run"]: list(row["by_seed"].values()) or [row["score"]] for row in rows}
    for index, setting in enumerate(settings or [None]):
        on_line = [row for row in rows if lines is None or label(row["at"].get(lines)) == label(setting)]
        on_line = sorted((row for row in on_line if x in row["at"]), key=lambda row: order[label(row["at"][x])])
        if not on_line:
            continue
        seeds = [seeds_of[row["run"]] for row in on_line]
        spread = [stdev(values) if len(values) > 1 else 0.0 for values in seeds]
        axes.errorbar(
            [row["at"][x] if numeric else order[label(row["at"][x])] for row in on_line],
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
    style_axes(axes)
    axes.margins(x=0.05)
    labels = [label(value) for value in along]
    if numeric and min(along) > 0 and max(along) / min(along) >= 4:
        axes.set_xscale("log")
        axes.set_xticks(list(along), labels)
        axes.minorticks_off()
    elif not numeric:
        axes.set_xticks(range(len(along)), labels)
    axes.set_xlabel(x)
    if lines is not None:
        most = max(map(len, seeds_of.values()))
        title = f"{lines} (mean ± standard deviation of {most} seeds)" if most > 1 else lines
        axes.legend(frameon=False, fontsize=9, title=title, title_fontsize=8, alignment="left")


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


POINT = "point.json"
SIZES = ("parameters", "active parameters", "steps", "frames", "tokens", "training FLOPs")
"""The sizes of a run that a plan and a summary show, as far as its kind knows them."""


def sizes(spec: ExperimentSpec) -> dict[str, int | float]:
    """Parameters, active parameters, steps or frames, tokens and FLOPs of a run, as far as the spec alone says."""
    known = dict(spec.derived())
    if "parameters" in known:
        known.setdefault("active parameters", known["parameters"])
    train = getattr(spec, "train", None)
    known |= {unit: getattr(train, unit) for unit in ("steps", "frames") if hasattr(train, unit)}
    return {name: value for name in SIZES if isinstance(value := known.get(name), int | float)}


def summarize(folder: Path) -> dict[str, Any]:
    """All runs of a group that have begun, by their names, and the metric that compares them."""
    rows, metric, direction = [], None, None
    for path in sorted(folder.glob(f"*/{POINT}")):
        if not (path.parent / "trial.json").exists():
            continue
        run = Run(path.parent)
        spec = resolved(run.trial.info["spec"])
        metric, direction = METRICS.get(spec.kind, (None, None))
        summary = run.summary()
        rows.append(
            {
                "run": path.parent.name,
                "at": read_json(path)["at"],
                "state": run.state if run.sessions else "new",
                **sizes(spec),
                "score": None if metric is None else summary.get(metric),
                "by_seed": summary.get(f"{metric}_by_seed", {}),
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
        write_bytes(folder / "runs.csv", csv_bytes(_rows(summary)))
        comparison(summary, folder / "plots" / "comparison")
    return summary


def _rows(summary: dict[str, Any]) -> Iterator[list[Any]]:
    axes = list(dict.fromkeys(axis for row in summary["runs"] for axis in row["at"]))
    columns = [name for name in SIZES if any(name in row for row in summary["runs"])]
    yield ["run", *axes, "state", *columns, summary["metric"] or "score"]
    for row in summary["runs"]:
        settings = [label(row["at"][axis]) if axis in row["at"] else "" for axis in axes]
        yield [row["run"], *settings, row["state"], *(row.get(name, "") for name in columns), row["score"]]
