"""The step `transform`: a function of your own over all rows, in parallel."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.data.readers import Row
from palestra.data.steps.documents import Compression, Drop, map_documents
from palestra.data.steps.shards import Where
from palestra.errors import UsageError
from palestra.spec.execution import Execution
from palestra.spec.imports import load_function

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
