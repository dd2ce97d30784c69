"""The steps `transform` and `consolidate`: a function over all rows, and rows kept by what earlier steps found."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.readers import Row
from palestra.data.steps.shards import (
    LEDGER,
    ByShard,
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
from palestra.spec.imports import load_function
from palestra.spec.model import Execution

NOTHING = "the function gave nothing"


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
    load_function(function, "function")  # a wrong name is told before any work
    work = _Apply(function, dict(args or {}))
    recipe = {"function": function, "args": work.args}
    map_documents(
        out,
        source,
        work,
        step="transform",
        recipe=recipe,
        workers=workers,
        text_key=None,
        split=split,
        compression=compression,
    )


@dataclass(frozen=True)
class _Apply:
    function: str
    args: dict[str, Any] = field(default_factory=dict)

    def __call__(self, rows: Iterator[Row]) -> Iterator[Row | Drop]:
        apply = load_function(self.function, "function")
        for row in rows:
            given = row["id"]
            made = apply(row, **self.args)
            if made is None:
                yield Drop(NOTHING)
            elif isinstance(made, Mapping):
                yield {"id": given, **made}
            else:
                count = -1
                for count, one in enumerate(made):
                    if not isinstance(one, Mapping):
                        raise UsageError(
                            f"{self.function} gave a {type(one).__name__} of row {given}; expected a row (a dict), "
                            "several, or None"
                        )
                    same = one.get("id", given) == given
                    yield {**one, "id": f"{given}.{count}" if same else one["id"]}
                if count < 0:
                    yield Drop(NOTHING)


SCORES = "scores"
BOUNDS = ("at_least", "at_most", "equals", "one_of")


@dataclass(frozen=True)
class Rule:
    """What a column must be for a row to stay."""

    column: str
    """Its name; a dotted path reaches into a column that is an object."""
    bound: str
    value: Any

    def holds(self, row: Row) -> bool:
        """Whether a row stays."""
        found = _column(row, self.column)
        match self.bound:
            case "equals":
                return found == self.value
            case "one_of":
                return found in self.value
        if found is None:
            return False
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise PalestraError(f"row {row['id']}: {self.column} is {found!r}, and {self.bound} compares numbers")
        return found >= self.value if self.bound == "at_least" else found <= self.value

    def __str__(self) -> str:
        signs = {"at_least": ">=", "at_most": "<=", "equals": "==", "one_of": "in"}
        return f"{self.column} {signs[self.bound]} {self.value}"


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
    rules = tuple(_rule(number, one) for number, one in enumerate(keep))
    if (keep_fraction is None) != (by is None):
        raise UsageError("keep_fraction and by go together: the share of rows to keep, and the column that ranks them")
    if keep_fraction is not None and not 0 < keep_fraction <= 1:
        raise UsageError(f"keep_fraction: expected a share in (0, 1], got {keep_fraction:g}")
    recipe = {
        "keep": [asdict(rule) for rule in rules],
        "keep_fraction": keep_fraction,
        "by": by,
        "without": list(without),
    }
    best: Best | None = None
    more: dict[str, Any] = {}
    if keep_fraction is not None and by is not None:
        given = sources(source)
        counts = each_shard(out, SCORES, given, partial(_scores, out, by, rules), workers=workers)
        best = _best(out, given, keep_fraction)
        recipe["threshold"] = best.threshold  # shards that an earlier attempt did had the same
        more = {"threshold": best.threshold, "scored": sum(one["scored"] for one in counts)}
    work = ByShard(partial(_Keep.of, rules, by, best, tuple(without)))
    map_documents(
        out,
        source,
        work,
        step="consolidate",
        recipe=recipe,
        workers=workers,
        text_key=None,
        compression=compression,
        **more,
    )


@dataclass(frozen=True)
class Best:
    """Which scores are among the best."""

    threshold: float
    """Above it all are kept, of those equal to it as many of each shard as `equals` says."""
    equals: tuple[int, ...]


@dataclass
class _Keep:
    rules: tuple[Rule, ...]
    by: str | None
    best: Best | None
    without: tuple[str, ...]
    equals_left: int = 0

    @classmethod
    def of(
        cls, rules: tuple[Rule, ...], by: str | None, best: Best | None, without: tuple[str, ...], number: int
    ) -> "_Keep":
        return cls(rules, by, best, without, 0 if best is None else best.equals[number])

    def __call__(self, rows: Iterator[Row]) -> Iterator[Row | Drop]:
        for row in rows:
            broken = next((rule for rule in self.rules if not rule.holds(row)), None)
            if broken is not None:
                yield Drop(f"not {broken}")
            elif self.best is not None and self.by is not None and not self._among_best(row, self.by, self.best):
                yield Drop(f"not among the best by {self.by}")
            else:
                yield {key: value for key, value in row.items() if key not in self.without}

    def _among_best(self, row: Row, by: str, best: Best) -> bool:
        score = _score(row, by)
        if score != best.threshold:
            return score > best.threshold
        self.equals_left -= 1
        return self.equals_left >= 0


def _scores(out: Path, by: str, rules: tuple[Rule, ...], source: ShardSource) -> dict[str, Any]:
    """The scores of a shard's rows that satisfy the rules, into a file; runs in a worker."""
    found = [_score(row, by) for row in plain_rows(source) if all(rule.holds(row) for rule in rules)]
    with written(_scores_file(out, source)) as file:
        np.save(file, np.array(found, np.float64))
    return {"scored": len(found)}


def _best(out: Path, given: Sequence[ShardSource], fraction: float) -> Best:
    """The threshold over all shards; eight bytes a row are held."""
    scores = [np.load(_scores_file(out, one)) for one in given]
    joined = np.concatenate(scores)
    count = math.ceil(fraction * len(joined))
    if not len(joined):
        return Best(math.inf, tuple(0 for _ in given))
    threshold = float(np.partition(joined, len(joined) - count)[len(joined) - count])
    room = count - int((joined > threshold).sum())
    equals = []
    for one in scores:
        equals.append(min(room, int((one == threshold).sum())))
        room -= equals[-1]
    return Best(threshold, tuple(equals))


def _scores_file(out: Path, source: ShardSource) -> Path:
    return out / LEDGER / SCORES / f"{source.number:05}.npy"


def _score(row: Row, by: str) -> float:
    found = _column(row, by)
    if isinstance(found, bool) or not isinstance(found, int | float) or math.isnan(found):
        raise PalestraError(f"row {row['id']}: by: {by} is {found!r}, which is no score; give it to all rows first")
    return float(found)


def _column(row: Row, path: str) -> Any:
    value: Any = row
    for key in [path] if path in row else path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _rule(number: int, written_as: Mapping[str, Any]) -> Rule:
    bounds = [key for key in written_as if key != "column"]
    if "column" not in written_as or len(bounds) != 1 or bounds[0] not in BOUNDS:
        raise UsageError(
            f"keep.{number}: expected a column and one of {', '.join(BOUNDS)}, such as "
            f"{{column: quality, at_least: 0.5}}; got {dict(written_as)}"
        )
    return Rule(str(written_as["column"]), bounds[0], written_as[bounds[0]])
