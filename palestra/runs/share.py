"""Sharing runs: copies of run folders at a place for work in progress and at one for what is published.

At a place a run is `NAME/ID/` with its files and, written last, `palestra_run.json`: the size and SHA-256 of each. What
has no such file is not a run yet, so an interrupted push is never pulled. A push sends what is missing or damaged.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import PalestraError, UsageError
from palestra.runs.run import NAME, Run
from palestra.runs.store import read_json, write_bytes
from palestra.track.trace import FILES

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

LISTING = "palestra_run.json"
PLACES = {"dev": "PALESTRA_DEV", "published": "PALESTRA_PUBLISHED"}
CONFIG = "~/.config/palestra/places.json"


def place(name: str) -> tuple[str, bool]:
    """The URL of a place, and whether only finished runs belong there.

    `dev` and `published` are what the environment says (`PALESTRA_DEV`, `PALESTRA_PUBLISHED`), else the file
    ~/.config/palestra/places.json; anything else is a folder or a URL itself.
    """
    if name not in PLACES:
        return _url(name), False
    variable, config = PLACES[name], Path(CONFIG).expanduser()
    where = os.environ.get(variable) or (read_json(config) if config.is_file() else {}).get(name)
    if not where:
        raise UsageError(
            f"the place {name!r} is not configured: set {variable} to a folder, s3://bucket/folder or "
            f'hf://datasets/owner/name, or put {{"{name}": "…"}} into {CONFIG}'
        )
    return _url(where), name == "published"


def push_run(run: Run, files: "AbstractFileSystem", path: str, *, published: bool) -> tuple[int, int]:
    """Copy a trial to a place; how many files were sent and how many were there already."""
    trial = run.trial
    state = trial.state
    if state == "running":
        raise UsageError(f"{trial.path} is running: push it when it has stopped")
    if published and state != "done":
        raise UsageError(f"{trial.path} is {state}, and only finished runs are published: --to dev takes it as it is")
    target, record = f"{path}/{run.name}/{run.id}", listing_of(run)
    listing = record["files"]
    with explained(f"the push of {trial.path}", "Push it again: what is there already is kept."):
        there, found = _read_listing(files, target), files_at(files, target)
        sent = [
            name
            for name, about in listing.items()
            if name not in found or not _intact(files, f"{target}/{name}", found[name], trial.path / name, about)
        ]
        if sent or there != record:
            _send(files, trial.path, target, sent, record, first=there is None)
    return len(sent), len(listing) - len(sent)


def listing_of(run: Run) -> dict[str, Any]:
    """What marks a run as complete at a place: its state, and the size and SHA-256 of each file."""
    trial = run.trial
    files = {name: _described(trial.path / name) for name in _names(trial.path)}
    return {"name": run.name, "id": run.id, "state": trial.state, "seeds": run.seeds, "files": files}


def pull_run(name: str, files: "AbstractFileSystem", path: str, *, root: Path) -> Path:
    """Copy a shared run into the folder of runs; its folder. Files that are there with the right bytes are kept."""
    with explained(f"the pull of {name}", "Pull it again: what has come already is kept."):
        target = _find(name, files, path)
        record = _read_listing(files, target)
        if record is None:
            raise UsageError(f"{target} is not a shared run, or its push was interrupted: push it again")
        check_names(record, target)
        folder = root / record["name"] / record["id"]
        made = folder if (folder / "trial.json").is_file() else folder.with_name(f".{folder.name}.partial")
        for file, about in record["files"].items():
            if _matches(made / file, about):
                continue
            if made == folder:
                raise UsageError(f"{folder} is another run of this name and id ({file} differs): move it away first")
            _get(files, f"{target}/{file}", made / file, about)
        if made != folder:
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.replace(made, folder)
            newest = max(path.name for path in folder.parent.iterdir() if (path / "trial.json").is_file())
            write_bytes(folder.parent / "latest", f"{newest}\n".encode())
    return folder


def _url(where: str) -> str:
    return where if "://" in where else f"file://{Path(where).expanduser().absolute()}"


@contextmanager
def explained(what: str, then: str) -> Iterator[None]:
    """Turn the errors of a file system, each backend having its own, into one that says what to do."""
    try:
        yield
    except PalestraError:
        raise
    except Exception as error:
        raise PalestraError(f"{what} failed: {type(error).__name__}: {error}. {then}") from error


def _find(name: str, files: "AbstractFileSystem", path: str) -> str:
    """The folder of a run at a place: NAME/ID, or the newest finished push of NAME."""
    ids = [name] if "/" in name else [f"{name}/{id}" for id in _children(files, f"{path}/{name}")]
    complete = [id for id in ids if files.exists(f"{path}/{id}/{LISTING}")]
    if not complete:
        known = _children(files, path)
        hint = f"There are: {', '.join(known[:10])}." if known else "It is empty."
        raise UsageError(f"there is no run {name!r} at {path}. {hint}")
    return f"{path}/{max(complete)}"


def _children(files: "AbstractFileSystem", path: str) -> list[str]:
    try:
        listed: Any = files.ls(path, detail=False)
    except FileNotFoundError:
        return []
    return sorted({str(one).rstrip("/").rpartition("/")[2] for one in listed} - {""})


def _read_listing(files: "AbstractFileSystem", target: str) -> dict[str, Any] | None:
    try:
        content: Any = files.cat_file(f"{target}/{LISTING}")
    except FileNotFoundError:
        return None
    try:
        return json.loads(content)
    except ValueError:  # torn by a kill, which a plain disk allows
        return None


def _send(
    files: "AbstractFileSystem", folder: Path, target: str, names: list[str], record: dict[str, Any], *, first: bool
) -> None:
    """Send files, then the listing; to the Hub all of it as one commit."""
    listing = (json.dumps(record, indent=1) + "\n").encode()
    if "hf" in files.protocol:
        _commit(files, {f"{target}/{name}": str(folder / name) for name in names} | {f"{target}/{LISTING}": listing})
        return
    if not first:  # no reader may see the old listing with the new files
        files.rm_file(f"{target}/{LISTING}")
    for name in names:
        files.put_file(str(folder / name), f"{target}/{name}")
    files.pipe_file(f"{target}/{LISTING}", listing)


def _commit(files: Any, contents: dict[str, str | bytes]) -> None:
    """Write files to a Hub repository in one commit: readers see all of them or none."""
    from huggingface_hub import CommitOperationAdd, HfApi

    where = files.resolve_path(next(iter(contents)))
    added = [CommitOperationAdd(files.resolve_path(path).path_in_repo, content) for path, content in contents.items()]
    HfApi(endpoint=files.endpoint, token=files.token).create_commit(
        where.repo_id, added, commit_message=f"Add {len(added)} files", repo_type=where.repo_type
    )
    files.invalidate_cache()


def files_at(files: "AbstractFileSystem", target: str) -> dict[str, Any]:
    """The files below a folder, by name, as the file system describes them."""
    files.invalidate_cache()
    try:
        listed: Any = files.find(target, detail=True)
    except FileNotFoundError:
        return {}
    return {path.removeprefix(f"{target}/"): info for path, info in listed.items()}


def _intact(files: "AbstractFileSystem", path: str, info: Any, source: Path, about: dict[str, Any]) -> bool:
    """Whether a remote file has our bytes: by a checksum of the service, else by reading it."""
    if info["size"] != about["size"]:
        return False
    if info.get("lfs"):  # of the Hub
        return info["lfs"]["sha256"] == about["sha256"]
    if info.get("ETag", "").strip('"') == _digest(source, "md5"):  # of S3, unless sent in parts or encrypted by a key
        return True
    with files.open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == about["sha256"]  # pyrefly: ignore[bad-argument-type]


def _get(files: "AbstractFileSystem", source: str, target: Path, about: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    files.get_file(source, str(temporary))
    if not _matches(temporary, about):
        temporary.unlink()
        raise PalestraError(f"{source} is damaged: its bytes are not the ones pushed. Push the run again.")
    os.replace(temporary, target)


def _names(folder: Path) -> Iterator[str]:
    """The files of a run, without hidden ones (leases, temporaries) and timelines, which are large.

    What a tracker leaves beside them, links to files that are gone and pipes, has no content to send.
    """
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        relative = Path(where).relative_to(folder)
        kept = (name for name in sorted(names) if name[0] != "." and not fnmatch(name, FILES))
        sent = (name for name in kept if os.path.isfile(os.path.join(where, name)))
        yield from ((relative / name).as_posix() for name in sent)


def check_names(record: dict[str, Any], target: str) -> None:
    """Refuse a listing that would write outside of the run's own folder."""
    for part in (record["name"], record["id"]):
        if not NAME.fullmatch(part):
            raise PalestraError(f"{target}: {part!r} is not a valid run name")
    for name in record["files"]:
        if Path(name).is_absolute() or any(part in ("..", "") for part in name.split("/")):
            raise PalestraError(f"{target} names a file outside of itself ({name!r}): it is not a valid run")


def _described(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": _digest(path)}


def _matches(path: Path, about: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == about["size"] and _digest(path) == about["sha256"]


def _digest(path: Path, kind: str = "sha256") -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()
