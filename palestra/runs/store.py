"""The small store: get, put and compare-and-swap of small files, on disk or in a bucket by conditional PUT."""

import fcntl
import json
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from palestra.errors import MissingExtra, PalestraError, UsageError


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


log = logging.getLogger("palestra.runs")

Answer = TypeVar("Answer")

WAITS = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each new try of a call that failed for a while, give or take a half."""
TRANSIENT = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ConditionalRequestConflict"}


class FsspecStore:
    """Small values by key under a URL, like `LocalStore` under a folder; never an empty value.

    A removed key stays as an empty object: not every bucket deletes on a condition, but all that have conditional PUT
    replace on one. Two processes that may write the same bytes must not share a key: after an answer that was lost,
    finding one's own bytes there is how one knows that they were written.
    """

    def __init__(self, url: str):
        self.root = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "_opened": None}  # connections do not cross processes

    @property
    def files(self) -> Any:
        """The fsspec file system."""
        return self._open()[0]

    @property
    def path(self) -> str:
        """The path of the root in it."""
        return self._open()[1]

    def get(self, key: str) -> bytes | None:
        """The value, or None where there is none."""
        return self._read(key)[0]

    def put(self, key: str, data: bytes) -> None:
        """Write the value whole."""
        self.try_often(f"writing {self.root}/{key}", lambda: self._put(key, data))

    def swap(self, key: str, expected: bytes | None, new: bytes | None) -> bool:
        """Replace the value if it still is `expected` (None: absent); says whether it was. `new=None` removes it."""
        found, version = self._read(key)
        if found != expected:
            return False
        if new is None and expected is None:
            return True
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        lost_answer = False

        def put() -> bool:
            nonlocal lost_answer
            try:
                self._put(key, new or b"", **condition)
            except Exception as error:
                if _status(error) == 412:
                    return False
                lost_answer = lost_answer or _status(error) != 409
                raise
            return True

        done = self.try_often(f"writing {self.root}/{key}", put)
        return done or (lost_answer and self.get(key) == new)

    @contextmanager
    def unchanged(self, key: str) -> Iterator[None]:
        """Nothing can keep others from a key here: what is written under the lease must be on a condition itself."""
        yield

    def try_often(self, what: str, call: Callable[[], Answer]) -> Answer:
        """Call, and again where the service or the way to it failed; then one error that says so."""
        for wait in (*WAITS, None):
            try:
                return call()
            except Exception as error:
                if not _transient(error):
                    if isinstance(error, OSError | PalestraError | ValueError):
                        raise
                    raise PalestraError(f"{what} failed with {type(error).__name__}: {error}") from error
                if wait is None:
                    raise PalestraError(
                        f"{what} failed {len(WAITS) + 1} times, at last with {type(error).__name__}: {error}. "
                        "Check the network and the service; what is done is kept, so run it again."
                    ) from error
                log.debug("%s: %s; trying again", what, error)
                time.sleep(wait * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            self._opened = _filesystem(self.root)
        return self._opened

    def _read(self, key: str) -> tuple[bytes | None, str | None]:
        """The value and its version; an empty one is a removed one."""
        from fsspec.asyn import sync

        files, where = self.files, self._where(key)

        async def get() -> tuple[bytes | None, str | None]:
            try:
                found = await files._call_s3("get_object", **where)
            except FileNotFoundError:
                return None, None
            async with found["Body"] as body:
                return await body.read() or None, found["ETag"]

        answer: Any = self.try_often(f"reading {self.root}/{key}", lambda: sync(files.loop, get))
        return answer

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        self.files.call_s3("put_object", Body=data, **self._where(key), **condition)

    def _where(self, key: str) -> dict[str, str]:
        if not key or key.startswith("/") or any(part.startswith(".") for part in key.split("/")):
            raise ValueError(f"not a store key: {key!r} (a relative path without hidden parts)")
        bucket, name, _ = self.files.split_path(f"{self.path}/{key}")
        return {"Bucket": bucket, "Key": name}


def _filesystem(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    if scheme not in ("s3", "s3a"):
        raise UsageError(
            f"{url}: {scheme}:// has no write on a condition that Palestra knows, so two processes could take the same "
            "step there. Use a folder or s3:// as the prefix, and copy the outputs afterwards."
        )
    try:
        import fsspec

        # Tried again here and nowhere below: who retries a write on a condition has to know that the first was lost.
        files, path = fsspec.url_to_fs(
            url,
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60},
        )
    except ImportError as error:
        raise MissingExtra(f"the prefix {url}", "s3") from error
    files.retries = 1
    return files, path.rstrip("/")


def _response(error: BaseException) -> dict[str, Any]:
    for one in (error, error.__cause__):
        if isinstance(response := getattr(one, "response", None), dict):
            return response
    return {}


def _status(error: BaseException) -> int | None:
    return _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")


def _transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in (408, 409, 429) or _response(error).get("Error", {}).get("Code") in TRANSIENT
    names = {kind.__name__ for one in (error, error.__cause__) if one is not None for kind in type(one).__mro__}
    # botocore's and aiohttp's own classes, which are not imported for this
    return bool(names & {"HTTPClientError", "ConnectionError", "TimeoutError", "ClientError", "IncompleteRead"})
