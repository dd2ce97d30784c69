"""The store in a bucket: small values with compare-and-swap by conditional PUT, so that machines can share leases."""

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from palestra.errors import MissingExtra, PalestraError, UsageError

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
