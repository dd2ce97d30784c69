"""Plots of a search: parallel coordinates of the trials, importance of each field, best score so far."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.runs.plot import PALETTE, new_figure, style_axes
from palestra.search.study import TrialRecord
from palestra.spec.blocks import Axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def search_plots(
    folder: Path,
    space: Mapping[str, Axis],
    records: Sequence[TrialRecord],
    order: Sequence[TrialRecord],
    metric: str,
    *,
    maximize: bool,
) -> None:
    """Write parallel_coordinates, importance and best_so_far as PNG; `order`: trials with a score, best first."""
    folder.mkdir(parents=True, exist_ok=True)
    trials = new_figure(max(6.4, 1.7 * (len(space) + 1)), 4.2)
    _parallel_coordinates(trials.add_subplot(), space, order, metric, maximize=maximize)
    importance = new_figure(6.4, 1.4 + 0.35 * len(space))
    _importance_bars(importance.add_subplot(), importances(space, order), order, metric)
    best = new_figure(6.4, 3.8)
    _best_so_far(best.add_subplot(), records, order, metric)
    for name, figure in (("parallel_coordinates", trials), ("importance", importance), ("best_so_far", best)):
        figure.savefig(folder / f"{name}.png", dpi=150)


def importances(space: Mapping[str, Axis], records: Sequence[TrialRecord]) -> dict[str, float]:
    """How strongly each field correlates with the score, 0 to 1, highest first.

    The absolute value of Spearman's rank correlation; for choices the correlation ratio η over ranks of the score.
    Scores are those at the first rung, which every trial reached. Interactions between fields are not measured.
    """
    import numpy as np

    def ranks(values: Any) -> "np.ndarray":
        values = np.asarray(values, dtype=float)  # equal values share the mean of their ranks
        return np.array([((values < value).sum() + (values <= value).sum()) / 2 for value in values])

    scored = [record for record in records if record.scores]
    if len(scored) < 3:
        return dict.fromkeys(space, 0.0)
    score = ranks([next(iter(record.scores.values())) for record in scored])
    importance = {}
    for key, axis in space.items():
        values = [record.values[key] for record in scored]
        if axis.form == "choice":  # η is the correlation of the scores with the mean of their group
            x = np.array([score[[other == value for other in values]].mean() for value in values])
        else:
            x = ranks(values)
        importance[key] = abs(float(np.corrcoef(x, score)[0, 1])) if np.ptp(x) and np.ptp(score) else 0.0
    return dict(sorted(importance.items(), key=lambda item: -item[1]))


def _parallel_coordinates(
    axes: "Axes", space: Mapping[str, Axis], order: Sequence[TrialRecord], metric: str, *, maximize: bool
) -> None:
    """A line for every trial with a score, across one axis for each field and one for the score."""
    import numpy as np
    from matplotlib import colormaps

    scores = np.array([record.score for record in order], dtype=float)
    low, high = float(scores.min()), float(scores.max())
    height = (scores - low) / (high - low) if high > low else np.ones_like(scores)
    for rank, record in reversed(list(enumerate(order))):  # the best on top
        heights = [_height(axis, record.values[key]) for key, axis in space.items()] + [height[rank]]
        complete = record.state == "complete"
        axes.plot(
            range(len(heights)),
            heights,
            color=colormaps["viridis"](0.92 * float(1 - height[rank] if maximize else height[rank])),
            linewidth=2.2 if rank == 0 else 1.3,
            linestyle="-" if complete else (0, (4, 2)),
            alpha=1.0 if complete else 0.65,
            zorder=3 if complete else 2,
        )
    marks = []
    for column, axis in enumerate(space.values()):
        text = json.dumps if axis.form == "choice" else "{:g}".format
        marks += [(column, _height(axis, value), text(value).strip('"')) for value in axis.values]
    marks += [(len(space), 1.0, f"{high:.4g}"), *([(len(space), 0.0, f"{low:.4g}")] if high > low else [])]
    box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
    style: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 7}
    for column, y, text in marks:
        axes.annotate(text, (column, y), **style, zorder=4, bbox=box)
    for column in range(len(space) + 1):
        axes.axvline(column, color="#999999", linewidth=0.8, zorder=1)
    labels = [".\n".join(key.rsplit(".", 1)) for key in space]  # a long path on two lines
    axes.set_xticks(range(len(space) + 1), [*labels, metric], fontsize=8)
    axes.set_yticks([])
    axes.set_xlim(-0.15, len(space) + 0.5)
    axes.set_ylim(-0.06, 1.06)
    axes.spines[:].set_visible(False)
    axes.set_title("trials: complete solid, pruned dashed; darker is better", loc="left", fontsize=9)


def _height(axis: Axis, value: Any) -> float:
    """The position of a value on its axis, 0 to 1."""
    if axis.form == "choice":
        return axis.values.index(value) / (len(axis.values) - 1)
    low, high = axis.values
    if axis.form == "loguniform":
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / (high - low)


def _importance_bars(axes: "Axes", importance: Mapping[str, float], order: Sequence[TrialRecord], metric: str) -> None:
    names = list(importance)[::-1]
    axes.barh(range(len(names)), [importance[name] for name in names], color=PALETTE[0], height=0.6)
    style_axes(axes)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1)
    axes.set_xlabel("|Spearman's ρ|; of choices η", fontsize=9)
    where = "at the first rung" if any(len(r.scores) > 1 or r.state == "pruned" for r in order) else "at the end"
    axes.set_title(f"correlation of each field with {metric} {where} ({len(order)} trials)", loc="left", fontsize=9)


def _best_so_far(axes: "Axes", records: Sequence[TrialRecord], order: Sequence[TrialRecord], metric: str) -> None:
    """Every trial's last score by its number, and the best of those up to it."""
    from matplotlib.ticker import MaxNLocator

    scores = {record.number: record.score or 0.0 for record in order}  # all of `order` have one
    for state, label, marker, color in (
        ("complete", "complete", "o", PALETTE[0]),
        ("pruned", "pruned", "x", "#888888"),
        ("failed", "failed (no score)", "v", PALETTE[1]),
    ):
        numbers = [record.number for record in records if record.state == state]
        if numbers:
            ys = [scores.get(number, min(scores.values())) for number in numbers]
            axes.scatter(numbers, ys, marker=marker, color=color, s=28, label=label, zorder=3)
    rank = {record.number: index for index, record in enumerate(order)}
    numbers = sorted(scores)
    best = [scores[min(numbers[: index + 1], key=lambda number: rank[number])] for index in range(len(numbers))]
    axes.step(numbers, best, where="post", color=PALETTE[0], linewidth=1.4, label="best so far", zorder=2)
    style_axes(axes)
    axes.set_xlabel("trial", fontsize=9)
    axes.set_ylabel(metric, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)
