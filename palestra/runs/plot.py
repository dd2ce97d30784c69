"""Learning curves of runs: mean ± band over seeds, as PNG for the screen and SVG for paper."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import PalestraError, UsageError, did_you_mean
from palestra.runs.run import MEAN, Measured, Run, measured

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger("palestra.runs")

# Okabe and Ito's colorblind-safe palette; its yellow is too faint for a line.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINE_STYLES = ("-", "--", ":")  # the next one when the palette is used up
FAINT_SEEDS = 5  # with more seeds the single lines hide the band
GRID_LIMIT = 18  # metrics in one picture
AXES = {"frame": "environment frames", "tokens": "training tokens", "step": "training steps"}
POSITION = {"seed", "step", "frame", "tokens"}  # columns of metrics.jsonl that say where, not what
# The metrics of post-training in the order they matter: learning, exploration, drift, length.
LEADING = ("reward", "eval", "entropy", "kl_reference", "kl_behaviour", "length", "truncated", "grad_norm")


@dataclass(frozen=True)
class Curve:
    """One metric of one run over its seeds: `ys` has a row per seed, at the shared `x`."""

    x: "np.ndarray"
    ys: "np.ndarray"


def curves(runs: Sequence[Run], *, metric: str, x: str | None = None, out: Path) -> list[Path]:
    """Plot one metric of one or more runs to `out`.png and `out`.svg; the band is one standard deviation.

    Without `x` it is plotted over frames or tokens if the runs count them.
    """
    tables = [run.metrics() for run in runs]
    columns = {key for rows in tables for row in rows for key in row}
    x = x or counted_by(columns)
    if columns and x not in columns:
        known = ", ".join(repr(name) for name in AXES if name in columns)
        raise UsageError(f"--x {x}: no such column; choose one of {known}")
    known = sorted(columns - POSITION - {metric})  # its own values are all NaN, if it is one
    drawn = [(run, curve) for run, rows in zip(runs, tables, strict=True) if (curve := seed_curve(rows, metric, x))]
    if not drawn:
        hint = did_you_mean(metric, known, f"There are: {', '.join(known) or 'no metrics yet'}.")
        raise UsageError(f"no values of {metric!r} by {x!r} in {', '.join(map(str, (r.path for r in runs)))}. {hint}")
    missing = [f"{run.name}/{run.id}" for run in runs if run not in [other for other, _ in drawn]]
    if missing:
        log.warning("no values of %r in %s: left out of the plot", metric, ", ".join(missing))
    figure = new_figure(6.4, 4.0)
    axes = figure.add_subplot()
    names = [run.name for run, _ in drawn]
    for index, (run, curve) in enumerate(drawn):
        name = run.name if names.count(run.name) == 1 else f"{run.name} {run.id}"
        seeds = len(curve.ys)
        _draw(axes, curve, index, f"{name} ({seeds} seed{'s' if seeds > 1 else ''})")
    style_axes(axes, x)
    axes.set_xlabel(AXES.get(x, words(x)))
    axes.set_ylabel(words(metric))
    meaning = "mean ± standard deviation" if any(len(curve.ys) > 1 for _, curve in drawn) else None
    axes.legend(frameon=False, fontsize=9, loc="best", title=meaning, title_fontsize=8, alignment="left")
    return save_figure(figure, out)


def trial_plots(run: Run) -> list[Path]:
    """Write the standard plots into the run's folder: the headline metric's curve and a grid of the other metrics."""
    first, rows = headline(run), run.metrics()
    metrics = [key for key in numeric(rows) if not key.startswith("time/")]
    x = counted_by({key for row in rows for key in row})
    written = curves([run], metric=first, x=x, out=run.path / "plots" / "learning_curve")
    leading = leading_metrics(metrics) if "reward" in metrics else []  # of completions: post-training
    others = [key for key in metrics if key not in (first, *leading) and not key.startswith("suite/")]
    if leading:
        others.sort(key=lambda key: key.startswith("eval/"))  # details of evaluations last
    drawn = {key: curve for key in (*leading, *others) if (curve := seed_curve(rows, key, x))}
    errors = {key: drawn.pop(f"{key}_se") for key in list(drawn) if f"{key}_se" in drawn}
    # Metrics that are constant but for rounding are left out, unless there are no others.
    changing = {key: curve for key, curve in drawn.items() if key in leading or _changes(curve)}
    shown = list((changing or drawn).items())[:GRID_LIMIT]
    if shown:
        written += save_figure(_grid(shown, x, errors), run.path / "plots" / "metrics")
    return written + suite_plots(run)


def suite_plots(run: Run) -> list[Path]:
    """A plot of each suite: its tasks over the steps; bars if it was measured once."""
    results = measured(run)
    written: list[Path] = []
    for suite in dict.fromkeys(result.suite for result in results):
        mine = [result for result in results if result.suite == suite]
        several = len({result.step for result in mine}) > 1
        # Accuracies share an axis; bits per byte need their own.
        panels = {
            "accuracy": [result for result in mine if result.type != "texts"],
            "bits per byte": [result for result in mine if result.type == "texts"],
        }
        panels = {name: some for name, some in panels.items() if some}
        tasks = max(len({result.task for result in some}) for some in panels.values())
        figure = new_figure(6.4 * len(panels), 4.0 if several else 1.2 + 0.26 * tasks)
        for place, (name, some) in enumerate(panels.items()):
            (_suite_curves if several else _suite_bars)(figure.add_subplot(1, len(panels), place + 1), some, name)
        figure.suptitle(f"{run.name}: suite {suite}", fontsize=10)
        written += save_figure(figure, run.path / "plots" / f"suite_{suite}")
    return written


def _suite_curves(axes: "Axes", results: Sequence[Measured], name: str) -> None:
    for index, task in enumerate(dict.fromkeys(result.task for result in results)):
        curve = seed_curve([asdict(result) for result in results if result.task == task], "value", "step")
        if curve is None:
            continue
        if task == MEAN:
            axes.plot(curve.x, curve.ys.mean(0), color="#000000", linewidth=2.4, label="mean, centered", zorder=4)
        else:
            _draw(axes, curve, index, task)
    style_axes(axes, "step")
    axes.set_xlabel(AXES["step"])
    axes.set_ylabel(name)
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _suite_bars(axes: "Axes", results: Sequence[Measured], name: str) -> None:
    tasks = list(dict.fromkeys(result.task for result in results))[::-1]  # the first on top
    values = [[result.value for result in results if result.task == task] for task in tasks]
    axes.barh(range(len(tasks)), [sum(some) / len(some) for some in values], color=PALETTE[0], height=0.6)
    for place, some in enumerate(values):
        if len(some) > 1:
            axes.plot(some, [place] * len(some), ".", color="#000000", markersize=4)  # one per seed
    style_axes(axes, "value")
    axes.set_yticks(range(len(tasks)), ["mean, centered" if task == MEAN else task for task in tasks])
    axes.set_ylim(-0.6, len(tasks) - 0.4)
    axes.set_xlabel(name)


def headline(run: Run) -> str:
    """The main metric: the first of the progress line that has values."""
    metrics = [key for key in numeric(run.metrics()) if not key.startswith("time/")]
    if not metrics:
        raise PalestraError(f"{run.path} has no metrics to plot yet")
    return next((key for key in run.progress()["headline"] if key in metrics), metrics[0])


def counted_by(columns: set[str]) -> str:
    """The column that curves of these columns are drawn over."""
    return next((name for name in AXES if name in columns), "step")


def leading_metrics(metrics: Sequence[str]) -> list[str]:
    """The metrics to show first; evaluations are those of the tasks, which have standard errors, or their mean."""
    tasks = [key for key in metrics if key.startswith("eval/") and key.endswith("/accuracy") and f"{key}_se" in metrics]
    evaluations = tasks if 1 <= len(tasks) <= 3 else ["eval/accuracy"]
    leading = [key for name in LEADING for key in (evaluations if name == "eval" else [name])]
    return [key for key in leading if key in metrics]


def _grid(metrics: list[tuple[str, Curve]], x: str, errors: Mapping[str, Curve]) -> "Figure":
    columns = min(3, len(metrics))
    lines = math.ceil(len(metrics) / columns)
    figure = new_figure(3.4 * columns, 2.4 * lines)
    # Panels of one size need no layout engine, which takes longer than the drawing. The margins are in inches.
    figure.set_layout_engine(None)
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.7 / width, right=1 - 0.1 / width, bottom=0.5 / height, top=1 - 0.4 / height, wspace=0.25, hspace=0.35
    )
    for index, (metric, curve) in enumerate(metrics):
        axes = figure.add_subplot(lines, columns, index + 1)
        _draw(axes, curve, 0, None)
        if metric in errors:
            mean, (seeds, *_) = curve.ys.mean(0), curve.ys.shape
            spread = (errors[metric].ys ** 2).sum(0) ** 0.5 / seeds  # of the mean over independent seeds
            axes.errorbar(curve.x, mean, yerr=spread, fmt="o", color=PALETTE[0], markersize=3, capsize=2, linewidth=1)
        style_axes(axes, x)
        axes.set_title(f"{words(metric)} ± SE" if metric in errors else words(metric), loc="left", fontsize=9)
        if index + columns >= len(metrics):  # the lowest plot of each column
            axes.set_xlabel(AXES.get(x, words(x)), fontsize=9)
    return figure


def _changes(curve: Curve) -> bool:
    low, high = curve.ys.min(), curve.ys.max()
    return high - low > 1e-5 * max(abs(low), abs(high))


def seed_curve(rows: list[dict[str, Any]], metric: str, x: str) -> Curve | None:
    """The metric of each seed on the range of x that all seeds share; None if no seed has it."""
    import numpy as np

    seeds: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if _is_number(row.get(metric)) and _is_number(row.get(x)):
            seeds.setdefault(row["seed"], []).append((row[x], row[metric]))
    if not seeds:
        return None
    series = [np.array(sorted(points), dtype=float).T for points in seeds.values()]
    first, last = max(xs[0] for xs, _ in series), min(xs[-1] for xs, _ in series)
    grid = np.unique(np.concatenate([xs for xs, _ in series]))
    shared = grid[(grid >= first) & (grid <= last)]
    if not len(shared):  # the seeds have no x in common: nothing can be averaged
        return None
    return Curve(shared, np.stack([np.interp(shared, xs, ys) for xs, ys in series]))


def _draw(axes: "Axes", curve: Curve, index: int, label: str | None) -> None:
    color = PALETTE[index % len(PALETTE)]
    style = LINE_STYLES[index // len(PALETTE) % len(LINE_STYLES)]
    mean = curve.ys.mean(0)
    marker = "o" if len(curve.x) == 1 else None
    axes.plot(curve.x, mean, color=color, linestyle=style, linewidth=1.6, marker=marker, label=label, zorder=3)
    if len(curve.ys) == 1:
        return
    spread = curve.ys.std(0)
    axes.fill_between(curve.x, mean - spread, mean + spread, color=color, alpha=0.18, linewidth=0, zorder=1)
    if len(curve.ys) <= FAINT_SEEDS:
        axes.plot(curve.x, curve.ys.T, color=color, linewidth=0.6, alpha=0.3, zorder=2)


def new_figure(width: float, height: float) -> "Figure":
    """A figure without pyplot's global state, so that this works in any thread."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def style_axes(axes: "Axes", x: str = "") -> None:
    """Ticks, grid and spines as in all plots; `x` is the column of metrics.jsonl on the x-axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.margins(x=0.01)
    if x in AXES:
        axes.set_xlim(left=0)  # counts begin there
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        if max(map(abs, axis.get_view_interval())) >= 10_000:
            axis.set_major_formatter(FuncFormatter(lambda value, position: _short(value)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _short(value: float) -> str:
    """1200000 as 1.2M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def save_figure(figure: "Figure", out: Path) -> list[Path]:
    """Write `out`.png and `out`.svg."""
    out = out.with_suffix("") if out.suffix in (".png", ".svg") else out
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = [out.with_name(f"{out.name}.{kind}") for kind in ("png", "svg")]
    # Laid out once, not again for each format: that takes longer than drawing.
    if (layout := figure.get_layout_engine()) is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)
    for path in paths:
        figure.savefig(path, dpi=200)
    return paths


def numeric(rows: list[dict[str, Any]]) -> list[str]:
    """The metrics that have a number somewhere, in the order they first appear."""
    keys = {key: None for row in rows for key, value in row.items() if _is_number(value)}
    return [key for key in keys if key not in POSITION]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def words(name: str) -> str:
    """The name of a metric as an axis label."""
    return name.replace("eval/", "evaluation ").replace("/", " ").replace("_", " ")
