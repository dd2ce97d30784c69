"""A store of small files with compare-and-swap: on disk, or in a bucket by conditional PUT."""

import fcntl
import json
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote

from palestra.errors import MissingExtra, PalestraError, UsageError


class LocalStore:
    """Small values by key under one local folder; a key is a relative path with forward slashes."""

    def __init__(self, root: Path | str):
        self.root = Path(root)

    def get(self, key: str) -> bytes | None:
        """The value, or None."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: str, data: bytes) -> None:
        """Write the value atomically: a reader sees the old one or the new one, also after a kill."""
        write_bytes(self._path(key), data)

    def swap(self, key: str, expected: bytes | None, new: bytes | None) -> bool:
        """Replace the value if it still is `expected` (None: absent); whether it was. `new=None` removes it."""
        with self._locked(key):
            if self.get(key) != expected:
                return False
            if new is not None:
                self.put(key, new)
            elif expected is not None:
                self._path(key).unlink()
            return True

    def listed(self) -> list[str]:
        """All keys, sorted."""
        paths = [path.relative_to(self.root) for path in self.root.rglob("*") if path.is_file()]
        return sorted(path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts))

    def unchanged(self, key: str) -> AbstractContextManager[None]:
        """A block in which nobody else can swap the value."""
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
                # Closing is not enough if a child forked meanwhile has the file open too.
                fcntl.flock(lock, fcntl.LOCK_UN)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with written(path) as file:
        file.write(data)


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write atomically: a temporary next to `path`, fsynced and renamed; parent folders are made."""
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


def read_lines(path: Path) -> Iterator[Any]:
    """The rows of a file of JSON lines, up to the last one if that is still being written or was torn by a kill."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise PalestraError(f"{path}:{number} is not a line of JSON ({error}); remove the line") from error


@contextmanager
def clear_write_errors(path: Path | str) -> Iterator[None]:
    """Turn a disk error into one that says which run folder cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise PalestraError(
            f"cannot write the run folder {path}: {error.strerror or error}{where}. "
            "Check its permissions and the free space; a started run then continues with palestra train --resume."
        ) from error


log = logging.getLogger("palestra.runs")

Result = TypeVar("Result")

