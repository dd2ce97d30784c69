"""A run folder copied to a place while it trains, by a thread, so that the run can continue from there alone.

At a place a run is `NAME/ID/`, as in `share.py`. At any instant what is there is a run folder as a kill leaves it: a
checkpoint's `meta.json` comes after its other files and after the rows that it counts, and goes before them. The thread
never fails the run: what cannot be sent is said once and tried again.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import LeaseLost, PalestraError, RunBusy, UsageError
from palestra.runs import checkpoint as checkpoints
from palestra.runs.lease import Lease, repeating
from palestra.runs.run import Run
from palestra.runs.share import LISTING, check_names, explained, files_at, listing_of
from palestra.runs.store import FsspecStore, LocalStore

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = logging.getLogger("palestra.runs")

EVERY = float(os.environ.get("PALESTRA_SYNC_SECONDS", "10"))
"""Seconds between two rounds."""
SLOWEST = 300.0  # seconds between two tries of a place that fails
RENEW = 5.0  # seconds; each is a request
WHOLE = 1800.0  # seconds for the last round of a run that has ended by itself
PART = 8 << 20  # bytes; of a larger file that has grown only the new ones are sent
OVERLAP = 4096  # bytes before the new ones that must be those that were sent: a resume truncates
Opened = Callable[[], "tuple[AbstractFileSystem, str]"]


def grace() -> float:
    """Seconds that a run which was told to stop may take to send the rest: PALESTRA_GRACE, or 90."""
    return float(os.environ.get("PALESTRA_GRACE", "90"))


class Sync:
    """The copy of one trial's folder; the thread runs inside the `with` block, whose end sends the rest."""

    def __init__(self, run: Run, url: str, opened: Opened):
        self.run, self.folder, self.url = run, run.path, f"{url.rstrip('/')}/{run.name}/{run.id}"
        self._open, self._sent, self._first = opened, {}, True
        self._place: tuple[Any, str] | None = None
        self._lease = _lease(self.url)
        self._leased = self._failed = self._lost = self.complete = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="palestra-sync", daemon=True)
        self._renewing = contextlib.ExitStack()

    def __enter__(self) -> "Sync":
        try:
            self._own()
        except RunBusy:
            raise
        except Exception as error:  # each service has errors of its own; the thread tries again
            self._say(error)
        self._renewing.enter_context(repeating(self._renew, RENEW))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ending.set()
        seconds = WHOLE if kind is None else grace()
        try:
            self._thread.join(seconds)
        except KeyboardInterrupt:  # told to stop while it sends the rest
            self._thread.join(grace())
        self._renewing.close()
        if not self.complete:
            self._lost = True  # for the thread, which may be in the middle of a request
            self._thread.join(1.0)
        if self._leased and self._lease is not None:
            with contextlib.suppress(Exception):  # it ends by itself after 30 s
                self._lease.release()
        if not self.complete:
            log.warning(
                "%s does not have all of the run after %g s: the rest is in %s. Send it with: palestra train --resume "
                "%s --sync %s", self.url, seconds, self.folder, self.folder, self.url.rsplit("/", 2)[0],
            )  # fmt: skip

    def round(self) -> None:
        """Send what is new or has changed, then remove what is gone."""
        self._own()
        files, path = self._place = self._place or self._open()
        target = f"{path}/{self.run.name}/{self.run.id}"
        # Listed before anything is read: rows that a listed checkpoint counts are in the files by now.
        here = {name: _version(self.folder / name) for name in _names(self.folder)}
        if self._first:
            self._sent = self._start(files, target, here)
        for name in sorted(here, key=_turn):
            if (version := here[name]) is not None and self._sent.get(name) != version:
                with contextlib.suppress(FileNotFoundError):  # a checkpoint that was pruned meanwhile
                    self._send(files, f"{target}/{name}", name, version[0])
                    self._sent[name] = version
        for name in sorted(set(self._sent) - set(here), key=_turn, reverse=True):
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(f"{target}/{name}")
            del self._sent[name]
        if self._ending.is_set():  # a reader takes the run for a finished push from here on
            files.pipe_file(f"{target}/{LISTING}", (json.dumps(listing_of(self.run), indent=1) + "\n").encode())

    def _follow(self) -> None:
        pause = EVERY
        while not self.complete and not self._lost:
            ending = self._ending.wait(pause)
            try:
                self.round()
            except Exception as error:
                self._say(error)
                self._place = None  # opened anew, with credentials that may be new
                pause = min(2 * pause, 1.0 if ending else SLOWEST)
                if ending:
                    time.sleep(pause)
                continue
            if self._failed:
                log.warning("%s: the sync works again", self.url)
            self._failed, self.complete, pause = False, ending, EVERY

    def _say(self, error: Exception) -> None:
        if isinstance(error, LeaseLost | RunBusy):
            self._lost = True
            log.warning("the sync to %s has ended: %s", self.url, error)
        elif not self._failed:
            words = f"{type(error).__name__}: {error}"
            log.warning("the sync to %s fails (%s); the run goes on, and it is tried again", self.url, words)
        self._failed = True

    def _own(self) -> None:
        """Two machines that continue one run from there must not both write."""
        if self._lease is not None and not self._leased and not self._lost:
            self._lease.acquire()
            self._leased = True

    def _renew(self) -> None:
        if self._lease is not None and self._leased and not self._lost:
            try:
                self._lease.renew()
            except LeaseLost as error:
                self._say(error)
            except Exception:  # said by the round, which needs the same place
                log.debug("the lease at %s could not be renewed", self.url, exc_info=True)

    def _start(self, files: "AbstractFileSystem", target: str, here: dict[str, Any]) -> dict[str, Any]:
        """What is there already, as after a resume on another machine; its listing is no longer true."""
        there = files_at(files, target)
        if LISTING in there:
            files.rm_file(f"{target}/{LISTING}")
        same = {name for name in here if name in there and _same(there[name], self.folder / name)}
        for name, about in here.items():
            # A checkpoint's parts may have been sent in pieces and then have no MD5: its meta.json has their checksums.
            if _turn(name)[0] == 1 and _meta(name) in same and about and there.get(name, {}).get("size") == about[0]:
                same.add(name)
        gone = {name: None for name in there if name not in here and name not in (LISTING, "lease.json")}
        self._first = False
        return gone | {name: here[name] for name in same}

    def _send(self, files: Any, target: str, name: str, size: int) -> None:
        source, before = self.folder / name, self._sent.get(name)
        with source.open("rb") as file:
            if size <= PART:
                files.pipe_file(target, file.read(size))
                return
            start = 0 if before is None or not _grows(name) else before[0]
            if PART < start <= size:
                file.seek(start - OVERLAP)
                if file.read(OVERLAP) == files.cat_file(target, start=start - OVERLAP, end=start):
                    with contextlib.suppress(NotImplementedError, ValueError), files.open(target, "ab") as out:
                        _copy(file, out, size - start)
                        return
        files.put_file(str(source), target)


