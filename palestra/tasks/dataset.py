"""The rows of a task: a file or folder of this machine, a folder under `PALESTRA_DATA`, a URL or the Hub."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.data.readers import COMPRESSED, FORMATS, Row, Shard, read_rows, shards
from palestra.data.sources import URL, SourceNotFound, resolve
from palestra.errors import UsageError

SAVED = ("dataset_info.json", "state.json")  # written by `save_to_disk` of `datasets`, with its Arrow files


def load_rows(
    source: str | None, *, default: str, files: Sequence[str], folder: str | None = None, split: str | None = None
) -> list[Row]:
    """All rows of a task's source, in the order of its files.

    `source` is a file, a folder, a pattern, a folder under `PALESTRA_DATA`, a URL such as s3://…, or a name
    `owner/name` on the Hub. Null means `folder` under `PALESTRA_DATA` (by default the last part of `default`), else
    `default`. What is not on this machine is downloaded once, whole, to the cache of `palestra.data.sources`. `files`
    are the files of a folder: names or patterns, of which the first that matches counts; one that matches folders means
    those of `save_to_disk`. A source that is one file, or one folder of `save_to_disk` without splits, is read as it
    is. `split` separates the documents of a text file.
    """
    place = _place(source, default, folder or default.rstrip("/").rpartition("/")[2])
    return [row for shard in _shards(place, files, split) for row in read_rows(shard)]


def files_of(split: str) -> tuple[str, ...]:
    """The usual names of the files of a split, for `load_rows`."""
    endings = [format + packed for format in (".jsonl", ".json") for packed in ("", *COMPRESSED)] + [".parquet"]
    return (*(split + ending for ending in endings), f"{split}-*.parquet", f"*/{split}-*.parquet", split)


def text_of(row: Mapping[str, Any], column: str, number: int, where: str) -> str:
    """A column of a row as text. A dot leads into it: `reward_model.ground_truth`, `prompt.0.content`.

    `number` counts rows from 0, and `where` names the data in errors.
    """
    value = row.get(column)
    if column not in row and "." in column:
        value = _inside(row, column.split("."))
    if value is None:
        raise UsageError(
            f"{where}, row {number + 1}: there is no {column!r}; the row has {', '.join(row) or 'nothing'}"
        )
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f"{where}, row {number + 1}: {column!r} is {value!r:.60}, not text or a number")
    return str(value)


def _inside(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, Sequence) and not isinstance(value, str) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _place(source: str | None, default: str, folder: str) -> str | Path:
    """Where the rows are on this machine; a pattern is returned as it is."""
    ref = default if source is None else source
    data = os.environ.get("PALESTRA_DATA")
    here = Path(ref).expanduser()
    stored = Path(data or ".") / (folder if source is None else ref)
    if source is not None and not URL.fullmatch(ref):
        if here.exists():
            return here
        if any(sign in ref for sign in "*?["):
            return str(here)
    if data and not URL.fullmatch(str(stored)) and stored.exists():
        return stored
    if source is not None and not URL.fullmatch(ref) and here.suffix in (*FORMATS, *COMPRESSED):  # not a Hub name
        raise UsageError(f"there is no file {ref} in {Path.cwd()}" + (f", nor in {data}" if data else ""))
    try:
        return resolve(ref, kind="dataset")
    except SourceNotFound as error:
        hint = f"it has no {stored.relative_to(data)}" if data else "not set; it can name a folder of data sets"
        raise SourceNotFound(f"{error}\nPALESTRA_DATA: {hint}") from error


def _shards(place: str | Path, files: Sequence[str], split: str | None) -> list[Shard]:
    if isinstance(place, str) or place.is_file() or all((place / name).is_file() for name in SAVED):
        return shards(place, split=split)
    for pattern in files:
        if paths := _visible(place, pattern):
            return shards(paths, split=split)
    names = [str(path.relative_to(place)) for path in _visible(place, "**/*") if path.is_file()]
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    raise UsageError(f"{place} has none of {', '.join(files)}. It has: {shown or 'nothing'}. Name the file itself")


def _visible(folder: Path, pattern: str) -> list[Path]:
    paths = folder.glob(pattern)
    return sorted(path for path in paths if not any(p.startswith(".") for p in path.relative_to(folder).parts))
