"""Pictures of a search: the trials as lines across the space, what mattered, and the best so far."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.runs.plot import PALETTE
from palestra.search.study import TrialRecord
from palestra.spec.blocks import Axis

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, RED = PALETTE[0], PALETTE[1]


def search_plots(
    folder: Path,
    space: Mapping[str, Axis],
    records: Sequence[TrialRecord],
    order: Sequence[TrialRecord],
    metric: str,
    *,
    maximize: bool,
) -> list[Path]:
    """Write parallel_coordinates, importance and best_so_far as PNG; `order`: trials with a score, best first."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "parallel_coordinates": parallel_coordinates(space, order, metric, maximize=maximize),
        "importance": importance_bars(space, order, metric),
        "best_so_far": best_so_far(records, order, metric),
    }
    paths = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=150)
        paths.append(path)
    return paths


def importances(space: Mapping[str, Axis], records: Sequence[TrialRecord]) -> dict[str, float]:
    """How strongly each field goes together with the score, 0 to 1, most first.

    The size of Spearman's rank correlation; of choices the correlation ratio η, over ranks of the score too. Scores are
    those at the first rung, to which every trial came. Fields are looked at one by one, so what matters only together
    with another is not seen.
    """
    import numpy as np

    scored = [record for record in records if record.scores]
    if len(scored) < 3:
        return dict.fromkeys(space, 0.0)
    score = _ranks(np.array([next(iter(record.scores.values())) for record in scored]))
    found = {}
    for key, axis in space.items():
        values = [record.values[key] for record in scored]
        if axis.form == "choice":
            found[key] = _correlation_ratio([axis.values.index(value) for value in values], score)
        else:
            found[key] = abs(_correlation(_ranks(np.array(values, dtype=float)), score))
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def parallel_coordinates(
    space: Mapping[str, Axis], order: Sequence[TrialRecord], metric: str, *, maximize: bool
) -> "Figure":
    """A line for every trial with a score, across one axis for each field and one for the score."""
    import numpy as np
    from matplotlib import colormaps

    figure = _figure(max(6.4, 1.7 * (len(space) + 1)), 4.2)
    axes = figure.add_subplot()
    scores = np.array([record.score for record in order], dtype=float)
    low, high = float(scores.min()), float(scores.max())
    shade = (scores - low) / (high - low) if high > low else np.ones_like(scores)
    for position, record in reversed(list(enumerate(order))):  # the best on top
        heights = [_height(axis, record.values[key]) for key, axis in space.items()] + [shade[position]]
        complete = record.state == "complete"
        axes.plot(
            range(len(heights)),
            heights,
            color=colormaps["viridis"](0.92 * float(1 - shade[position] if maximize else shade[position])),
            linewidth=2.2 if position == 0 else 1.3,
            linestyle="-" if complete else (0, (4, 2)),
            alpha=1.0 if complete else 0.65,
            zorder=3 if complete else 2,
        )
    for column, axis in enumerate(space.values()):
        for height, text in _marks(axis):
            _mark(axes, column, height, text)
    for height, value in ((0.0, low), (1.0, high)) if high > low else ((1.0, high),):
        _mark(axes, len(space), height, f"{value:.4g}")
    for column in range(len(space) + 1):
        axes.axvline(column, color="#999999", linewidth=0.8, zorder=1)
    axes.set_xticks(range(len(space) + 1), [*(_label(key) for key in space), metric], fontsize=8)
    axes.set_yticks([])
    axes.set_xlim(-0.15, len(space) + 0.5)
    axes.set_ylim(-0.06, 1.06)
    axes.spines[:].set_visible(False)
    axes.set_title("trials: complete drawn through, pruned dashed; dark is the better score", loc="left", fontsize=9)
    return figure


def importance_bars(space: Mapping[str, Axis], order: Sequence[TrialRecord], metric: str) -> "Figure":
    """A bar for every field."""
    found = importances(space, order)
    figure = _figure(6.4, 1.4 + 0.35 * len(found))
    axes = figure.add_subplot()
    names = list(found)[::-1]
    axes.barh(range(len(names)), [found[name] for name in names], color=BLUE, height=0.6)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_xlabel("|Spearman's ρ|, of choices η", fontsize=9)
    where = "at the first rung" if any(len(r.scores) > 1 or r.state == "pruned" for r in order) else "at the end"
    axes.set_title(f"how each field goes with {metric} {where} ({len(order)} trials)", loc="left", fontsize=9)
    _dress(axes)
    return figure


def best_so_far(records: Sequence[TrialRecord], order: Sequence[TrialRecord], metric: str) -> "Figure":
    """Every trial's last score by its number, and the best of those up to it."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(6.4, 3.8)
    axes = figure.add_subplot()
    rank = {record.number: position for position, record in enumerate(order)}
    for state, marker, color in (("complete", "o", BLUE), ("pruned", "x", "#888888")):
        shown = [record for record in order if record.state == state]
        if shown:
            numbers = [record.number for record in shown]
            scores = [record.score or 0.0 for record in shown]  # all of `order` have one
            axes.scatter(numbers, scores, marker=marker, color=color, s=28, label=state, zorder=3)
    failed = [record.number for record in records if record.state == "failed"]
    if failed:
        bottom = min(record.score for record in order if record.score is not None)
        axes.scatter(failed, [bottom] * len(failed), marker="v", color=RED, s=24, label="failed (no score)", zorder=3)
    line, best = [], None
    for record in sorted(order, key=lambda one: one.number):
        best = record if best is None or rank[record.number] < rank[best.number] else best
        line.append((record.number, best.score))
    axes.step(*zip(*line, strict=True), where="post", color=BLUE, linewidth=1.4, label="best so far", zorder=2)
    axes.set_xlabel("trial", fontsize=9)
    axes.set_ylabel(metric, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
    _dress(axes)
    return figure


def _ranks(values: "np.ndarray") -> "np.ndarray":
    """Ranks from 1, equals sharing the mean of theirs."""
    import numpy as np

    return np.array([((values < value).sum() + (values <= value).sum() + 1) / 2 for value in values])


def _correlation(x: "np.ndarray", y: "np.ndarray") -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float((x @ x) * (y @ y)) ** 0.5
    return 0.0 if size == 0 else float(x @ y) / size


def _correlation_ratio(groups: list[int], score: "np.ndarray") -> float:
    """√(variance between the groups / all variance)."""
    import numpy as np

    index = np.array(groups)
    whole = float(((score - score.mean()) ** 2).sum())
    between = sum(
        float((index == group).sum()) * float(score[index == group].mean() - score.mean()) ** 2 for group in set(groups)
    )
    return 0.0 if whole == 0 else (between / whole) ** 0.5


def _height(axis: Axis, value: Any) -> float:
    """Where a value stands on its axis, 0 to 1."""
    import math

    if axis.form == "choice":
        return axis.values.index(value) / (len(axis.values) - 1)
    low, high = axis.values
    if axis.form == "loguniform":
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)


def _marks(axis: Axis) -> list[tuple[float, str]]:
    if axis.form == "choice":
        return [(_height(axis, value), json.dumps(value).strip('"')) for value in axis.values]
    return [(0.0, f"{axis.values[0]:g}"), (1.0, f"{axis.values[1]:g}")]


def _mark(axes: "Axes", column: int, height: float, text: str) -> None:
    box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (column, height), **place, fontsize=7, zorder=4, bbox=box)


def _label(key: str) -> str:
    """A long path on two lines."""
    head, dot, tail = key.rpartition(".")
    return f"{head}{dot}\n{tail}" if dot else key


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _dress(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