def fetch_run(url: str, opened: Opened, root: Path) -> Run | None:
    """The run at a place (`…/NAME/ID`), copied into the folder of runs; None if there is none.

    A copy that is here already is used if its checkpoints are as new, and put aside if they are not.
    """
    with explained(f"fetching {url}", "Try it again."):
        files, path = opened()
        names = [name for name in files_at(files, path) if name != LISTING and not _skipped(name)]
        if "trial.json" not in names:
            return None
        info: dict[str, Any] = json.loads(files.cat_file(f"{path}/trial.json"))
        check_names({**info, "files": names}, url)
        folder = root / info["name"] / info["id"]
        if (folder / "trial.json").is_file() and _steps(list(_names(folder))) >= _steps(names):
            return Run(folder)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        for name in names:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            files.get_file(f"{path}/{name}", str(partial / name))
        if folder.exists():
            folder.rename(folder.with_name(f".{folder.name}.before-{time.time_ns()}"))
        os.replace(partial, folder)
    return Run(folder)


def newest_at(url: str, opened: Opened) -> str:
    """The URL of a run: the one given, or the newest run below the URL of a name."""
    with explained(f"reading {url}", "Try it again."):
        files, path = opened()
        trials = [name for name in files_at(files, path) if name.rpartition("/")[2] == "trial.json"]
    depths = {name.count("/"): name for name in sorted(trials)}
    if not trials or min(depths) > 1:
        raise UsageError(f"there is no run at {url}: expected PLACE/NAME/ID or PLACE/NAME of a run that was synced")
    return f"{url}/{depths[1].rpartition('/')[0]}" if min(depths) == 1 else url


def _lease(url: str) -> Lease | None:
    """Where files can be written on a condition."""
    if url.startswith(("s3://", "gs://")):
        return Lease(FsspecStore(url))
    return Lease(LocalStore(url.removeprefix("file://"))) if url.startswith("file://") else None


def _names(folder: Path) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        relative = Path(where).relative_to(folder)
        yield from (file for name in names if not _skipped(file := (relative / name).as_posix()))


def _skipped(name: str) -> bool:
    """What belongs to the process on this machine: leases, locks, half-written files."""
    return any(part[0] == "." for part in name.split("/")) or name.rpartition("/")[2] == "lease.json"


def _turn(name: str) -> tuple[int, str]:
    """When a file is sent: a checkpoint's metadata last of all, its other files before that; removed in reverse."""
    part = f"{checkpoints.FOLDER}/step_" in name
    return (2 if name.endswith("/meta.json") else 1) if part else 0, name


def _meta(name: str) -> str:
    parts = name.split("/")
    return "/".join((*parts[: parts.index(checkpoints.FOLDER) + 2], "meta.json"))


def _grows(name: str) -> bool:
    return name.endswith((".jsonl", ".txt")) or name.rpartition("/")[2].startswith("trace")


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return about.st_size, about.st_mtime_ns, about.st_ino


def _same(info: dict[str, Any], path: Path) -> bool:
    """Whether a file there has our bytes, by the checksum of the service."""
    tag = str(info.get("ETag", "")).strip('"')
    with contextlib.suppress(FileNotFoundError):
        return info["size"] == path.stat().st_size and tag == hashlib.md5(path.read_bytes()).hexdigest()
    return False


def _steps(names: list[str]) -> int:
    """The step of the newest complete checkpoint; -1 without any."""
    metas = [name.split("/")[-2] for name in names if _turn(name)[0] == 2]
    return max((int(name.removeprefix("step_")) for name in metas if checkpoints.NAME.fullmatch(name)), default=-1)


def _copy(source: Any, target: Any, count: int) -> None:
    while count:
        data = source.read(min(count, PART))
        if not data:
            raise PalestraError("a file became shorter while it was sent")
        target.write(data)
        count -= len(data)
