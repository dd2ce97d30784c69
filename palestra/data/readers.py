"""Rows of text, JSONL, JSON, Parquet, Arrow and WARC files, one at a time, wherever fsspec finds the files."""

import gzip
import hashlib
import io
import json
import re
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from palestra.data.cache import MARKER
from palestra.data.remote import open_filesystem, version_of
from palestra.data.warc import pages
from palestra.errors import PalestraError, UsageError, needs_extra

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Row = dict[str, Any]
Listing = dict[str, dict[str, Any]]  # by path, what the file system says of a file

TEXT, JSON_LINES, JSON, PARQUET, ARROW, HTML = ".txt", ".jsonl", ".json", ".parquet", ".arrow", ".html"
WARC = (".warc", ".wet")
# A page of HTML is a text; only a data step reads more of it.
FORMATS = (TEXT, JSON_LINES, JSON, PARQUET, ARROW, HTML, *WARC)
COMPRESSED = (".gz", ".zst")
ABOUT = (MARKER, "dataset_info.json", "dataset_infos.json")  # metadata next to the data
COUNTS, STEP_FOLDERS = "counts.json", ("docs", "files")  # of a data step: what it did, and where its rows are
CHUNK = 1 << 16  # characters, or bytes, read at once
LONGEST_TOKEN = 16  # characters of a JSON literal or escape that may be cut in two
SPACE, DECODER = re.compile(r"\s*"), json.JSONDecoder()
COUNTED = 1 << 20  # bytes whose lines are counted together
LONGEST_LINE, SHOWN_CHARACTERS = 32 << 20, 4096  # bytes of a line that is parsed; what is shown of a longer one
BATCH_ROWS = 256  # rows of Parquet and Arrow turned into Python objects at once


@dataclass(frozen=True)
class Shard:
    """One file of rows as it was when it was listed."""

    path: str
    """A local path, or a URL that fsspec reads."""
    size: int
    """Bytes, as stored."""
    stamp: str
    """What changes with the content: the ETag where there is one, else the time of the last change."""
    split: str | None = None
    """What separates the documents of a text file ("\\n": each line is one); None makes the whole file one."""

    @property
    def format(self) -> str:
        """The ending that says how it is read, without that of the compression."""
        return _format(self.path)

    @property
    def local(self) -> bool:
        """Whether it is a file of this machine."""
        return "://" not in self.path

    def place(self, number: int) -> str:
        """Where a row is, for messages: file and line, or file and row."""
        lines = self.format in (JSON_LINES, JSON) or self.split == "\n"
        return f"{self.path}:{number}" if lines else f"{self.path}, row {number}"

    def now(self) -> "Shard":
        """The same file as it is at this moment."""
        files, path = open_filesystem(self.path)
        return _shard(files, path, files.info(path), self.split)

    def checksum(self) -> str:
        """SHA-256 of its bytes."""
        files, path = open_filesystem(self.path)
        with cast(io.BufferedReader, files.open(path, "rb")) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def shards(where: str | Path | Sequence[str | Path], *, split: str | None = None) -> list[Shard]:
    """The files of a path, a pattern (`data/*.jsonl.gz`), a folder or several of these, in a stable order.

    A folder gives the files of the one format that is in it, at any depth; one that `datasets` saved, its Arrow files.
    """
    places = [where] if isinstance(where, str | Path) else where
    files = [shard for place in places for shard in _find(str(place), split)]
    if not files:
        raise UsageError("no data files were given")
    path, count = Counter(shard.path for shard in files).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{path} is given twice; give it once, and more weight in the mixture")
    return files


def read_rows(shard: Shard, *, text_key: str = "text") -> Iterator[Row]:
    """The rows of a shard; a document of a text file is a row with one key, `text_key`."""
    return (row for _, row in numbered_rows(shard, text_key=text_key))


def rows_from(shard: Shard, start: int) -> Iterator[tuple[int, Any]]:
    """The rows of a shard from `start` on, counted from 0, for people: a line that is not JSON comes as text.

    Of Parquet what is before is not read; lines of JSON are only counted there, once for a file as long as it is used.
    """
    if shard.format == PARQUET:
        with _opened(shard) as stream:
            yield from enumerate(_parquet(shard, stream, start), start)
    elif shard.path.endswith(JSON_LINES):
        with open(shard.path, "rb") as file:
            yield from _lines_from(file, start, _line_counts(shard))
    else:
        yield from islice(enumerate(read_rows(shard)), start, None)


@lru_cache(maxsize=16)
def _line_counts(shard: Shard) -> array:
    """How many lines end before each block of a file, as far as they have been counted."""
    return array("q", [0])


