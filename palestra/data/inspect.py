"""Statistics of a data set: columns and their types, sizes, row counts, lengths, samples."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.readers import COUNTS, Row, Shard, read_rows, shards
from palestra.data.store import LEDGER, TokenStore
from palestra.errors import UsageError
from palestra.runs.store import read_json

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)
READ_ROWS = 10_000
NAMES = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "NoneType": "null"}
NAMES |= {"dict": "object", "list": "list"}


@dataclass
class Column:
    """A column of the rows that were read."""

    types: Counter[str] = field(default_factory=Counter)
    """How many values of each type; a row without the column counts as `missing`."""
    lengths: list[int] = field(default_factory=list)
    """Characters of texts, items of lists."""
    numbers: list[float] = field(default_factory=list)

    def add(self, value: Any) -> None:
        """Count a value."""
        kind = type(value).__name__
        self.types[NAMES.get(kind, kind)] += 1
        if isinstance(value, str | list):
            self.lengths.append(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self.numbers.append(value)

    def percentiles(self) -> dict[int, float]:
        """Of the lengths, or of the numbers where there are no texts and lists."""
        return percentiles(self.lengths or self.numbers)


@dataclass(frozen=True)
class Inspection:
    """Statistics of files of rows."""

    files: list[Shard]
    rows: int
    """Rows that were read."""
    complete: bool
    """Whether these are all rows."""
    columns: dict[str, Column]
    samples: list[Row]
    counts: dict[str, Any] | None
    """counts.json, where this is the output of a data step."""


def inspect(
    where: str, *, rows: int = READ_ROWS, samples: int = 3, split: str | None = None
) -> Inspection | TokenStore:
    """Statistics of a file, a folder, a pattern, a URL or the output of a data step; a token store is opened.

    About `rows` rows are read, as many of each file as of the others; 0 reads all.
    """
    if rows < 0 or samples < 0:
        raise UsageError(f"rows and samples cannot be less than 0; got {rows} and {samples}")
    path = Path(where).expanduser()
    if (path / LEDGER).is_file():
        return TokenStore.open(path)
    files = shards(where if "://" in where else str(path), split=split)
    counts = read_json(path / COUNTS) if (path / COUNTS).is_file() else None
    columns: dict[str, Column] = {}
    shown: list[Row] = []
    read, complete = 0, True
    of_each = max(1, rows // len(files)) if rows else None
    for number, shard in enumerate(files):
        for here, row in enumerate(islice(read_rows(shard), None if of_each is None else of_each + 1)):
            if here == of_each:
                complete = False
                break
            for name in row:
                columns.setdefault(name, Column(Counter({"missing": read} if read else {})))
            for name, column in columns.items():
                if name in row:
                    column.add(row[name])
                else:
                    column.types["missing"] += 1
            if len(shown) < samples and number * samples >= len(shown) * len(files):  # from all over the files
                shown.append(row)
            read += 1
    return Inspection(files, read, complete, columns, shown, counts)


def percentiles(values: Sequence[float] | np.ndarray) -> dict[int, float]:
    """Percentiles of values, by the value itself: 50 is the median; empty where there are none."""
    if not len(values):
        return {}
    nearest = np.percentile(np.asarray(values), PERCENTILES, method="nearest")
    return {percent: value.item() for percent, value in zip(PERCENTILES, nearest, strict=True)}
