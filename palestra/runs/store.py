"""The one small store: get, put and compare-and-swap of small files, each atomic."""

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

from palestra.errors import PalestraError


class LocalStore:
    """Small values by key under one local folder; a key is a relative path with forward slashes."""

    def __init__(self, root: Path | str):
        self.root = Path(root)

    def get(self, key: str) -> bytes | None:
        """The value, or None where there is none."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: str, data: bytes) -> None:
        """Write the value whole: a reader sees the old one or the new one, also after a kill."""
        write_bytes(self._path(key), data)

    def swap(self, key: str, expected: bytes | None, new: bytes | None) -> bool:
        """Replace the value if it still is `expected` (None: absent); says whether it was. `new=None` removes it."""
        with self._locked(key):
            if self.get(key) != expected:
                return False
            if new is not None:
                self.put(key, new)
            elif expected is not None:
                self._path(key).unlink()
            return True

    def unchanged(self, key: str) -> AbstractContextManager[None]:
        """A stretch in which nobody else can swap the value."""
        return self._locked(key)

    def _path(self, key: str) -> Path:
        parts = Path(key).parts
        if not parts or Path(key).is_absolute() or any(part.startswith(".") for part in parts):
            raise ValueError(f"not a store key: {key!r} (a relative path without hidden parts)")
        return self.root.joinpath(*parts)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it would let two processes hold locks on two files of one name.
        with (path.parent / f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Closing would not do where a child forked meanwhile has the file open too.
                fcntl.flock(lock, fcntl.LOCK_UN)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with written(path) as file:
        file.write(data)


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write atomically: beside `path`, fsynced, renamed; missing parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, so that a rename survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, obj: Any) -> None:
    """Write a small JSON file atomically, indented for people."""
    write_bytes(path, (json.dumps(obj, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file; one that does not parse is an error that names it."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise PalestraError(f"{path} is not valid JSON ({error}); restore it from a copy or remove it") from error


@contextmanager
def clear_write_errors(path: Path | str) -> Iterator[None]:
    """Turn an error of the disk into one that says which run folder cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise PalestraError(
            f"cannot write the run folder {path}: {error.strerror or error}{where}. "
            "Check its permissions and the free space; a run that had begun then goes on with palestra train --resume."
        ) from error
