"""Work over shards of JSONL documents: once each, in parallel, with a ledger so that a kill costs one shard.

A shard is one file of the source, or several small ones together, in the order of their paths. `each_shard` runs a
function on each; when it returns, its result is noted in `.shards/PHASE/00007.json`, and that shard is not done
again. So what a step makes depends on its source and arguments alone, neither on the number of workers nor on when it
was killed.

Shard n of the output holds the results of shard n of the source, in the same order. Rows keep all their columns; one
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, TypeVar

from palestra.data.readers import COUNTS, STEP_FOLDERS, Row, Shard, numbered_rows, shards
from palestra.data.store import check_same
from palestra.errors import PalestraError, UsageError, needs_extra
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
    files: dict[str, Shard]
    """By what each is called in the ids of its rows: as much of the end of its path as tells it from the others."""

    def stamp(self) -> list[list[Any]]:
        """What changes with the content, wherever the files lie."""
        return [[label, file.size, file.stamp, file.split] for label, file in self.files.items()]

    def rows(self, text_key: str = "text") -> Iterator[tuple[str, str, Row]]:
        """Its rows, each with an id made of file and number, and with its place for error messages."""
        for label, file in self.files.items():
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
    return [ShardSource(number, {labels[i]: files[i] for i in group}) for number, group in enumerate(groups)]


def each_shard(
    out: Path,
    phase: str,
    shards: Sequence[ShardSource],
    function: Callable[[ShardSource], Mapping[str, Any]],
    *,
    workers: int,
) -> list[dict[str, Any]]:
    """The results of `function` for each shard, in order; those that an earlier attempt did are not done again.

    The function is sent to worker processes (with one worker it is called here). It writes files atomically and
    returns plain data last. A shard whose files have changed since is done again.
    """
    if workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}")
    ledger = out / LEDGER / phase
    ledger.mkdir(parents=True, exist_ok=True)
    notes = {shard.number: ledger / f"{shard.number:05}.json" for shard in shards}
    done: dict[int, dict[str, Any]] = {}
    for shard in shards:
        note = read_json(notes[shard.number]) if notes[shard.number].exists() else None
        if note is not None and note["source"] == shard.stamp():
            done[shard.number] = note["said"]
    missing = [shard for shard in shards if shard.number not in done]
    for shard, result in carried_out(
        missing, function, lambda shard: next(iter(shard.files.values())).path, workers, phase
    ):
        done[shard.number] = dict(result)
        write_json(notes[shard.number], {"source": shard.stamp(), "said": dict(result)})
    return [done[shard.number] for shard in shards]


def same_recipe(out: Path, recipe: Mapping[str, Any]) -> None:
    """Refuse to resume in a folder that was begun with other arguments; the paths of sources may differ."""
    path = out / LEDGER / "recipe.json"
    wanted = redacted(json.loads(json.dumps(dict(recipe), default=str)))
    if path.exists():
        check_same(out, read_json(path), wanted)
    else:
        write_json(path, wanted)


def forget(out: Path, phase: str) -> None:
    """Remove the notes and files of a phase, once what follows it is written."""
    shutil.rmtree(out / LEDGER / phase, ignore_errors=True)


def write_counts(out: Path, step: str, results: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """`counts.json`: the sums over shards of rows in and out, drop reasons and seconds, and `more`.

    Seconds are those of work on shards, all workers and attempts together. The first rows that were dropped for each
    reason are in `dropped.json`.
    """
    dropped: Counter[str] = Counter()
    samples: dict[str, list[Row]] = {}
    for result in results:
        dropped.update(result.get("dropped", {}))
        for reason, rows in result.get("samples", {}).items():
            samples[reason] = [*samples.get(reason, []), *rows][:SAMPLES]
    if samples:
        write_json(out / DROPPED, samples)
    counts = {
        "step": step,
        "rows_in": sum(result.get("rows_in", 0) for result in results),
        "rows_out": sum(result.get("rows_out", 0) for result in results),
        "dropped": dict(sorted(dropped.items())),
        "shards": len(results),
        "seconds": round(sum(result.get("seconds", 0.0) for result in results), 3),
        **more,
    }
    write_json(out / COUNTS, redacted(counts))


def _labels(paths: Sequence[str]) -> list[str]:
    parts = [PurePosixPath(path.partition("://")[2] or path).parts for path in paths]
    depth = 1
    while len({names[-depth:] for names in parts}) < len(parts):
        depth += 1
    return [redact("/".join(names[-depth:]).lstrip("/")) for names in parts]


def carried_out(
    jobs: Sequence[Job],
    function: Callable[[Job], Result],
    place: Callable[[Job], str],
    workers: int,
    name: str,
    env: dict[str, str] | None = None,
) -> Iterator[tuple[Job, Result]]:
    """Each job with its result, as they end, in worker processes where there are several.

    `place` names the file of a job, for the message about a worker that died.
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
                if isinstance(failed.__cause__, PalestraError):  # a bad row: the worker's traceback adds nothing
                    raise failed.__cause__ from None
                raise
            except WorkerDied as died:
                raise PalestraError(f"{died} It was working on {place(tasks[task])}.") from died


