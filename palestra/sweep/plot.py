"""The picture of a sweep: the score along one axis, a line for each setting of another, panels for the rest."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from palestra.runs.plot import LINE_STYLES, PALETTE
from palestra.spec.sweep import label

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
    """Which axis runs along, which makes the lines, and which make panels: numbers along, the shortest in colour."""
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
