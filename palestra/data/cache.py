"""The cache of downloads: complete entries, locks, and resumable, checked fetches that are swapped in whole."""

import functools
import hashlib
import logging
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

from pydantic import TypeAdapter

from palestra.errors import PalestraError
from palestra.runs.lease import Lease, RunBusy, kept
from palestra.runs.store import LocalStore, read_json, sync_folder, write_json
from palestra.work.redact import redact

log = logging.getLogger("palestra.data")

# Written last into a complete folder. The name is such that no model or dataset has a file of its own like it.
MARKER = "palestra_source.json"
DONE = "done"  # in the folder of a file under download: it is complete and in its place
# Up to this size a file's SHA-256 is computed for the marker; a larger one's is kept where the source gives it.
SMALL_BYTES = 1 << 20
WAIT_SECONDS = 0.2
# Names of files end at 255 bytes; a dot and `.partial` are put around an entry's.
LONGEST_NAME = 200


class Miss(Exception):
    """A source does not have what was requested, or refuses it; the message says why."""


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
class CacheRecord:
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
    def read(cls, data: dict[str, Any]) -> "CacheRecord":
        """The record in a marker."""
        return TypeAdapter(cls).validate_python(data)

    def plain(self) -> dict[str, Any]:
        """As JSON, stamped with the time."""
        return {**asdict(self), "when": datetime.now(UTC).isoformat(timespec="seconds")}

    def content(self) -> frozenset[tuple[str, int | None, str | None]]:
        """What the listings of unchanged files agree in."""
        return frozenset((file.name, file.size, file.version) for file in self.files)


class RemoteSource(Protocol):
    """A place to download from."""

    def list(self) -> CacheRecord:
        """Its files; raises `Miss`."""

    def fetch(self, listed: CacheRecord, file: File, folder: Path) -> Path:
        """Download a listed file into a folder of its own and return its path; raises `Miss`.

        The folder holds what an earlier attempt at the same version left there.
        """


def cache_root() -> Path:
    """`PALESTRA_CACHE`, or `~/.cache/palestra`."""
    return Path(os.environ.get("PALESTRA_CACHE") or "~/.cache/palestra").expanduser()


def entry_folder(ref: str, kind: str, revision: str | None, allow: Sequence[str] | None) -> Path:
    """The folder of a cache entry; another revision or other patterns make another entry."""
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


def read_entry(entry: Path) -> CacheRecord | None:
    """The record of a complete entry; None where there is none, or a file of it is missing or truncated."""
    record = read_marker(entry)
    if record is None or any(file_size(entry / file.name) != file.size for file in record.files):
        return None
    return record


def entry_path(entry: Path, record: CacheRecord) -> Path:
    """What a user of the entry gets: its folder, or its only file where the source is one file."""
    return entry / record.files[0].name if record.single else entry


@contextmanager
def held_alone(lease: Lease, what: str) -> Iterator[None]:
    """Hold a lease; waits while another process has it, and logs so once."""
    warned = False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(kept(lease))
                break
            except RunBusy as busy:
                if not warned:
                    log.warning("waiting for %s: %s", what, busy)
                warned = True
                time.sleep(WAIT_SECONDS)
        yield


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
    with held_alone(lease, f"another download of {unquote(entry.name)}"):
        made = partial_folder(entry) / "files"
        if (made / MARKER).is_file() and not entry.exists():  # killed between the two renames of `fill`
            made.rename(entry)
        for old in partial_folder(entry).glob("old-*"):  # what it was renamed from
            shutil.rmtree(old, ignore_errors=True)
        yield


def describe_file(path: Path, name: str, version: str | None = None, sha256: str | None = None) -> File:
    """A file on this disk."""
    size = path.stat().st_size
    if sha256 is None and size <= SMALL_BYTES:
        sha256 = file_sha256(path)
    return File(name, size, version, sha256)


def read_marker(entry: Path) -> CacheRecord | None:
    """The record in a folder, whether or not its files are all there."""
    return CacheRecord.read(read_json(entry / MARKER)) if (entry / MARKER).is_file() else None


def partial_folder(entry: Path) -> Path:
    """The folder next to an entry in which it is downloaded."""
    return entry.with_name(f".{entry.name}.partial")


def file_size(path: Path) -> int | None:
    """Its bytes; None where there is no such file."""
    return path.stat().st_size if path.is_file() else None