def batches(jobs: Iterable[Job], size: Callable[[Job], int], most: int, largest: int) -> Iterator[list[Job]]:
    """The jobs in lists, each as soon as it has `most` of them or their sizes add up to `largest`."""
    batch: list[Job] = []
    total = 0
    for job in jobs:
        batch.append(job)
        total += size(job)
        if len(batch) == most or total >= largest:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


Compression = Literal["none", "gz", "zst"]

DROPPED, SAMPLES, SAMPLE_CHARACTERS = "dropped.json", 20, 500  # rows of each reason, and of each this much
NO_TEXT, NOT_UNICODE = "no text", "not valid Unicode"
NOTES = "notes"
"""The folder of notes on single rows, sharded like the documents."""


@dataclass(frozen=True)
class Drop:
    """A row that is left out."""

    reason: str
    note: Row | None = None
    """Written to `notes/`."""
    row: Row | None = None
    """The row, where it is not the last that was read."""


Work = Callable[[int, Iterator[Row]], Iterator[Row | Drop]]
"""Maps the rows of a shard, whose number it is given: each is passed on, changed, dropped or split into several.

Sent to processes.
"""


def map_documents(
    out: Path,
    source: Where,
    work: Work,
    step: str,
    recipe: Mapping[str, Any],
    workers: int,
    text_key: str | None = "text",
    split: str | None = None,
    compression: Compression = "none",
    *,
    counts: Mapping[str, Any] | None = None,
) -> None:
    """Send the documents of a source through `work` into `out/docs`, and write `counts.json`; resumes after a kill.

    With a `text_key` rows are documents, whose text is under that key and comes under `text`: one without is an error,
    one in which it is null is dropped. With None rows come as they are, with an `id`. `counts` goes into counts.json.
    """
    same_recipe(out, {"step": step, **recipe, "text_key": text_key, "split": split, "compression": compression})
    shards = sources(source, split=split)
    results = each_shard(out, DOCS, shards, partial(_map_shard, out, work, text_key, compression), workers=workers)
    for folder, form in ((DOCS, compression), (NOTES, "none")):
        ours = {shard_path(out, folder, shard.number, form) for shard in shards}
        for left_over in {*(out / folder).glob("*")} - ours:  # of a kill, or of a source with more shards
            left_over.unlink()
    write_counts(out, step, results, **(counts or {}))


def documents(source: ShardSource, text_key: str = "text") -> Iterator[Row | Drop]:
    """The rows of a shard as documents, `{"id", "text", …}`; a `Drop` stands for one without text."""
    for made, place, row in source.rows(text_key):
        if text_key not in row:
            raise PalestraError(f"{place}: no column {text_key!r}, only {', '.join(row) or 'none'}; text_key names it")
        text = row[text_key]
        if text is None:
            yield Drop(NO_TEXT, row={"id": _id(row, made), **row})
            continue
        if not isinstance(text, str):
            raise PalestraError(f"{place}: expected a string under {text_key!r}, found {type(text).__name__}")
        rest = {key: value for key, value in row.items() if key not in ("id", "text", text_key)}
        yield {"id": _id(row, made), "text": text, **rest}


