"""The step `download`: files of the Hub, a web server, a bucket or a disk, with checksums and resumed files."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from palestra.data.cache import CacheRecord, File, Miss, RemoteSource, fetch_files
from palestra.data.remote import Bucket
from palestra.data.sources import URL, places_of
from palestra.data.steps.shards import FILES, LEDGER, same_recipe, write_counts
from palestra.errors import PalestraError, UsageError
from palestra.runs.store import write_json
from palestra.spec.model import Execution
from palestra.work.redact import redacted


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

    `files` are patterns of those that are wanted. `sha256` is the checksum of a single file, or one for each name. A
    download that was killed or lost its connection is resumed where the source is unchanged.
    """
    same_recipe(out, {"step": "download", "url": url, "revision": revision, "files": list(files), "sha256": sha256})
    began = time.perf_counter()
    source, listed = _listed(url, revision)
    chosen = [file for file in listed.files if not files or any(fnmatchcase(file.name, pattern) for pattern in files)]
    if not chosen:
        names = ", ".join(file.name for file in listed.files[:5])
        raise UsageError(f"no file of {url} matches {', '.join(files)}; there are {len(listed.files)}: {names} …")
    wanted = replace(listed, files=_with_checksums(chosen, sha256))
    try:
        record, resumed = fetch_files(out / FILES, out / LEDGER / "download", wanted, source, tries=tries)
    except Miss as miss:  # such as terms that have to be accepted
        raise PalestraError(f"download: {miss}") from miss
    write_json(out / "source.json", redacted(wanted.plain()))
    size = sum(file.size or 0 for file in record.files)
    more = {"url": url, "revision": listed.revision, "files": len(chosen), "bytes": size, "bytes_resumed": resumed}
    write_counts(out, "download", [{"seconds": time.perf_counter() - began}], **more)


def _listed(url: str, revision: str | None) -> tuple[RemoteSource, CacheRecord]:
    """The source that has it, and its files."""
    local = os.path.expanduser(url)
    if revision is not None and (URL.fullmatch(url) or os.path.exists(local)):
        raise UsageError(f"{url} has no revisions: leave {revision!r} out, or give the address of that version")
    places = places_of(url, "dataset", revision)
    if not URL.fullmatch(url) and os.path.exists(local):
        places = [("local", lambda: Bucket(str(Path(local).resolve())))]
    elif not places:
        raise UsageError(
            f"url: {url!r} is not a URL, a file or folder in {Path.cwd()}, or a name owner/name on the Hub"
        )
    misses = []
    for _, source_of in places:
        try:
            source = source_of()
            return source, source.list()
        except Miss as miss:
            misses.append(str(miss))
    raise PalestraError(f"download: {'; '.join(misses)}")


def _with_checksums(files: Sequence[File], checksums: str | Mapping[str, str] | None) -> tuple[File, ...]:
    if checksums is None:
        return tuple(files)
    if isinstance(checksums, str):
        if len(files) != 1:
            raise UsageError(
                f"sha256: there are {len(files)} files; give the checksums by name: {{{files[0].name}: …}}"
            )
        checksums = {files[0].name: checksums}
    if unknown := sorted(set(checksums) - {file.name for file in files}):
        raise UsageError(f"sha256: {', '.join(unknown)} is not among the files that are wanted")
    return tuple(replace(file, sha256=checksums.get(file.name, file.sha256)) for file in files)