def file_sha256(path: Path) -> str:
    """Its SHA-256 in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


STREAMS = 8


def fill(entry: Path, wanted: CacheRecord, source: RemoteSource) -> CacheRecord:
    """Make the entry hold exactly the wanted files; downloads what neither it nor an earlier attempt has."""
    partial = partial_folder(entry)
    files = partial / "files"
    record, _ = fetch_files(files, partial, wanted, source, entry=entry)
    write_json(files / MARKER, record.plain())
    if entry.exists():
        entry.rename(partial / f"old-{uuid.uuid4().hex[:8]}")
    files.rename(entry)
    sync_folder(entry.parent)
    shutil.rmtree(partial, ignore_errors=True)
    return record


def fetch_files(
    files: Path, partial: Path, wanted: CacheRecord, source: RemoteSource, *, entry: Path | None = None, tries: int = 1
) -> tuple[CacheRecord, int]:
    """Make a folder hold exactly the wanted files; returns its record and how many bytes were already here.

    `partial` has a folder for each file: what has arrived of it or, once it is complete, a marker for the next
    attempt. Files of the wanted version are taken from `entry`.
    """
    for file in wanted.files:
        # A listing is somebody else's text: a name in it must not lead out of the folder, nor to our own files.
        bad_part = any(part in ("", ".", "..") for part in file.name.split("/"))
        if bad_part or "\\" in file.name or "\0" in file.name or file.name == MARKER:
            raise PalestraError(
                f"{wanted.where} lists a file named {file.name!r}, which cannot be stored safely; "
                "nothing was downloaded"
            )
    partial.mkdir(parents=True, exist_ok=True)
    parts = {file.name: part_folder(partial, file) for file in wanted.files}
    done = _keep_what_fits(files, parts, wanted, entry)
    missing = [(file, parts[file.name]) for file in wanted.files if file.name not in done]
    current = {parts[file.name] for file in wanted.files if file.version is not None}
    for folder in set(partial.glob("parts/*")) - current:
        shutil.rmtree(folder, ignore_errors=True)
    resumed = sum(file.size or 0 for file in done.values()) + _part_bytes(partial)
    log.info("downloading %d of %d files from %s", len(missing), len(wanted.files), redact(wanted.where))
    try:
        for file, path in _downloaded(missing, functools.partial(source.fetch, wanted), tries):
            done[file.name] = _accept(file, path, files / file.name)
            (parts[file.name] / DONE).touch()
    except (Miss, PalestraError):
        raise
    except Exception as error:  # each backend has errors of its own; all a user can do is to know and try again
        raise PalestraError(
            f"the download from {wanted.where} was interrupted: {type(error).__name__}: {error}. {len(done)} of its "
            f"{len(wanted.files)} files are complete and {_part_bytes(partial)} bytes of others are kept; run it again "
            "to get the rest."
        ) from error
    return replace(wanted, files=tuple(done[file.name] for file in wanted.files)), resumed


def part_folder(partial: Path, file: File) -> Path:
    """The folder of a file under download; another version has another one."""
    return partial / "parts" / hashlib.sha256(f"{file.version}/{file.name}".encode()).hexdigest()[:16]


def _part_bytes(partial: Path) -> int:
    return sum(path.stat().st_size for path in partial.glob("parts/*/file"))


def _keep_what_fits(files: Path, parts: Mapping[str, Path], wanted: CacheRecord, entry: Path | None) -> dict[str, File]:
    """The files of the wanted version from an earlier attempt and from the entry; all others are removed."""
    marker = None if entry is None else read_marker(entry)
    stored = {} if marker is None else {file.name: (file.size, file.version) for file in marker.files}
    fitting, linked = {}, {}
    for file in wanted.files:
        size, complete = file_size(files / file.name), (parts[file.name] / DONE).exists()
        if file.version is None:
            continue
        if complete and size is not None and file.size in (None, size):
            fitting[file.name] = file
        elif entry and stored.get(file.name) == (file.size, file.version) and file_size(entry / file.name) == file.size:
            linked[file.name] = file
    for folder, _, names in os.walk(files, topdown=False):
        for path in [Path(folder, name) for name in names]:
            if path.relative_to(files).as_posix() not in fitting:
                path.unlink()
        if not os.listdir(folder):
            os.rmdir(folder)
    for name in linked if entry is not None else ():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(entry / name, files / name)
        except OSError:  # a disk without hard links
            shutil.copyfile(entry / name, files / name)
    there = fitting | linked
    return {name: describe_file(files / name, name, file.version, file.sha256) for name, file in there.items()}


def _downloaded(
    missing: Sequence[tuple[File, Path]], fetch: Callable[[File, Path], Path], tries: int
) -> Iterator[tuple[File, Path]]:
    """Download the files several at a time, each into a folder of its own, and yield them as they end.

    The threads are daemons, so that an interrupt ends the process at once and not after the largest file.
    """
    ended: queue.SimpleQueue[tuple[File, Path | BaseException]] = queue.SimpleQueue()
    jobs, stop = iter(missing), threading.Event()

    def attempt(file: File, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            number += 1
            try:
                return fetch(file, folder)
            except (Miss, PalestraError):
                raise
            except Exception as error:  # each backend has errors of its own; all one can do is to try again
                if number >= tries or stop.is_set() or getattr(error, "code", None) in (401, 403, 404):
                    raise
            time.sleep(min(0.2 * 2**number, 5.0))

    def work() -> None:
        for file, folder in jobs:  # one iterator for all threads: a free one takes the next
            try:
                ended.put((file, attempt(file, folder)))
            except BaseException as error:
                ended.put((file, error))
            if stop.is_set():
                return

    for _ in range(min(STREAMS, len(missing))):
        threading.Thread(target=work, name="palestra-download", daemon=True).start()
    try:
        for _ in missing:
            file, result = ended.get()
            if isinstance(result, BaseException):
                raise result
            yield file, result
    finally:
        stop.set()


def _accept(file: File, path: Path, target: Path) -> File:
    """Check a download and move it to its place."""
    size, sha256 = path.stat().st_size, file.sha256
    if file.size is not None and size != file.size:
        path.unlink()
        raise OSError(f"{file.name} has {size} bytes, not {file.size}")
    if sha256 is not None and (actual := file_sha256(path)) != sha256:
        path.unlink()
        raise OSError(f"{file.name} is damaged, or another version: it has the SHA-256 {actual}, not {sha256}")
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    path.replace(target)
    return describe_file(target, file.name, file.version, sha256)