def texts(source: ShardSource, text_key: str) -> Iterator[str]:
    """The texts of a shard's documents that can be written again."""
    for row in documents(source, text_key):
        if not isinstance(row, Drop) and writable(row["text"]):
            yield row["text"]


def writable(text: str) -> bool:
    """Whether it is Unicode; JSON can hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_rows(source: ShardSource) -> Iterator[Row]:
    """The rows of a shard as they are, with an `id` first."""
    for made, _, row in source.rows():
        yield {"id": _id(row, made), **{key: value for key, value in row.items() if key != "id"}}


def shard_path(out: Path, folder: str, number: int, compression: Compression = "none") -> Path:
    """The file of a shard of documents (or notes)."""
    return out / folder / f"{folder}-{number:05}.jsonl{'' if compression == 'none' else f'.{compression}'}"


@contextmanager
def row_writer(path: Path, compression: Compression = "none") -> Iterator[Callable[[Row], bool]]:
    """Write rows of JSON, atomically; false for a row that cannot be written (half a surrogate pair)."""
    try:
        with written(path) as file, _compressed(file, compression) as stream:

            def write(row: Row) -> bool:
                try:
                    line = json.dumps(row, ensure_ascii=False, default=_as_json).encode()
                except UnicodeEncodeError:
                    return False
                stream.write(line + b"\n")
                return True

            yield write
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS):
            raise
        raise PalestraError(
            f"cannot write {path}: {error.strerror}. No partial file is left; make room and run it again"
        ) from error


def _map_shard(
    out: Path, work: Work, text_key: str | None, compression: Compression, source: ShardSource
) -> dict[str, Any]:
    """Runs in a worker."""
    began = time.perf_counter()
    rows_in = rows_out = 0
    dropped: Counter[str] = Counter()
    samples: dict[str, list[Row]] = {}
    notes: list[Row] = []
    last: Row = {}  # read: works take one row at a time

    def drop(row: Drop) -> None:
        dropped[row.reason] += 1
        if dropped[row.reason] <= SAMPLES:
            samples.setdefault(row.reason, []).append(_sample(row.row or last))
        if row.note is not None:
            notes.append(row.note)

    def rows() -> Iterator[Row]:
        nonlocal rows_in, last
        for row in plain_rows(source) if text_key is None else documents(source, text_key):
            rows_in += 1
            if isinstance(row, Drop):
                drop(row)
            else:
                last = row
                yield row

    with row_writer(shard_path(out, DOCS, source.number, compression), compression) as write:
        for row in work(source.number, rows()):
            if isinstance(row, Drop):
                drop(row)
            elif write(row):
                rows_out += 1
            else:
                drop(Drop(NOT_UNICODE))
    if notes:
        with row_writer(shard_path(out, NOTES, source.number)) as write:
            for note in notes:
                write(note)
    seconds = time.perf_counter() - began
    counts = {"rows_in": rows_in, "rows_out": rows_out, "dropped": dict(dropped), "seconds": seconds}
    return counts | {"samples": samples}


def _sample(row: Row) -> Row:
    """The beginning of a row, for people; what cannot be written is replaced."""
    text = row["text"] if isinstance(row.get("text"), str) else json.dumps(row, ensure_ascii=False, default=str)
    return {"id": row.get("id"), "text": text[:SAMPLE_CHARACTERS].encode(errors="replace").decode()}


def _id(row: Row, made: str) -> str:
    return made if row.get("id") in (None, "") else str(row["id"])


def _as_json(value: Any) -> Any:
    """Columns of Parquet that JSON has no form for."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise PalestraError(
        f"a column holds a {type(value).__name__}, which JSON has no form for: drop it with `transform`"
    )


@contextmanager
def _compressed(file: IO[bytes], compression: Compression) -> Iterator[Any]:
    if compression == "none":
        yield file
    elif compression == "gz":
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0) as stream:  # no time: the same bytes
            yield stream
    else:
        with needs_extra("writing .zst", "train"):
            import pyarrow
        # A handle of its own, since closing the stream, which ends the frame, closes what is below it.
        with (
            os.fdopen(os.dup(file.fileno()), "wb") as below,
            pyarrow.CompressedOutputStream(pyarrow.PythonFile(below, "w"), "zstd") as stream,
        ):
            yield stream
