"""Documents from one data step to the next: JSONL shards `docs/docs-00000.jsonl` of rows with an `id` and a `text`.

Shard n of the output holds what became of shard n of the source, in the same order. Rows keep all their columns; one
without an `id` gets one made of its file and number.
"""

import datetime
import decimal
import errno
import gzip
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from palestra.data.readers import Row
from palestra.data.steps.shards import DOCS, Source, Where, each_shard, same_recipe, sources, write_counts
from palestra.errors import MissingExtra, PalestraError
from palestra.runs.store import written

Compression = Literal["none", "gz", "zst"]

NO_TEXT, NOT_UNICODE = "no text", "not valid Unicode"
NOTES = "notes"
"""Where what is to be told of single rows lies, in shards like the documents'."""


@dataclass(frozen=True)
class Drop:
    """A row that is left out."""

    reason: str
    note: Row | None = None
    """What to write of it into `notes/`, beside the count."""


Work = Callable[[Iterator[Row]], Iterator[Row | Drop]]
"""What becomes of the rows of a shard: each is passed on, changed, left out or made several. Sent to processes."""


@dataclass(frozen=True)
class ByShard:
    """Work that is not the same for all shards."""

    of: Callable[[int], Work]
    """The work for the shard of a number."""


def map_documents(
    out: Path,
    source: Where,
    work: Work | ByShard,
    *,
    step: str,
    recipe: Mapping[str, Any],
    workers: int,
    text_key: str | None = "text",
    split: str | None = None,
    compression: Compression = "none",
    **more: Any,
) -> dict[str, Any]:
    """Send the documents of a source through `work` into `out/docs`, and write `counts.json`; what a kill left is kept.

    With a `text_key` rows are documents, whose text is under that key and comes under `text`: one without is an error,
    one in which it is null is dropped. With None rows come as they are, with an `id`. `more` goes into the counts.
    """
    same_recipe(out, {"step": step, **recipe, "text_key": text_key, "split": split, "compression": compression})
    given = sources(source, split=split)
    for folder in (DOCS, NOTES):
        for left_over in (out / folder).glob(".*.tmp"):  # of a kill
            left_over.unlink()
    do = partial(_do, out, work, text_key, compression)
    said = each_shard(out, DOCS, given, do, workers=workers)
    for folder in (DOCS, NOTES):  # left over where the source had more shards in an earlier attempt
        for path in (out / folder).glob(f"{folder}-*"):
            if int(path.name.removeprefix(f"{folder}-").partition(".")[0]) >= len(given):
                path.unlink()
    return write_counts(out, step, said, **more)


def documents(source: Source, text_key: str = "text") -> Iterator[Row | Drop]:
    """The rows of a shard as documents, `{"id", "text", …}`; a `Drop` stands for one without text."""
    for made, place, row in source.rows(text_key):
        if text_key not in row:
            raise PalestraError(f"{place}: no column {text_key!r}, only {', '.join(row) or 'none'}; text_key names it")
        text = row[text_key]
        if text is None:
            yield Drop(NO_TEXT)
            continue
        if not isinstance(text, str):
            raise PalestraError(f"{place}: expected a string under {text_key!r}, found {type(text).__name__}")
        rest = {key: value for key, value in row.items() if key not in ("id", "text", text_key)}
        yield {"id": _id(row, made), "text": text, **rest}


def plain_rows(source: Source) -> Iterator[Row]:
    """The rows of a shard as they are, with an `id` first."""
    for made, _, row in source.rows():
        yield {"id": _id(row, made), **{key: value for key, value in row.items() if key != "id"}}


def shard_path(out: Path, folder: str, number: int, compression: Compression = "none") -> Path:
    """Where a shard of documents (or notes) lies."""
    return out / folder / f"{folder}-{number:05}.jsonl{'' if compression == 'none' else f'.{compression}'}"


@contextmanager
def row_writer(path: Path, compression: Compression = "none") -> Iterator[Callable[[Row], bool]]:
    """Write rows of JSON, whole at once; says of each whether it could be written (half a surrogate pair cannot)."""
    with _clear_errors(path), written(path) as file, _compressed(file, compression) as stream:

        def write(row: Row) -> bool:
            try:
                line = json.dumps(row, ensure_ascii=False, default=_as_json).encode()
            except UnicodeEncodeError:
                return False
            stream.write(line + b"\n")
            return True

        yield write


def _do(
    out: Path, work: Work | ByShard, text_key: str | None, compression: Compression, source: Source
) -> dict[str, Any]:
    """Do one shard; runs in a worker."""
    began = time.perf_counter()
    counts = {"rows_in": 0, "rows_out": 0}
    dropped: dict[str, int] = {}
    notes: list[Row] = []

    def drop(one: Drop) -> None:
        dropped[one.reason] = dropped.get(one.reason, 0) + 1
        if one.note is not None:
            notes.append(one.note)

    def given() -> Iterator[Row]:
        for row in plain_rows(source) if text_key is None else documents(source, text_key):
            counts["rows_in"] += 1
            if isinstance(row, Drop):
                drop(row)
            else:
                yield row

    with row_writer(shard_path(out, DOCS, source.number, compression), compression) as write:
        for row in (work.of(source.number) if isinstance(work, ByShard) else work)(given()):
            if isinstance(row, Drop):
                drop(row)
            elif write(row):
                counts["rows_out"] += 1
            else:
                drop(Drop(NOT_UNICODE))
    if notes:
        with row_writer(shard_path(out, NOTES, source.number)) as write:
            for note in notes:
                write(note)
    return {**counts, "dropped": dropped, "seconds": time.perf_counter() - began}


def _id(row: Row, made: str) -> str:
    given = row.get("id")
    return made if given is None or given == "" else str(given)


def _as_json(value: Any) -> Any:
    """Columns of Parquet that JSON has no form for."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise PalestraError(f"a column holds a {type(value).__name__}, which JSON cannot: leave it out with `transform`")


@contextmanager
def _compressed(file: IO[bytes], compression: Compression) -> Iterator[Any]:
    if compression == "none":
        yield file
    elif compression == "gz":
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as stream:  # no time: the same bytes
            yield stream
    else:
        try:
            import pyarrow
        except ImportError as error:
            raise MissingExtra("writing .zst", "train") from error
        # A handle of its own, since closing the stream, which ends the frame, closes what is below it.
        with (
            os.fdopen(os.dup(file.fileno()), "wb") as below,
            pyarrow.CompressedOutputStream(pyarrow.PythonFile(below, "w"), "zstd") as stream,
        ):
            yield stream


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS):
            raise
        raise PalestraError(
            f"cannot write {path}: {error.strerror}. Nothing is left half written; make room and run the same again"
        ) from error
