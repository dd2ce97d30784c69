"""The steps `transform` and `consolidate`: map a function over all rows; keep rows by their columns."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.readers import Row
from palestra.data.steps.shards import (
    LEDGER,
    Compression,
    Drop,
    ShardSource,
    Where,
    each_shard,
    map_documents,
    plain_rows,
    sources,
)
from palestra.errors import PalestraError, UsageError
from palestra.runs.store import written
from palestra.spec.imports import load_named
from palestra.spec.model import Execution

NOTHING = "the function gave nothing"
SCORES = "scores"
BOUNDS = {
    "at_least": (">=", operator.ge),
    "at_most": ("<=", operator.le),
    "equals": ("==", operator.eq),
    "one_of": ("in", lambda value, choices: value in choices),
}


def transform(
    out: Path,
    *,
    source: Where,
    function: str,
    args: Mapping[str, Any] | None = None,
    split: str | None = None,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Rows as `function` (`module:function`) makes them: `function(row, **args)` gives a row, several, or None.

    A row that it gives without an `id` keeps that of the row it came from; of several, the number is added.
    """
    load_named(function, "function")  # a wrong name is an error before any work
    recipe = {"function": function, "args": dict(args or {})}
    work = partial(_apply, function, recipe["args"])
    map_documents(out, source, work, "transform", recipe, workers, None, split, compression)


def _apply(name: str, args: Mapping[str, Any], _: int, rows: Iterator[Row]) -> Iterator[Row | Drop]:
    function = load_named(name, "function")
    for row in rows:
        id = row["id"]  # before the call, which may change the row
        result = function(row, **args)
        if result is None or isinstance(result, Mapping):
            yield Drop(NOTHING) if result is None else {"id": id, **result}
            continue
        count = -1
        for count, made in enumerate(result):
            if not isinstance(made, Mapping):
                raise UsageError(
                    f"{name} gave a {type(made).__name__} of row {id}; expected a row (a dict), several, or None"
                )
            yield {**made, "id": f"{id}.{count}" if made.get("id", id) == id else made["id"]}
        if count < 0:
            yield Drop(NOTHING)


@dataclass(frozen=True)
class Rule:
    """What a column must be for a row to stay."""

    column: str
    """Its name; a dotted path reaches into a column that is an object."""
    bound: str
    value: Any

    def holds(self, row: Row) -> bool:
        """Whether a row stays."""
        value = _column(row, self.column)
        if self.bound in ("at_least", "at_most"):
            if value is None:
                return False
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise PalestraError(f"row {row['id']}: {self.column} is {value!r}, and {self.bound} compares numbers")
        return BOUNDS[self.bound][1](value, self.value)

    def __str__(self) -> str:
        return f"{self.column} {BOUNDS[self.bound][0]} {self.value}"


def consolidate(
    out: Path,
    *,
    source: Where,
    keep: Sequence[Mapping[str, Any]] = (),
    keep_fraction: float | None = None,
    by: str | None = None,
    without: Sequence[str] = (),
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Keep the rows that satisfy all rules and, of those, the share `keep_fraction` whose column `by` is the largest.

    A rule is `{column: quality, at_least: 0.5}`, with at_least, at_most, equals or one_of. Of equal scores the earlier
    rows are kept. `without` names columns to take out, such as the scores themselves.
    """
    rules = tuple(_rule(number, entry) for number, entry in enumerate(keep))
    if (keep_fraction is None) != (by is None):
        raise UsageError("keep_fraction and by go together: the share of rows to keep, and the column that ranks them")
    if keep_fraction is not None and not 0 < keep_fraction <= 1:
        raise UsageError(f"keep_fraction: expected a share in (0, 1], got {keep_fraction:g}")
    kept = [asdict(rule) for rule in rules]
    recipe = {"keep": kept, "keep_fraction": keep_fraction, "by": by, "without": list(without)}
    best: Best | None = None
    counts: dict[str, Any] = {}
    if keep_fraction is not None and by is not None:
        shards = sources(source)
        results = each_shard(out, SCORES, shards, partial(_scores, out, by, rules), workers=workers)
        best = _best(out, shards, keep_fraction)
        recipe["threshold"] = best.threshold  # shards that an earlier attempt did had the same
        counts = {"threshold": best.threshold, "scored": sum(result["scored"] for result in results)}
    work = partial(_keep, rules, by, best, tuple(without))
    map_documents(out, source, work, "consolidate", recipe, workers, None, None, compression, counts=counts)


@dataclass(frozen=True)
class Best:
    """Which scores are among the best."""

    threshold: float
    """Above it all are kept, of those equal to it as many of each shard as `equals` says."""
    equals: tuple[int, ...]


def _keep(
    rules: tuple[Rule, ...],
    by: str | None,
    best: Best | None,
    without: tuple[str, ...],
    number: int,
    rows: Iterator[Row],
) -> Iterator[Row | Drop]:
    """The rows of a shard that satisfy the rules and are among the best."""
    equals_left = 0 if best is None else best.equals[number]
    for row in rows:
        if (broken := next((rule for rule in rules if not rule.holds(row)), None)) is not None:
            yield Drop(f"not {broken}")
            continue
        if best is not None and by is not None:
            score = _score(row, by)
            equals_left -= score == best.threshold
            if score < best.threshold or (score == best.threshold and equals_left < 0):
                yield Drop(f"not among the best by {by}")
                continue
        yield {key: value for key, value in row.items() if key not in without}


def _scores(out: Path, by: str, rules: tuple[Rule, ...], source: ShardSource) -> dict[str, Any]:
    """The scores of a shard's rows that satisfy the rules, into a file; runs in a worker."""
    scores = [_score(row, by) for row in plain_rows(source) if all(rule.holds(row) for rule in rules)]
    with written(_scores_file(out, source)) as file:
        np.save(file, np.array(scores, np.float64))
    return {"scored": len(scores)}


def _best(out: Path, shards: Sequence[ShardSource], fraction: float) -> Best:
    """The threshold over all shards; takes eight bytes of memory a row."""
    scores = [np.load(_scores_file(out, shard)) for shard in shards]
    joined = np.concatenate(scores)
    if not len(joined):
        return Best(math.inf, (0,) * len(shards))
    count = math.ceil(fraction * len(joined))
    threshold = float(np.partition(joined, len(joined) - count)[len(joined) - count])
    room, equals = count - int((joined > threshold).sum()), []
    for of_shard in scores:
        equals.append(min(room, int((of_shard == threshold).sum())))
        room -= equals[-1]
    return Best(threshold, tuple(equals))


def _scores_file(out: Path, source: ShardSource) -> Path:
    return out / LEDGER / SCORES / f"{source.number:05}.npy"


def _score(row: Row, by: str) -> float:
    score = _column(row, by)
    if isinstance(score, bool) or not isinstance(score, int | float) or math.isnan(score):
        raise PalestraError(f"row {row['id']}: by: {by} is {score!r}, not a score; give every row one first")
    return float(score)


def _column(row: Row, path: str) -> Any:
    value: Any = row
    for key in [path] if path in row else path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _rule(number: int, entry: Mapping[str, Any]) -> Rule:
    bounds = [key for key in entry if key != "column"]
    if "column" not in entry or len(bounds) != 1 or bounds[0] not in BOUNDS:
        raise UsageError(
            f"keep.{number}: expected a column and one of {', '.join(BOUNDS)}, such as "
            f"{{column: quality, at_least: 0.5}}; got {dict(entry)}"
        )
    return Rule(str(entry["column"]), bounds[0], entry[bounds[0]])