def _lines_from(file: io.BufferedReader, start: int, counts: array) -> Iterator[tuple[int, Any]]:
    file.seek((len(counts) - 1) * COUNTED)
    while counts[-1] < start and (block := file.read(COUNTED)):
        counts.append(counts[-1] + block.count(b"\n"))
    first = max(0, bisect_left(counts, start) - 1)  # the block in which the line before `start` ends
    file.seek(first * COUNTED)
    number = counts[first]
    while number < start and (line := file.readline(LONGEST_LINE)):
        number += line.endswith(b"\n")
    while line := file.readline(LONGEST_LINE):
        text = line.decode(errors="replace")
        while not line.endswith(b"\n") and (
            line := file.readline(LONGEST_LINE)
        ):  # too long: what is left is passed over
            text = text[:SHOWN_CHARACTERS]
        with suppress(ValueError, RecursionError):
            text = json.loads(text)
        yield number, text
        number += 1


def numbered_rows(shard: Shard, *, text_key: str = "text") -> Iterator[tuple[int, Row]]:
    """The rows of a shard, each with the number that `shard.place` takes: its line, or its count from 1."""
    with _opened(shard) as stream:
        if shard.format == PARQUET:
            yield from enumerate(_parquet(shard, stream), 1)
        elif shard.format == ARROW:
            yield from enumerate(_arrow(shard, stream), 1)
        elif shard.format == JSON_LINES:
            yield from _json_lines(shard, stream)
        elif shard.format == JSON:
            yield from _json(shard, stream)
        elif shard.format in WARC:
            yield from enumerate(pages(stream, text_key), 1)
        else:
            # As open() does, "\r\n" becomes "\n"; a byte-order mark is not text.
            text = io.TextIOWrapper(stream, encoding="utf-8-sig")
            for number, document in _documents(text, shard.split):
                yield number, {text_key: document}


def _find(where: str, split: str | None) -> list[Shard]:
    files, path = open_filesystem(where)
    if files.isdir(path):
        listed = _in_folder(files, path, where)
    elif files.exists(path):
        listed = {path: files.info(path)}
    elif any(sign in path for sign in "*?["):
        listed = cast(Listing, files.glob(path, detail=True))
        if not listed:
            raise UsageError(f"no file matches {where}")
    else:
        raise UsageError(f"there is no file or folder {where}")
    shards = [_shard(files, one, info, split) for one, info in sorted(listed.items()) if info["type"] != "directory"]
    if unknown := [shard.path for shard in shards if shard.format not in FORMATS]:
        raise UsageError(
            f"{unknown[0]}: unknown format; the name can end in {', '.join(FORMATS)}, with {' or '.join(COMPRESSED)} "
            "after text, JSON and WARC"
        )
    return shards


def _in_folder(files: "AbstractFileSystem", path: str, where: str) -> Listing:
    listed = cast(Listing, files.find(path, detail=True))
    if (splits := f"{path}/dataset_dict.json") in listed:
        names = json.loads(files.cat_file(splits))["splits"]
        raise UsageError(f"{where} has the splits {', '.join(names)}; give one of them, such as {where}/{names[0]}")
    if f"{path}/dataset_info.json" in listed and (state := f"{path}/state.json") in listed:
        names = [f"{path}/{entry['filename']}" for entry in json.loads(files.cat_file(state))["_data_files"]]
        if missing := [name for name in names if name not in listed]:
            raise UsageError(f"{where} is incomplete: {', '.join(missing)} is missing; save or copy it again")
        return {name: listed[name] for name in names}
    if f"{path}/{COUNTS}" in listed:  # the output of a data step
        rows = tuple(f"{path}/{folder}/" for folder in STEP_FOLDERS)
        listed = {name: info for name, info in listed.items() if name.startswith(rows)} or listed
    data = {
        name: info
        for name, info in listed.items()
        if "/." not in name[len(path) :] and _format(name) in FORMATS and name.rsplit("/", 1)[-1] not in ABOUT
    }
    formats = sorted({_format(name) for name in data})
    if not data:
        raise UsageError(f"{where} has no files that end in {', '.join(FORMATS)}, with or without compression")
    if len(formats) > 1:
        raise UsageError(
            f"{where} has files that end in {' and '.join(formats)}, and not all may be meant; "
            f"give a pattern such as {where}/**/*{formats[0]}"
        )
    return data


def _shard(files: "AbstractFileSystem", path: str, info: dict[str, Any], split: str | None) -> Shard:
    remote = "file" not in ([files.protocol] if isinstance(files.protocol, str) else files.protocol)
    return Shard(files.unstrip_protocol(path) if remote else path, info["size"], version_of(info) or "", split)


def _format(path: str) -> str:
    suffixes = Path(path.rsplit("/", 1)[-1]).suffixes
    packed = bool(suffixes) and suffixes[-1] in COMPRESSED
    ending = suffixes[-2] if packed and len(suffixes) > 1 else suffixes[-1] if suffixes else ""
    return "" if packed and ending in (PARQUET, ARROW) else ending


