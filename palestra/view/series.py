"""Metrics as series: columns of metrics.jsonl, read as it grows; seeds on one axis; as many points as a chart shows."""

import json
import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from palestra.bench.results import bootstrap_interval
from palestra.runs.plot import AXES, POSITION, leading_metrics
from palestra.track.trace import NAMES
from palestra.view.lines import LineFile, step_of

FILE = "metrics.jsonl"
WHOLE = 48 << 20  # bytes; of a longer file rows at even distances are read
SAMPLED = 6000  # rows
CACHE = 120 << 20  # bytes of all columns
MISSING, LARGEST = float("nan"), 1e300


@dataclass
class Columns:
    """The numbers of a file by metric, NaN where a row has none; `cursor` is the first byte not read yet."""

    cursor: int = 0
    before: str = ""
    rows: int = 0
    skipped: int = 0
    sampled: int = 0
    """The size of the file of which only some rows were read."""
    values: dict[str, array] = field(default_factory=dict)

    def add(self, lines: Iterable[Any]) -> None:
        """Append the rows of lines; those that are not rows are counted."""
        for line in lines:
            self.cursor, row = line.end, parsed(line.data)
            for name, value in (row or {}).items():
                if isinstance(value, int | float) and abs(value) < LARGEST:
                    column = self.values.setdefault(name, array("d"))
                    column.extend([MISSING] * (self.rows - len(column)))
                    column.append(value)
            self.skipped += row is None
            self.rows += row is not None

    def column(self, name: str) -> np.ndarray:
        """A metric by row."""
        values, known = np.full(self.rows, MISSING), self.values.get(name, array("d"))[: self.rows]
        values[: len(known)] = known
        return values


def parsed(data: bytes | None) -> dict[str, Any] | None:
    """The object of a line; None if it is not one."""
    try:
        row = json.loads(data) if data is not None else None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class Metrics:
    """Columns of many files, those used last kept in memory; of a file that grew only the new rows are read."""

    def __init__(self, limit: int = CACHE):
        self._limit, self._lock = limit, threading.Lock()
        self._files: OrderedDict[Path, Columns] = OrderedDict()

    def read(self, path: Path) -> Columns:
        """The columns of a file; none of one that is not there yet."""
        if not path.is_file():
            return Columns()
        with self._lock:
            with LineFile(path) as file:
                columns = self._files.pop(path, None)
                # A resume truncates the file; of one that grows long the sample must keep its even distances.
                fits = columns is not None and columns.before == file.before(columns.cursor)
                if columns is None or not fits or file.end > 1.1 * max(columns.sampled, WHOLE):
                    columns = Columns(sampled=file.end if file.end > WHOLE else 0)
                    columns.add(file.spread(SAMPLED) if columns.sampled else ())
                columns.add(file.lines(columns.cursor))
                columns.before = file.before(columns.cursor)
            self._files[path] = columns
            cells = sum(one.rows * len(one.values) for one in self._files.values())
            while len(self._files) > 1 and 8 * cells > self._limit:
                _, dropped = self._files.popitem(last=False)
                cells -= dropped.rows * len(dropped.values)
            return columns

    def window(self, path: Path, x: str, low: float, high: float) -> Columns:
        """The same; of a long file all rows between two places of a counter, if these are not too many."""
        columns = self.read(path)
        steps, (first, last) = columns.column("step"), np.searchsorted(columns.column(x), (low, high))
        if not columns.sampled or x == "time" or last - first == len(steps):
            return columns
        with LineFile(path) as file:
            start = file.search(step_of, steps[max(0, first - 1)])
            end = file.search(step_of, steps[min(last, len(steps) - 1)] + 1)
            part = Columns()
            part.add(file.lines(start, end) if end - start < WHOLE else ())
        return part if part.rows else columns


def axis(columns: Columns, x: str) -> np.ndarray:
    """The values of an axis: a counter, or the seconds that were spent in the parts of a step."""
    if x != "time":
        return columns.column(x)
    spans = [column for name in NAMES if not np.isnan(column := columns.column(f"time/{name}")).all()]
    return np.cumsum(np.nansum(spans, axis=0)) if spans else columns.column(x)


def thinned(x: np.ndarray, y: np.ndarray, points: int) -> np.ndarray:
    """The indices of at most `points` values: the first, the last, and the least and greatest of each bucket."""
    if len(x) <= points:
        return np.arange(len(x))
    edges = np.linspace(0, len(x), max(points // 2, 2), dtype=int)
    chosen = {0, len(x) - 1}
    for low, high in pairwise(edges.tolist()):
        piece = y[low:high]
        if high > low and not np.isnan(piece).all():
            chosen |= {low + int(np.nanargmin(piece)), low + int(np.nanargmax(piece))}
    return np.array(sorted(chosen))


def series(
    sessions: Mapping[int, Columns], metric: str, x: str, points: int, window: tuple[float, float]
) -> dict[str, Any] | None:
    """One metric over an axis: a list a seed, their mean, and one standard deviation around it where there are several.

    Seeds are put on the union of their axes, between their own first and last value.
    """
    curves = {}
    for seed, columns in sessions.items():
        xs, ys = axis(columns, x), columns.column(metric)
        known = ~np.isnan(xs) & ~np.isnan(ys) & (xs >= window[0]) & (xs <= window[1])
        if known.any():
            curves[seed] = xs[known], ys[known]
    if not curves:
        return None
    grid = np.unique(np.concatenate([xs for xs, _ in curves.values()]))
    ys = np.stack([np.interp(grid, *curve, left=MISSING, right=MISSING) for curve in curves.values()])
    mean = np.nanmean(ys, axis=0)
    chosen = thinned(grid, mean, points)
    result: dict[str, Any] = {"x": plain(grid[chosen]), "mean": plain(mean[chosen])}
    if len(curves) > 1:
        spread = np.nanstd(ys, axis=0)
        result |= {"low": plain((mean - spread)[chosen]), "high": plain((mean + spread)[chosen])}
        result["seeds"] = {str(seed): plain(row[chosen]) for seed, row in zip(curves, ys, strict=True)}
    return result


def plain(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """Numbers as JSON holds them: six digits, null for what is not finite."""
    return [float(f"{value:.8g}") if math.isfinite(value) else None for value in np.asarray(values, float).tolist()]


def finals(sessions: Mapping[int, Columns], metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The last values: the mean over seeds and its 95 % interval, by bootstrap or by the standard error of one seed."""
    found: dict[str, dict[str, Any]] = {}
    for metric in metrics:
        columns = ((one.column(metric), one.column(f"{metric}_se")) for one in sessions.values())
        ended = ((values, errors, np.flatnonzero(~np.isnan(values))[-1:]) for values, errors in columns)
        lasts = [(values[last[0]], errors[last[0]]) for values, errors, last in ended if len(last)]
        if lasts:
            values, (_, error) = [float(value) for value, _ in lasts], lasts[0]
            low, high = bootstrap_interval(values) if len(values) > 1 else values[0] + 1.96 * error * np.array([-1, 1])
            found[metric] = {"value": fmean(values), "seeds": len(values), "low": float(low), "high": float(high)}
    return found


def names(sessions: Iterable[Columns]) -> dict[str, Any]:
    """The metrics of a run, those that matter first, and the axes it has."""
    known = dict.fromkeys(name for columns in sessions for name in columns.values)
    metrics = [name for name in known if name not in POSITION]
    return {
        "axes": [name for name in AXES if name in known] + ["time"],
        "leading": leading_metrics(metrics) if "reward" in metrics else [one for one in metrics if one[:5] != "time/"],
        "metrics": metrics,
    }
