"""Filling an entry of the cache: file by file, each checked, going on where a kill left off, swapped in whole."""

import functools
import json
import logging
import os
import queue
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from palestra.data.cache import (
    MARKER,
    File,
    Miss,
    Record,
    Source,
    describe_file,
    file_sha256,
    file_size,
    partial_folder,
    read_marker,
)
from palestra.errors import PalestraError
from palestra.runs.store import sync_folder, write_bytes, write_json

log = logging.getLogger("palestra.data")

STREAMS = 8


def fill(entry: Path, wanted: Record, source: Source) -> Record:
    """Make the entry hold exactly the wanted files; downloads what neither it nor an earlier attempt has."""
    for file in wanted.files:
        _refuse_unsafe(file.name, wanted.where)
    partial = partial_folder(entry)
    files = partial / "files"
    files.mkdir(parents=True, exist_ok=True)
    for left in partial.glob("scratch-*"):
        shutil.rmtree(left, ignore_errors=True)
    done = _keep_what_fits(entry, partial, wanted)
    # Afresh, so that no line of another version and no half line is left.
    write_bytes(
        partial / "ledger.jsonl", "".join(_ledger_line(file) for file in wanted.files if file.name in done).encode()
    )
    missing = [file for file in wanted.files if file.name not in done]
    fetch = functools.partial(source.fetch, wanted)
    # A name of its own: a thread of an attempt that failed in this process may still write to the last one.
    scratch = partial / f"scratch-{uuid.uuid4().hex[:8]}"
    log.info("downloading %d of %d files from %s", len(missing), len(wanted.files), wanted.where)
    try:
        with (partial / "ledger.jsonl").open("a") as ledger:
            for file, path in _downloaded(missing, fetch, scratch):
                done[file.name] = _accept(file, path, files / file.name)
                ledger.write(_ledger_line(file))
                ledger.flush()
    except (Miss, PalestraError):
        raise
    except Exception as error:  # each backend has errors of its own; all a user can do is to know and try again
        raise PalestraError(
            f"the download from {wanted.where} broke off: {type(error).__name__}: {error}. "
            f"{len(done)} of its {len(wanted.files)} files are complete and kept; run the same again to get the rest."
        ) from error
    record = replace(wanted, files=tuple(done[file.name] for file in wanted.files))
    write_json(files / MARKER, record.plain())
    if entry.exists():
        entry.rename(partial / f"old-{uuid.uuid4().hex[:8]}")
    files.rename(entry)
    sync_folder(entry.parent)
    shutil.rmtree(partial, ignore_errors=True)
    return record


def _refuse_unsafe(name: str, where: str) -> None:
    """A listing is somebody else's text: a name in it must not lead out of the folder, nor to our own files."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name or name == MARKER:
        raise PalestraError(
            f"{where} lists a file named {name!r}, which cannot be stored safely; nothing was downloaded"
        )


def _keep_what_fits(entry: Path, partial: Path, wanted: Record) -> dict[str, File]:
    """What is there already: files of an earlier attempt and of the entry that are of the wanted version."""
    files = partial / "files"
    known = _read_ledger(partial / "ledger.jsonl")
    marker = read_marker(entry)
    there = [] if marker is None else [file for file in marker.files if file_size(entry / file.name) == file.size]
    stored = {file.name: (file.size, file.version) for file in there}
    fitting = {}
    for file in wanted.files:
        path, identity = files / file.name, (file.size, file.version)
        if file.version is None:
            continue
        if known.get(file.name) == identity and file_size(path) == file.size:
            fitting[file.name] = file
        elif stored.get(file.name) == identity:
            fitting[file.name] = file
            known.pop(file.name, None)
    stay = known.keys() & fitting.keys()
    for folder, _, names in os.walk(files, topdown=False):
        for path in [Path(folder, name) for name in names]:
            if path.relative_to(files).as_posix() not in stay:
                path.unlink()
        if not os.listdir(folder) and Path(folder) != files:
            os.rmdir(folder)
    for name in fitting.keys() - stay:
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        _link(entry / name, files / name)
    return {name: describe_file(files / name, name, file.version, file.sha256) for name, file in fitting.items()}


def _ledger_line(file: File) -> str:
    return json.dumps([file.name, file.size, file.version]) + "\n"


def _read_ledger(path: Path) -> dict[str, tuple[int | None, str | None]]:
    known = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            name, size, version = json.loads(line)
        except ValueError:  # the line that a kill cut short
            continue
        known[name] = (size, version)
    return known


def _downloaded(
    files: Sequence[File], fetch: Callable[[File, Path], Path], scratch: Path
) -> Iterator[tuple[File, Path]]:
    """Download the files several at a time, each into a folder of its own, and hand them over as they end.

    The threads are daemons, so that an interrupt ends the process at once and not after the largest file.
    """
    waiting: queue.SimpleQueue[tuple[int, File]] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[File, Path | BaseException]] = queue.SimpleQueue()
    for numbered in enumerate(files):
        waiting.put(numbered)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                number, file = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                folder = scratch / str(number)
                folder.mkdir(parents=True)
                ended.put((file, fetch(file, folder)))
            except BaseException as error:
                ended.put((file, error))

    for _ in range(min(STREAMS, len(files))):
        threading.Thread(target=work, name="palestra-download", daemon=True).start()
    try:
        for _ in files:
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
        raise OSError(f"{file.name} came with {size} bytes, not {file.size}")
    if sha256 is not None and file_sha256(path) != sha256:
        raise OSError(f"{file.name} came damaged: its SHA-256 is not {sha256}")
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    path.replace(target)
    return describe_file(target, file.name, file.version, sha256)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a disk without hard links
        shutil.copyfile(source, target)