WAITS = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each retry, jittered by half."""
TRANSIENT = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ConditionalRequestConflict"}


class FsspecStore:
    """Small values by key under a URL, like `LocalStore` under a folder; never an empty value.

    A removed key stays as an empty object: not every bucket deletes on a condition, but all that have conditional PUT
    replace on one. Two processes that may write the same bytes must not share a key: after a lost response, finding
    its own bytes there is how a process knows that they were written.
    """

    def __init__(self, url: str):
        self.root = url.rstrip("/")

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}  # connections do not cross processes

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        return _filesystem(self.root)

    @property
    def google(self) -> bool:
        """Whether it is in Google Cloud Storage, where a version is a generation."""
        return self.root.startswith(("gs://", "gcs://"))

    @property
    def files(self) -> Any:
        """The fsspec file system."""
        return self._opened[0]

    @property
    def path(self) -> str:
        """The path of the root in it."""
        return self._opened[1]

    def get(self, key: str) -> bytes | None:
        return self._read(key)[0]

    def put(self, key: str, data: bytes) -> None:
        self.try_often(f"writing {self.root}/{key}", lambda: self._put(key, data))

    def swap(self, key: str, expected: bytes | None, new: bytes | None) -> bool:
        value, version = self._read(key)
        if value != expected:
            return False
        if new is None and expected is None:
            return True
        if self.google:
            condition = {"ifGenerationMatch": version or "0"}
        else:
            condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}

        def put() -> bool:
            try:
                self._put(key, new or b"", **condition)
            except Exception as error:
                if _status(error) == 412:
                    return self.get(key) == new  # an earlier try has written it, and its response was lost
                raise
            return True

        return self.try_often(f"writing {self.root}/{key}", put)

    def listed(self) -> list[str]:
        """All keys, sorted; those of removed values too."""
        found = self.try_often(f"listing {self.root}", lambda: self.files.find(self.path))
        return sorted(path.removeprefix(f"{self.path}/") for path in found)

    @contextmanager
    def unchanged(self, key: str) -> Iterator[None]:
        """No locks here: what is written under the lease must be a conditional write itself."""
        yield

    def try_often(self, what: str, call: Callable[[], Result]) -> Result:
        """Call, with retries if the service or the network fails; then one error that says so."""
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
                        f"{what} failed {len(WAITS) + 1} times, last with {type(error).__name__}: {error}. "
                        "Check the network and the service, then run it again; what is done is kept."
                    ) from error
                log.debug("%s: %s; trying again", what, error)
                time.sleep(wait * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    def _read(self, key: str) -> tuple[bytes | None, str | None]:
        """The value and its version; an empty one is a removed one."""
        from fsspec.asyn import sync

        files, where = self.files, self._where(key)

        async def get() -> tuple[bytes | None, str | None]:
            try:
                if self.google:
                    headers, content = await files._call("GET", files.url(f"{self.path}/{key}"))
                    return content or None, headers["X-Goog-Generation"]
                response = await files._call_s3("get_object", **where)
            except FileNotFoundError:
                return None, None
            async with response["Body"] as body:
                return await body.read() or None, response["ETag"]

        result: Any = self.try_often(f"reading {self.root}/{key}", lambda: sync(files.loop, get))
        return result

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        if self.google:
            where, kind = self._where(key), {"Content-Type": "application/octet-stream"}
            upload = f"{self.files._location}/upload/storage/v1/b/{quote(where['Bucket'])}/o"
            about = {"uploadType": "media", "name": where["Key"], **condition}
            self.files.call("POST", upload, headers=kind, data=data, **about)
            return
        self.files.call_s3("put_object", Body=data, **self._where(key), **condition)

    def _where(self, key: str) -> dict[str, str]:
        if not key or key.startswith("/") or any(part.startswith(".") for part in key.split("/")):
            raise ValueError(f"not a store key: {key!r} (a relative path without hidden parts)")
        bucket, name, _ = self.files.split_path(f"{self.path}/{key}")
        return {"Bucket": bucket, "Key": name}


def _filesystem(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        # Retries happen here and nowhere below: retrying a conditional write requires knowing that a response was lost.
        once = {"total_max_attempts": 1}
        options["config_kwargs"] = {"retries": once, "connect_timeout": 10, "read_timeout": 60}
    elif scheme not in ("gs", "gcs"):
        raise UsageError(
            f"{url}: {scheme}:// has no conditional write that Palestra supports, so two processes could run the same "
            "step there. Use a folder, s3:// or gs:// as the prefix, and copy the outputs afterwards."
        )
    try:
        import fsspec

        files, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingExtra(f"the prefix {url}", "s3" if scheme.startswith("s3") else "gcs") from error
    files.retries = 1
    return files, path.rstrip("/")


def _response(error: BaseException) -> dict[str, Any]:
    for one in (error, error.__cause__):
        if isinstance(response := getattr(one, "response", None), dict):
            return response
    return {}


def _status(error: BaseException) -> int | None:
    if isinstance(error, FileExistsError):  # what gcsfs makes of a condition that does not hold
        return 412
    if isinstance(code := getattr(error, "code", None), int):
        return code
    return _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")


def _transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in (408, 409, 429) or _response(error).get("Error", {}).get("Code") in TRANSIENT
    names = {kind.__name__ for one in (error, error.__cause__) if one is not None for kind in type(one).__mro__}
    # botocore's and aiohttp's own classes, which are not imported for this
    return bool(names & {"HTTPClientError", "ConnectionError", "TimeoutError", "ClientError", "IncompleteRead"})
