"""The places downloads come from: web servers, any URL that fsspec reads, and the Hugging Face Hub."""

import fcntl
import json
import os
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from palestra.data.cache import MARKER, CacheRecord, File, Miss
from palestra.errors import MissingExtra, UsageError, needs_extra

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Kind = Literal["model", "dataset"]
CHUNK, BLOCK = 1 << 20, 32 << 20  # bytes written at a time, and bytes of one request to a bucket
TIMEOUT = 60.0  # seconds without a byte from a web server

# The keys of file systems for a version, the most exact first.
VERSION_KEYS = ("ETag", "etag", "md5Hash", "md5", "mtime", "LastModified", "created")


class Bucket:
    """A folder or a file at a URL: `s3://`, `gs://`, `file://` and whatever else fsspec reads."""

    def __init__(self, url: str, ignore: str | None = None):
        self.url = url.rstrip("/")
        self.ignore = ignore
        self.files, self.path = open_filesystem(self.url)

    def list(self) -> CacheRecord:
        """The files there; with a marker, those that it names."""
        try:
            info: dict[str, Any] = self.files.info(self.path)
            if info["type"] == "file":
                only = File(self.path.rsplit("/", 1)[-1], info["size"], version_of(info))
                return CacheRecord(self.url, None, (only,), single=True)
            # Keys that end with a slash are empty: folders, as browsers of object stores make them.
            prefix, listed = f"{self.path}/", cast(Any, self.files.find(self.path, detail=True))
            infos = {key[len(prefix) :]: listed[key] for key in listed if key.startswith(prefix) and key[-1] != "/"}
            files = {name: File(name, info["size"], version_of(info)) for name, info in infos.items()}
            text = self.files.cat_file(f"{self.path}/{MARKER}") if MARKER in files else None
            marker = None if text is None else CacheRecord.read(json.loads(text))
        except FileNotFoundError as error:
            raise Miss(f"{self.url} does not exist") from error
        except Exception as error:  # each backend has errors of its own for no credentials, no network, no such bucket
            raise Miss(f"{self.url} cannot be read ({type(error).__name__}: {error})") from error
        if marker is not None:
            return self._marked(files, marker)
        kept = [file for name, file in files.items() if self.ignore is None or not fnmatchcase(name, self.ignore)]
        if not kept:
            raise Miss(f"{self.url} has no files")
        return CacheRecord(self.url, None, tuple(kept))

    def fetch(self, listed: CacheRecord, file: File, folder: Path) -> Path:
        """Download one file, or the rest of it."""
        path = self.path if listed.single else f"{self.path}/{file.name}"

        @contextmanager
        def rest(start: int) -> Iterator[tuple[IO[bytes], int]]:
            with cast(IO[bytes], self.files.open(path, "rb", block_size=BLOCK)) as stream:
                stream.seek(start)
                yield stream, start

        return _receive(folder / "file", file, rest)

    def _marked(self, files: dict[str, File], marker: CacheRecord) -> CacheRecord:
        """What was pushed, with today's versions; files left there by an earlier push are not part of it."""
        if not marker.complete:
            raise Miss(f"{self.url} is being uploaded, or its upload was interrupted: push it again")
        for file in marker.files:
            there = files.get(file.name)
            if there is None or there.size != file.size:
                size = "is missing" if there is None else f"has {there.size} bytes, not {file.size}"
                raise Miss(f"{self.url} is damaged ({file.name} {size}): push it again")
        versioned = (replace(file, version=files[file.name].version) for file in marker.files)
        return CacheRecord(self.url, marker.revision, tuple(versioned))


