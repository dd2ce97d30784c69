"""The one cache of downloads: where an entry lies, whether it is complete, and who may fill it."""

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

from palestra.errors import PalestraError
from palestra.runs.lease import Lease, RunBusy, kept
from palestra.runs.store import LocalStore, read_json

log = logging.getLogger("palestra.data")

# Written last into a complete folder. The name is such that no model or dataset has a file of its own like it.
MARKER = "palestra_source.json"
# Up to this size a file's SHA-256 is computed for the marker; a larger one's is kept where the source gives it.
SMALL_BYTES = 1 << 20
WAIT_SECONDS = 0.2
# Names of files end at 255 bytes; a dot and `.partial` are put around an entry's.
LONGEST_NAME = 200


class Miss(Exception):
    """A place does not have what was asked for, or does not give it; the message is what it said."""


@dataclass(frozen=True)
class File:
    """A file at its source."""

    name: str
    """Relative path with forward slashes."""
    size: int | None
    """Bytes; None where the source does not say."""
    version: str | None
    """Changes when the content does: an ETag, a git blob, a time of change."""
    sha256: str | None = None


@dataclass(frozen=True)
class Record:
    """What a folder of downloads holds and where it came from; stored in it as its marker."""

    where: str
    """The URL of the source."""
    revision: str | None
    """The commit, where the source has commits."""
    files: tuple[File, ...]
    single: bool = False
    """The source is one file, not a folder."""
    complete: bool = True
    """False in the marker of an upload under way."""
    when: str = ""
    """When the marker was written, UTC."""

    @classmethod
    def read(cls, data: dict[str, Any]) -> "Record":
        """The record in a marker."""
        fields: dict[str, Any] = {**data, "files": tuple(File(**file) for file in data["files"])}
        return cls(**fields)

    def plain(self) -> dict[str, Any]:
        """As JSON, stamped with the time."""
        return {**asdict(self), "when": datetime.now(UTC).isoformat(timespec="seconds")}

    def content(self) -> frozenset[tuple[str, int | None, str | None]]:
        """What the listings of unchanged files agree in."""
        return frozenset((file.name, file.size, file.version) for file in self.files)


class Source(Protocol):
    """A place that lists what it has under one name and hands over its files."""

    def list(self) -> Record:
        """What there is; raises `Miss`."""
        ...

    def fetch(self, listed: Record, file: File, folder: Path) -> Path:
        """Download a file of what was listed to somewhere in a folder of its own, and say where; raises `Miss`."""
        ...


def cache_root() -> Path:
    """`PALESTRA_CACHE`, or `~/.cache/palestra`."""
    return Path(os.environ.get("PALESTRA_CACHE") or "~/.cache/palestra").expanduser()


def entry_folder(ref: str, kind: str, revision: str | None, allow: Sequence[str] | None) -> Path:
    """Where the cache keeps what was asked for; another revision or other patterns make another entry."""
    name = quote(ref, safe="")
    name += "" if revision is None else f"@{quote(revision, safe='')}"
    name += "".join(f"+{quote(pattern, safe='')}" for pattern in sorted(allow or ()))
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return cache_root() / f"{kind}s" / name


def cached_refs(kind: str) -> list[str]:
    """The names and URLs of which the cache has something complete."""
    folder = cache_root() / f"{kind}s"
    names = [path.name for path in folder.iterdir() if (path / MARKER).is_file()] if folder.is_dir() else []
    return sorted({unquote(name.partition("@")[0].partition("+")[0]) for name in names if not name.startswith(".")})


def read_entry(entry: Path) -> Record | None:
    """The record of a complete entry; None where there is none, or a file of it is missing or cut short."""
    record = read_marker(entry)
    if record is None or any(file_size(entry / file.name) != file.size for file in record.files):
        return None
    return record


def entry_path(entry: Path, record: Record) -> Path:
    """What a user of the entry gets: its folder, or its only file where the source is one file."""
    return entry / record.files[0].name if record.single else entry


@contextmanager
def sole_writer(entry: Path) -> Iterator[None]:
    """Be the only process that fills this entry; waits while another one does."""
    leases = cache_root() / "leases"
    try:
        for folder in (leases, entry.parent):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise PalestraError(
            f"cannot write the cache {cache_root()}: {error.strerror}. PALESTRA_CACHE names another folder for it."
        ) from error
    lease = Lease(LocalStore(leases), f"{entry.parent.name}/{entry.name}.json")
    with ExitStack() as stack:
        told = False
        while True:
            try:
                stack.enter_context(kept(lease))
                break
            except RunBusy as busy:
                if not told:
                    log.warning("waiting for another download of %s: %s", unquote(entry.name), busy)
                told = True
                time.sleep(WAIT_SECONDS)
        made = partial_folder(entry) / "files"
        if (made / MARKER).is_file() and not entry.exists():  # killed between the two renames of `fill`
            made.rename(entry)
        for old in partial_folder(entry).glob("old-*"):  # what it was renamed from
            shutil.rmtree(old, ignore_errors=True)
        yield


def describe_file(path: Path, name: str, version: str | None = None, sha256: str | None = None) -> File:
    """A file as it lies on this disk."""
    size = path.stat().st_size
    if sha256 is None and size <= SMALL_BYTES:
        sha256 = file_sha256(path)
    return File(name, size, version, sha256)


def read_marker(entry: Path) -> Record | None:
    """The record in a folder, whether or not its files are all there."""
    return Record.read(read_json(entry / MARKER)) if (entry / MARKER).is_file() else None


def partial_folder(entry: Path) -> Path:
    """The folder beside an entry in which it comes to be."""
    return entry.with_name(f".{entry.name}.partial")


def file_size(path: Path) -> int | None:
    """Its bytes; None where there is no such file."""
    return path.stat().st_size if path.is_file() else None


def file_sha256(path: Path) -> str:
    """Its SHA-256 in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
