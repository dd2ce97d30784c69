"""Work over shards of JSONL documents: once each, in parallel, with a ledger so that a kill costs one shard.

A shard is one file of the source, or several small ones together, in the order of their paths. `each_shard` runs a
function on each; when it returns, what it said is noted in `.shards/PHASE/00007.json`, and that shard is not done
again. So what a step makes depends on its source and arguments alone, neither on the number of workers nor on when it
was killed.

Shard n of the output holds what became of shard n of the source, in the same order. Rows keep all their columns; one
without an `id` gets one made of its file and number.
"""

import datetime
import decimal
import errno
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, TypeVar

from palestra.data.readers import COUNTS, STEP_FOLDERS, Row, Shard, numbered_rows, shards
from palestra.errors import MissingExtra, PalestraError, UsageError
from palestra.runs.store import read_json, write_json, written
from palestra.work.pool import Pool, TaskFailed, WorkerDied, as_completed
from palestra.work.redact import redact, redacted

Where = str | Path | Sequence[str | Path]
"""A file, a folder, a pattern, a URL, the output of a data step, or several of these."""

Job = TypeVar("Job")
Result = TypeVar("Result")

LEDGER = ".shards"
DOCS, FILES = STEP_FOLDERS  # where steps leave documents, and files that were downloaded
GROUPED_BYTES, FEWEST_GROUPS = 64 << 20, 64


@dataclass(frozen=True)
class ShardSource:
    """A shard of a step's source."""

    number: int
    files: tuple[Shard, ...]
    labels: tuple[str, ...]
    """What each file is called in the ids of its rows: as much of the end of its path as tells it from the others."""

    @property
    def size(self) -> int:
        """Bytes, as stored."""
        return sum(file.size for file in self.files)

    def stamp(self) -> list[list[Any]]:
        """What changes with the content, wherever the files lie."""
        return [[label, file.size, file.stamp, file.split] for label, file in zip(self.labels, self.files, strict=True)]

    def rows(self, text_key: str = "text") -> Iterator[tuple[str, str, Row]]:
        """Its rows, each with an id made of file and number, and with the place where a person finds it."""
        for label, file in zip(self.labels, self.files, strict=True):
            for number, row in numbered_rows(file, text_key=text_key):
                yield f"{label}:{number}", file.place(number), row


def sources(where: Where, *, split: str | None = None) -> list[ShardSource]:
    """The shards of files, folders, patterns, URLs or the outputs of steps; small files are taken together.

    At most 64 MB and a 64th of all bytes are taken together, so that enough shards are left to share out.
    """
    files = shards(where, split=split)
    labels = _labels([file.path for file in files])
    most = min(GROUPED_BYTES, sum(file.size for file in files) // FEWEST_GROUPS)
    groups: list[list[int]] = []
    room = 0
    for index, file in enumerate(files):
        if not groups or file.size > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= file.size
    return [
        ShardSource(number, tuple(files[i] for i in group), tuple(labels[i] for i in group))
        for number, group in enumerate(groups)
    ]


def each_shard(
    out: Path,
    phase: str,
    given: Sequence[ShardSource],
    function: Callable[[ShardSource], Mapping[str, Any]],
    *,
    workers: int,
) -> list[dict[str, Any]]:
    """What `function` says of each shard, in order; those that an earlier attempt did are not done again.

    The function is sent to worker processes (with one worker it is called here). It writes files atomically and
    returns plain data last. A shard whose files have changed since is done again.
    """
    if workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}")
    ledger = out / LEDGER / phase
    ledger.mkdir(parents=True, exist_ok=True)
    done = {source.number: _noted(ledger, source) for source in given}
    missing = [source for source in given if done[source.number] is None]
    for source, said in carried_out(missing, function, lambda source: source.files[0].path, workers, phase):
        done[source.number] = dict(said)
        write_json(_note(ledger, source.number), {"source": source.stamp(), "said": dict(said)})
    return [done[source.number] or {} for source in given]


def same_recipe(out: Path, recipe: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder where the same was begun with other arguments; paths of sources are no part."""
    path = out / LEDGER / "recipe.json"
    wanted = redacted(json.loads(json.dumps(dict(recipe), default=str)))
    if not path.exists():
        write_json(path, wanted)
        return
    there = read_json(path)
    for key in sorted({*there, *wanted}):
        if there.get(key) != wanted.get(key):
            raise UsageError(
                f"{out} was begun with {key} = {there.get(key)!r}, and {wanted.get(key)!r} is asked for; "
                "give another folder, or remove this one"
            )


def forget(out: Path, phase: str) -> None:
    """Remove what a phase noted and left, once what follows it is written."""
    shutil.rmtree(out / LEDGER / phase, ignore_errors=True)


def write_counts(out: Path, step: str, said: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """`counts.json`: the sums over shards of rows in and out, drop reasons and seconds, and what else there is to say.

    Seconds are those of work on shards, all workers and attempts together.
    """
    dropped: dict[str, int] = {}
    for one in said:
        for reason, count in one.get("dropped", {}).items():
            dropped[reason] = dropped.get(reason, 0) + count
    counts = {
        "step": step,
        "rows_in": sum(one.get("rows_in", 0) for one in said),
        "rows_out": sum(one.get("rows_out", 0) for one in said),
        "dropped": dict(sorted(dropped.items())),
        "shards": len(said),
        "seconds": round(sum(one.get("seconds", 0.0) for one in said), 3),
        **more,
    }
    write_json(out / COUNTS, redacted(counts))
    return counts


def _labels(paths: Sequence[str]) -> list[str]:
    parts = [PurePosixPath(path.partition("://")[2] or path).parts for path in paths]
    depth = 1
    while len({one[-depth:] for one in parts}) < len(parts):
        depth += 1
    return [redact("/".join(one[-depth:]).lstrip("/")) for one in parts]


def _note(ledger: Path, number: int) -> Path:
    return ledger / f"{number:05}.json"


def _noted(ledger: Path, source: ShardSource) -> dict[str, Any] | None:
    path = _note(ledger, source.number)
    if not path.exists():
        return None
    note = read_json(path)
    return note["said"] if note["source"] == json.loads(json.dumps(source.stamp())) else None


def carried_out(
    jobs: Sequence[Job],
    function: Callable[[Job], Result],
    place: Callable[[Job], str],
    workers: int,
    name: str,
    env: dict[str, str] | None = None,
) -> Iterator[tuple[Job, Result]]:
    """Each job with what the function gave for it, as they end, in worker processes where there are several.

    `place` is the file that a worker was at when it died.
    """
    if workers == 1 or len(jobs) <= 1:
        yield from ((job, function(job)) for job in jobs)
        return
    with Pool(min(workers, len(jobs)), name=name, env=env) as pool:
        tasks: dict[Future[Result], Job] = {pool.submit(function, job): job for job in jobs}
        for task in as_completed(tasks):
            try:
                yield tasks[task], task.result()
            except TaskFailed as failed:
                if isinstance(failed.__cause__, PalestraError):  # a bad row: the worker's traceback tells no more
                    raise failed.__cause__ from None
                raise
            except WorkerDied as died:
                raise PalestraError(f"{died} It was at work on {place(tasks[task])}.") from died


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


def documents(source: ShardSource, text_key: str = "text") -> Iterator[Row | Drop]:
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


def plain_rows(source: ShardSource) -> Iterator[Row]:
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
    out: Path, work: Work | ByShard, text_key: str | None, compression: Compression, source: ShardSource
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