class Web:
    """One file of a web server; `https://name:password@host/…` logs in."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None):
        self.url = url
        parts = urlsplit(url)
        account, _, host = parts.netloc.rpartition("@")
        self.address = parts._replace(netloc=host).geturl()
        login = {"Authorization": f"Basic {b64encode(unquote(account).encode()).decode()}"} if account else {}
        self.headers = {**(headers or {}), **login}  # for this host alone, not for one that it redirects to

    def list(self) -> CacheRecord:
        """The file, with its size where the server gives it."""
        try:
            with self._request("HEAD", {}) as response:
                headers = response.headers
        except HTTPError as error:
            if error.code not in (403, 405, 501):  # a server that only knows GET
                raise Miss(f"{self.url}: HTTP {error.code} {error.reason}") from error
            headers = {}
        except (OSError, ValueError) as error:
            raise Miss(f"{self.url} cannot be reached ({error})") from error
        name = unquote(urlsplit(self.url).path.rstrip("/").rsplit("/", 1)[-1]) or "index.html"
        size = headers.get("Content-Length")
        version = headers.get("ETag") or headers.get("Last-Modified")
        return CacheRecord(self.url, None, (File(name, None if size is None else int(size), version),), single=True)

    def fetch(self, listed: CacheRecord, file: File, folder: Path) -> Path:
        """Download the file, or the rest of it; all of it where the server cannot begin in the middle."""

        @contextmanager
        def rest(start: int) -> Iterator[tuple[IO[bytes], int]]:
            headers = {"Range": f"bytes={start}-"} if start else {}
            if start and file.version is not None:
                headers["If-Range"] = file.version
            with self._request("GET", headers) as response:
                yield response, start if response.status == 206 else 0

        try:
            return _receive(folder / "file", file, rest)
        except HTTPError as error:
            if error.code == 416:  # more of it is here than there
                (folder / "file").unlink()
            raise

    def _request(self, method: str, headers: dict[str, str]) -> Any:
        # Not compressed: a range of compressed bytes is not a range of the file.
        headers = {"User-Agent": "palestra", "Accept-Encoding": "identity", **headers}
        request = Request(self.address, method=method, headers=headers)
        for name, value in self.headers.items():
            request.add_unredirected_header(name, value)
        return urlopen(request, timeout=TIMEOUT)


def _receive(part: Path, file: File, rest: Callable[[int], AbstractContextManager[tuple[IO[bytes], int]]]) -> Path:
    """Append the rest of a download: `rest` opens the bytes from an offset on and says from which it really does."""
    with part.open("ab") as target:
        # A thread of an attempt that failed in this process may still write to it.
        fcntl.flock(target, fcntl.LOCK_EX)
        start = target.seek(0, os.SEEK_END)
        if start == 0 or start != file.size:
            with rest(start) as (stream, begins):
                target.truncate(begins)
                shutil.copyfileobj(stream, target, CHUNK)
        target.flush()
        size = target.tell()
    if file.size is not None and size < file.size:
        raise EOFError(f"the connection ended after {size} of {file.size} bytes")
    return part


class Hub:
    """A model or a dataset of the Hugging Face Hub, or of a server that speaks like it (`HF_ENDPOINT`)."""

    def __init__(self, name: str, kind: Kind, revision: str | None):
        self.name, self.kind, self.revision = name, kind, revision
        # huggingface_hub reads the variable when it is imported, which other libraries do at a time of their own.
        self.endpoint = (os.environ.get("HF_ENDPOINT") or _hub().constants.ENDPOINT).rstrip("/")
        self.page = f"{self.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"

    def list(self) -> CacheRecord:
        """The files at a commit."""
        hub, errors = _hub(), _hub().errors
        api, timeout = hub.HfApi(endpoint=self.endpoint), hub.constants.HF_HUB_ETAG_TIMEOUT
        try:
            commit = api.repo_info(self.name, repo_type=self.kind, revision=self.revision, timeout=timeout).sha
            tree = list(api.list_repo_tree(self.name, repo_type=self.kind, revision=commit, recursive=True))
        except errors.GatedRepoError as error:
            raise Miss(self._gated()) from error
        except errors.RevisionNotFoundError as error:
            raise Miss(f"{self.page} has no revision {self.revision!r}") from error
        except errors.RepositoryNotFoundError as error:
            raise Miss(
                f"{self.endpoint} has no {self.kind} of this name, or does not show it to you "
                f"(HTTP {error.response.status_code}); a private one needs HF_TOKEN"
            ) from error
        except errors.HfHubHTTPError as error:
            reason = error.server_message or error.response.reason_phrase
            raise Miss(f"{self.endpoint} returned HTTP {error.response.status_code}: {reason}") from error
        except errors.OfflineModeIsEnabled as error:
            raise Miss("not tried, because HF_HUB_OFFLINE is set") from error
        except errors.HFValidationError as error:
            raise Miss(f"not tried: {error}") from error
        except errors.HTTPError as error:  # of the HTTP client that this version of huggingface_hub uses
            raise Miss(f"{self.endpoint} cannot be reached ({type(error).__name__}: {error})") from error
        files = []
        for entry in tree:
            if isinstance(entry, hub.hf_api.RepoFile):
                sha256 = None if entry.lfs is None else entry.lfs.sha256
                files.append(File(entry.path, entry.size, sha256 or entry.blob_id, sha256))
        if not files:
            raise Miss(f"{self.page} has no files")
        return CacheRecord(self.page, commit, tuple(files))

    def fetch(self, listed: CacheRecord, file: File, folder: Path) -> Path:
        """Download one file, or the rest of it; only here does the Hub refuse a repository with terms to accept.

        Not by huggingface_hub, which begins a file anew in every process.
        """
        hub = _hub()
        address = hub.hf_hub_url(
            self.name, file.name, repo_type=self.kind, revision=listed.revision, endpoint=self.endpoint
        )
        try:
            # At a commit files do not change, and hosts of large ones have versions of their own.
            return Web(address, hub.utils.build_hf_headers()).fetch(listed, replace(file, version=None), folder)
        except HTTPError as error:
            if error.code in (401, 403):
                raise Miss(self._gated()) from error
            raise

    def _gated(self) -> str:
        return f"{self.page} is gated: accept its terms there, and set HF_TOKEN to a token of that account"


def open_filesystem(url: str) -> tuple["AbstractFileSystem", str]:
    """The fsspec file system of a URL and the path in it."""
    scheme = url.partition("://")[0]
    with needs_extra(f"reading {url}", "train"):
        import fsspec
    try:
        # Neither this object nor its listings are shared: what others have written since must be seen.
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        files, path = fsspec.url_to_fs(url, **options, **({"auto_mkdir": True} if scheme == "file" else {}))
    except ImportError as error:
        if scheme in ("s3", "s3a"):
            raise MissingExtra(f"reading {url}", "s3") from error
        raise UsageError(f"cannot read {url}: {error}") from error
    except ValueError as error:
        raise UsageError(f"cannot read {url}: {error}. Schemes such as s3://, gs:// and file:// are known.") from error
    return files, path.rstrip("/")


def version_of(info: dict[str, Any]) -> str | None:
    """What changes with the content of a file, of what its file system says."""
    return next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), None)


def _hub() -> Any:
    with needs_extra("the Hugging Face Hub", "train"):
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    return huggingface_hub
