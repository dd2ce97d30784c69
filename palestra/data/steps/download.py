"""The step `download`: files of the Hub, a web server, a bucket or a disk, checked, resumed in the middle of a file."""

import hashlib
import os
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import unquote, urlsplit

from palestra.data.cache import File, Miss, Record, file_sha256
from palestra.data.remote import Bucket, Hub, open_filesystem
from palestra.data.sources import NAME, URL, mirror_url
from palestra.data.steps.shards import FILES, LEDGER, same_recipe, write_counts
from palestra.errors import PalestraError, UsageError
from palestra.runs.store import read_json, sync_folder, write_json
from palestra.spec.model import Execution
from palestra.work.redact import redacted

CHUNK = 1 << 20
SECONDS = 60.0
"""How long a server may say nothing."""
WEB = ("http", "https")


def download(
    out: Path,
    *,
    url: str,
    revision: str | None = None,
    files: Sequence[str] = (),
    sha256: str | Mapping[str, str] | None = None,
    tries: Execution[int] = 3,
) -> None:
    """Fetch a file or a folder into `out/files`: a URL (http, https, s3, …), a local path, or a data set on the Hub.

    `files` are patterns of those that are wanted. `sha256` is the checksum of a single file, or one for each name. What
    came before a kill or a broken connection is gone on with where the source is unchanged.
    """
    same_recipe(out, {"step": "download", "url": url, "revision": revision, "files": list(files), "sha256": sha256})
    began = time.perf_counter()
    source = _source(url, revision)
    try:
        listed = source.list()
    except Miss as miss:
        raise PalestraError(f"download: {miss}") from miss
    chosen = [file for file in listed.files if not files or any(fnmatchcase(file.name, one) for one in files)]
    if not chosen:
        names = ", ".join(file.name for file in listed.files[:5])
        raise UsageError(f"no file of {url} matches {', '.join(files)}; there are {len(listed.files)}: {names} …")
    wanted = _with_checksums(chosen, sha256)
    resumed = sum(_fetch(out, source, listed, file, tries) for file in wanted)
    write_json(out / "source.json", redacted(replace(listed, files=tuple(wanted)).plain()))
    size = sum((out / FILES / file.name).stat().st_size for file in wanted)
    more = {"url": url, "revision": listed.revision, "files": len(wanted), "bytes": size, "bytes_resumed": resumed}
    write_counts(out, "download", [{"seconds": time.perf_counter() - began}], **more)


class Web:
    """One file of a web server; `https://name:password@host/…` logs in."""

    def __init__(self, url: str):
        self.url = url
        parts = urlsplit(url)
        account, _, host = parts.netloc.rpartition("@")
        self.address = parts._replace(netloc=host).geturl()
        self.headers = {"Authorization": f"Basic {b64encode(unquote(account).encode()).decode()}"} if account else {}

    def _request(self, method: str) -> urllib.request.Request:
        request = urllib.request.Request(self.address, method=method)
        for name, value in self.headers.items():
            request.add_unredirected_header(name, value)
        return request

    def list(self) -> Record:
        """The file, with its size where the server gives it."""
        try:
            with _answer(self._request("HEAD")) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as error:
            if error.code not in (403, 405, 501):  # a server that only knows GET
                raise Miss(f"{self.url}: the server answered HTTP {error.code} {error.reason}") from error
            headers = {}
        except (OSError, ValueError) as error:
            raise Miss(f"{self.url} cannot be reached ({error})") from error
        name = unquote(urlsplit(self.url).path.rstrip("/").rsplit("/", 1)[-1]) or "index.html"
        size = headers.get("Content-Length")
        version = headers.get("ETag") or headers.get("Last-Modified")
        return Record(self.url, None, (File(name, None if size is None else int(size), version),), single=True)

    @contextmanager
    def open(self, listed: Record, file: File, start: int) -> Iterator[tuple[IO[bytes], int]]:
        """The bytes from `start` on, or from 0 where the server cannot begin in the middle; says which."""
        request = self._request("GET")
        if start:
            request.add_header("Range", f"bytes={start}-")
            if file.version is not None:
                request.add_header("If-Range", file.version)
        with _answer(request) as answer:
            yield cast(IO[bytes], answer), start if answer.status == 206 else 0


class Stored:
    """The files of a bucket or a disk."""

    def __init__(self, url: str):
        self.bucket = Bucket(url)

    def list(self) -> Record:
        """The files there."""
        return self.bucket.list()

    @contextmanager
    def open(self, listed: Record, file: File, start: int) -> Iterator[tuple[IO[bytes], int]]:
        """The bytes from `start` on."""
        path = self.bucket.path if listed.single else f"{self.bucket.path}/{file.name}"
        with cast(IO[bytes], self.bucket.files.open(path, "rb")) as stream:
            stream.seek(start)
            yield stream, start