@contextmanager
def _opened(shard: Shard) -> Iterator[io.BufferedReader]:
    """The file, decompressed; errors name it."""
    files, path = open_filesystem(shard.path)
    try:
        with cast(io.BufferedReader, files.open(path, "rb")) as raw:
            if path.endswith(".gz"):
                yield cast(io.BufferedReader, gzip.GzipFile(fileobj=raw))
            elif path.endswith(".zst"):
                yield io.BufferedReader(_pyarrow(shard).CompressedInputStream(raw, "zstd"))
            else:
                yield raw
    except FileNotFoundError as error:
        raise PalestraError(f"{shard.path} was removed since it was listed") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:  # Arrow's errors are ValueErrors
        raise PalestraError(f"{shard.path} cannot be read: {error}") from error


def _documents(text: io.TextIOWrapper, split: str | None) -> Iterator[tuple[int, str]]:
    """The pieces of a text between the separators, numbered; empty ones are counted and left out."""
    number, rest = 1, "" if split is not None else text.read()
    while split is not None and (more := text.read(max(CHUNK, len(rest)))):
        *whole, rest = (rest + more).split(split)
        for document in whole:
            if document:
                yield number, document
            number += 1
    if rest:
        yield number, rest


def _json_lines(shard: Shard, stream: io.BufferedReader) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise _bad(shard, number, f"not valid JSON ({error}); expected one object a line") from error
            yield number, _checked(shard, number, row)


def _json(shard: Shard, stream: io.BufferedReader) -> Iterator[tuple[int, Row]]:
    """The objects of a list, or objects one after the other, parsed one at a time."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig")
    buffer, at, line, counted = "", 0, 1, 0  # line: of the character at `counted`
    state = "start"
    while True:
        if (space := SPACE.match(buffer, at)) is not None:
            at = space.end()
        line, counted = line + buffer.count("\n", counted, at), at
        if at == len(buffer):
            if not (buffer := text.read(CHUNK)):
                break
            at = counted = 0
        elif state == "start" and buffer[at] == "[":
            state, at = "in list, first", at + 1
        elif state in ("in list, first", "in list") and buffer[at] == "]":
            state, at = "after list", at + 1
        elif state == "in list" and buffer[at] == ",":
            state, at = "in list, after comma", at + 1
        elif state in ("in list", "after list"):
            raise _bad(shard, line, f"expected a list of objects, found {buffer[at : at + 20]!r} after one")
        else:
            try:
                row, end = DECODER.raw_decode(buffer, at)
            except json.JSONDecodeError as error:
                # Perhaps the value only continues beyond what has been read. An error further up stays one.
                cut = error.msg.startswith("Unterminated") or error.pos > len(buffer) - LONGEST_TOKEN
                if cut and (more := text.read(max(CHUNK, len(buffer)))):
                    buffer, at, counted = buffer[at:] + more, 0, 0
                    continue
                wrong = line + buffer.count("\n", counted, error.pos)
                raise _bad(shard, wrong, f"not valid JSON ({error.msg}); expected a list of objects") from error
            yield line, _checked(shard, line, row)
            state, at = "in list" if state.startswith("in list") else "one after the other", end
    if state.startswith("in list"):
        raise _bad(shard, line, "the list is not closed: the file is truncated")


def _checked(shard: Shard, number: int, row: Any) -> Row:
    if not isinstance(row, dict):
        raise _bad(shard, number, f"expected a JSON object, found {json.dumps(row):.60}")
    return row


def _bad(shard: Shard, number: int, what: str) -> PalestraError:
    return PalestraError(f"{shard.place(number)}: {what}")


def _parquet(shard: Shard, stream: io.BufferedReader, start: int = 0) -> Iterator[Row]:
    _pyarrow(shard)
    import pyarrow.parquet

    # With a buffer instead of pre-buffering, pages are read as they are needed, not a row group whole.
    file = pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=CHUNK)
    ends = list(accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)))
    first = bisect_right(ends, start)  # the row group of the row `start`
    before = ends[first - 1] if first else 0
    for batch in file.iter_batches(BATCH_ROWS, row_groups=range(first, len(ends)), use_threads=False):
        if before + batch.num_rows > start:
            yield from batch.slice(max(0, start - before)).to_pylist()
        before += batch.num_rows


def _arrow(shard: Shard, stream: io.BufferedReader) -> Iterator[Row]:
    arrow = _pyarrow(shard)
    random_access = stream.read(6) == b"ARROW1"  # else the stream format, which `datasets` writes
    stream.seek(0)
    reader = arrow.ipc.open_file(stream) if random_access else arrow.ipc.open_stream(stream)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if random_access else reader
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield from batch.slice(start, BATCH_ROWS).to_pylist()


def _pyarrow(shard: Shard) -> Any:
    with needs_extra(f"reading {shard.path}", "train"):
        import pyarrow
    return pyarrow
