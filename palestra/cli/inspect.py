"""What `palestra data inspect` prints."""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from palestra.cli.show import console
from palestra.data.inspect import PERCENTILES, Column, Inspection, StoreInspection, inspect

LONGEST = 240
"""Characters of a value in a sample."""


def show_inspection(where: str, *, rows: int, samples: int, split: str | None) -> None:
    """Look into a data set and say what is there."""
    found = inspect(where, rows=rows, samples=samples, split=split)
    screen = console()
    if isinstance(found, StoreInspection):
        _show_store(screen, where, found)
    else:
        _show_rows(screen, where, found)


def _show_rows(screen: Console, where: str, found: Inspection) -> None:
    rows = f"{found.rows:,} rows" if found.complete else f"more than {found.rows:,} rows (--rows 0 reads all)"
    files = f"{found.files:,} file{'s' if found.files > 1 else ''} ({', '.join(found.formats)})"
    screen.print(escape(f"{where}: {files}, {size(found.bytes)}, {rows}"))
    if found.files > 1:
        screen.print(escape(f"the largest file: {found.largest[0]}, {size(found.largest[1])}"))
    table = Table("column", "type", "of", *_heads(), box=None, pad_edge=False)
    for name, column in found.columns.items():
        table.add_row(escape(name), escape(_types(column)), _of(column), *_values(column.percentiles()))
    screen.print()
    screen.print(table)
    for number, row in enumerate(found.samples, 1):
        screen.print(f"\nsample {number}")
        for name, value in row.items():
            screen.print(escape(f"  {name}: {_short(value)}"))
    if found.counts is not None:
        screen.print("\nmade by a data step")
        for key, value in found.counts.items():
            screen.print(escape(f"  {key}: {json.dumps(value, ensure_ascii=False)}"))


def _show_store(screen: Console, where: str, found: StoreInspection) -> None:
    screen.print(escape(f"{where}: a token store of {found.documents:,} documents, {found.tokens:,} tokens"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("tokenizer", escape(f"{found.tokenizer}, a vocabulary of {found.vocab_size:,}"))
    table.add_row("text", f"{size(found.bytes)}, {found.bytes / max(found.tokens, 1):.2f} bytes a token")
    table.add_row("trained on", f"{found.trained:,} tokens")
    table.add_row("largest token", f"{found.largest_token:,}")
    table.add_row("recipe", escape(json.dumps(found.recipe, ensure_ascii=False)[:LONGEST]))
    for path, documents, tokens in found.shards[:10]:
        table.add_row("from", escape(f"{path}: {documents:,} documents, {tokens:,} tokens"))
    if len(found.shards) > 10:
        table.add_row("", f"and {len(found.shards) - 10} more files")
    screen.print(table)
    lengths = Table("", *_heads(), box=None, pad_edge=False)
    lengths.add_row("tokens a document", *_values(found.lengths))
    screen.print()
    screen.print(lengths)
    for number, tokens in enumerate(found.samples, 1):
        screen.print(f"\nsample {number}: {' '.join(map(str, tokens))} …")


def size(number: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} bytes"


def _heads() -> list[str]:
    return [{0: "least", 50: "median", 100: "most"}.get(percent, f"{percent} %") for percent in PERCENTILES]


def _types(column: Column) -> str:
    total = column.types.total()
    if len(column.types) == 1:
        return next(iter(column.types))
    return ", ".join(f"{name} {count / total:.1%}" for name, count in column.types.most_common())


def _of(column: Column) -> str:
    if column.lengths:
        return "characters" if column.types["text"] >= column.types["list"] else "items"
    return "values" if column.numbers else ""


def _values(found: Mapping[int, float]) -> list[str]:
    return [f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" for value in found.values()] or [
        "" for _ in PERCENTILES
    ]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