class HubFiles:
    """The files of a data set on the Hub, at one commit."""

    def __init__(self, name: str, revision: str | None):
        self.hub = Hub(name, "dataset", revision)

    def list(self) -> Record:
        """The files of the revision."""
        return self.hub.list()

    @contextmanager
    def open(self, listed: Record, file: File, start: int) -> Iterator[tuple[IO[bytes], int]]:
        """The bytes from `start` on."""
        import huggingface_hub

        address = huggingface_hub.hf_hub_url(
            self.hub.name, file.name, repo_type="dataset", revision=listed.revision, endpoint=self.hub.endpoint
        )
        request = urllib.request.Request(address)
        for name, value in huggingface_hub.utils.build_hf_headers().items():
            request.add_unredirected_header(name, value)  # large files are on another host, which gets no token
        if start:
            request.add_header("Range", f"bytes={start}-")
        try:
            with _answer(request) as answer:
                yield cast(IO[bytes], answer), start if answer.status == 206 else 0
        except urllib.error.HTTPError as error:
            if error.code not in (401, 403):
                raise
            raise PalestraError(
                f"{self.hub.page} does not give {file.name} (HTTP {error.code}): accept its terms there, and set "
                "HF_TOKEN to a token of that account"
            ) from error


Place = Web | Stored | HubFiles


def _source(url: str, revision: str | None) -> Place:
    local = os.path.expanduser(url)
    scheme = url.partition("://")[0].lower()
    known = bool(URL.fullmatch(url)) or os.path.exists(local)
    if revision is not None and known:
        raise UsageError(f"{url} has no revisions: leave {revision!r} out, or give the address of that version")
    if URL.fullmatch(url):
        return Web(url) if scheme in WEB else Stored(url)
    if known:
        return Stored(str(Path(local).resolve()))
    if not NAME.fullmatch(url):
        raise UsageError(
            f"url: {url!r} is no URL, no file or folder in {Path.cwd()}, and no name owner/name on the Hub"
        )
    mirror = mirror_url(url, "dataset", revision)
    if mirror is not None:
        files, path = open_filesystem(mirror)
        if files.exists(path):
            return Stored(mirror)
    return HubFiles(url, revision)


def _with_checksums(files: Sequence[File], given: str | Mapping[str, str] | None) -> list[File]:
    if given is None:
        return list(files)
    if isinstance(given, str):
        if len(files) != 1:
            raise UsageError(
                f"sha256: there are {len(files)} files; give the checksums by name: {{{files[0].name}: …}}"
            )
        given = {files[0].name: given}
    if unknown := sorted(set(given) - {file.name for file in files}):
        raise UsageError(f"sha256: {', '.join(unknown)} is not among the files that are wanted")
    return [replace(file, sha256=given.get(file.name, file.sha256)) for file in files]


def _fetch(out: Path, source: Place, listed: Record, file: File, tries: int) -> int:
    """Have one file, whole and checked; says how many bytes were there from before."""
    target = out / FILES / file.name
    part = out / LEDGER / "parts" / hashlib.sha256(file.name.encode()).hexdigest()[:16]
    if ".." in file.name.split("/") or file.name.startswith("/"):
        raise PalestraError(f"{listed.where} lists a file named {file.name!r}, which cannot be stored safely")
    if target.exists() and _known(part) == file.version and file.version is not None:
        return target.stat().st_size
    if _known(part) != file.version or file.version is None:
        part.unlink(missing_ok=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    write_json(part.with_suffix(".json"), {"name": file.name, "version": file.version})
    before = part.stat().st_size if part.exists() else 0
    _receive(source, listed, file, part, tries)
    _check(listed, file, part)
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)
    sync_folder(target.parent)
    return before


def _receive(source: Place, listed: Record, file: File, part: Path, tries: int) -> None:
    for attempt in range(1, tries + 1):
        start = part.stat().st_size if part.exists() else 0
        if file.size is not None and start == file.size and start:
            return
        try:
            with source.open(listed, file, start) as (stream, begins), part.open("ab") as target:
                target.truncate(begins)
                while chunk := stream.read(CHUNK):
                    target.write(chunk)
                target.flush()
                os.fsync(target.fileno())
            size = part.stat().st_size
            if file.size is None or size >= file.size:
                return
            problem: Exception = EOFError(f"the connection ended after {size} of {file.size} bytes")
        except PalestraError:
            raise
        except Exception as error:  # each backend has errors of its own; all one can do is to try again
            problem = error
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:  # there is more of it here than there
                part.unlink(missing_ok=True)
        if attempt == tries or (isinstance(problem, urllib.error.HTTPError) and problem.code in (401, 403, 404)):
            kept = part.stat().st_size if part.exists() else 0
            raise PalestraError(
                f"{file.name} of {listed.where}: {type(problem).__name__}: {problem}. {kept} bytes are kept; "
                "run the same again to get the rest"
            ) from problem
        time.sleep(min(0.2 * 2**attempt, 5.0))


def _check(listed: Record, file: File, part: Path) -> None:
    size = part.stat().st_size if part.exists() else 0
    if file.size is not None and size != file.size:
        part.unlink(missing_ok=True)
        raise PalestraError(f"{file.name} of {listed.where} came with {size} bytes, not {file.size}")
    if file.sha256 is not None and (found := file_sha256(part)) != file.sha256:
        part.unlink()
        raise PalestraError(
            f"{file.name} of {listed.where} has the SHA-256 {found}, not {file.sha256}: damaged, or another version"
        )


def _known(part: Path) -> str | None:
    """The version that a part, or the file that became of it, is of."""
    about = part.with_suffix(".json")
    return read_json(about)["version"] if about.exists() else None


@contextmanager
def _answer(request: urllib.request.Request) -> Iterator[Any]:
    request.add_header("User-Agent", "palestra")
    request.add_header("Accept-Encoding", "identity")  # a range of compressed bytes is no range of the file
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        yield answer
