"""Outputs of steps, in a local folder or under a URL that machines share: which are done, and who runs which.

Under the prefix: `NAME-HASH/` is the output of a step that is done, `NAME-HASH.partial-ATTEMPT/` the work of one
attempt, `.steps/NAME-HASH/` its lease, its log and how the last attempt ended. A step is done when it has a
`status.json`: that is written last, and the folder gets its final name after that, so that a kill at any instant leaves
one or the other. A worker whose runner has lost the lease continues in the folder of its own attempt, which nobody
reads.

A URL has the same layout except for the folders of attempts. These are in a local folder, `PALESTRA_CACHE/pipelines/…`,
where a killed step resumes and to which outputs are fetched once: an address never changes its meaning. Each attempt
uploads under a name of its own, `NAME-HASH/files-…/`. `NAME-HASH/status.json`, written by a PUT on the condition that
there is none, names the upload that is the output: a late attempt without the lease changes nothing, and its upload
stays until somebody removes it.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.data.cache import cache_root, file_sha256
from palestra.errors import PalestraError, UsageError
from palestra.runs.lease import Lease, LeaseLost
from palestra.runs.store import FsspecStore, LocalStore, read_json, sync_folder, write_bytes, write_json
from palestra.work.redact import redacted

log = logging.getLogger("palestra.pipeline")

STATUS = "status.json"
LEAVE_SECONDS = 60.0
"""How long the processes of a killed attempt may take to end."""


@dataclass(frozen=True)
class Stored:
    """An output under a prefix, or what an attempt left behind."""

    address: str
    size: int
    finished: str | None
    """When its step was done; None for what was left behind."""


class Outputs:
    """The outputs under one local prefix."""

    beat_seconds = 2.0
    """How often a lease is renewed."""
    look_seconds = 0.2
    """How often to check whether another process is done with a step."""

    def __init__(self, prefix: Path | str):
        self.prefix = Path(os.path.abspath(prefix))
        self.where = str(self.prefix)  # for people to read
        self.steps: LocalStore | FsspecStore = LocalStore(self.prefix / ".steps")

    def place(self, address: str) -> str:
        """Where the output of a step is once it is done, for people to read."""
        return f"{self.where}/{address}"

    def path(self, address: str) -> Path:
        """Where the output of a step is once it is done and fetched."""
        return self.prefix / address

    def partial(self, address: str, attempt: str) -> Path:
        """Where an attempt at a step writes."""
        return self.prefix / f"{address}.partial-{attempt[:8]}"

    def partials(self, address: str) -> list[Path]:
        """The folders of attempts at a step, the newest first."""
        times = []
        for path in self.prefix.glob(f"{address}.partial-*"):
            with suppress(FileNotFoundError):  # renamed in the meantime
                times.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(times, reverse=True)]

    def log(self, address: str) -> Path:
        """The output of a step's processes, all attempts one after the other."""
        return self.prefix / ".steps" / address / "log.txt"

    def lease(self, address: str) -> Lease:
        """The lease of a step."""
        return Lease(self.steps, f"{address}/lease.json")

    def done(self, address: str) -> dict[str, Any] | None:
        """The status of a step that is done, else None."""
        return _status(self.path(address), address)

    def half_done(self, address: str) -> Path | None:
        """The folder of a step that is done except for its final rename: its runner was killed before."""
        return next((folder for folder in self.partials(address) if _status(folder, address) is not None), None)

    def current(self, address: str) -> Path:
        """The output as it is now, done or not, for steps that do not wait for it."""
        left = [] if self.done(address) is not None else self.partials(address)
        return left[0] if left else self.path(address)

    def attempt(self, address: str) -> dict[str, Any] | None:
        """The state of the last attempt at a step that is not done."""
        key = f"{address}/attempt.json"
        return _parsed(self.steps.get(key), f"{self.where}/.steps/{key}")

    def write_attempt(self, address: str, about: Mapping[str, Any]) -> None:
        """Store the state of an attempt."""
        self.steps.put(f"{address}/attempt.json", json.dumps(redacted(about), indent=1).encode())

    @contextmanager
    def alone(self, address: str) -> Iterator[None]:
        """Wait until no process of a killed attempt is left on this machine.

        The lease of a killed process is free at once, its workers take a moment more to die. They and their children
        hold the lock until the last of them has ended.
        """
        path = self.log(address).with_name(".body.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + LEAVE_SECONDS
        with path.open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise PalestraError(
                            f"a process of an earlier attempt at {address} does not end: it has {path} open"
                        ) from None
                    time.sleep(0.02)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def begin(self, address: str, attempt: str, *, resumes: bool) -> Path:
        """The folder to write into: that of a killed attempt if the step resumes, else an empty one.

        Only for a worker of the lease's holder. The folder of another attempt is renamed, so that a process of that
        attempt which is still running, on a machine that hangs, no longer finds it.
        """
        folder = self.partial(address, attempt)
        with self.lease(address).held_by(attempt):
            self._refuse_in_the_way(address)  # before the work, which may take days
            for left in self.partials(address):
                if resumes and (left == folder or not folder.exists()):
                    left.rename(folder)
                else:  # moved first: a kill during the removal would leave a folder that looks like an attempt's
                    left.rename(self._removed(address))
            folder.mkdir(parents=True, exist_ok=True)
        for rest in self.log(address).parent.glob(".removed-*"):
            shutil.rmtree(rest, ignore_errors=True)
        return folder

    def fetch(self, address: str) -> Path:
        """The output of a step that is done, on this machine."""
        self._require(address)
        return self.path(address)

    def _require(self, address: str) -> dict[str, Any]:
        status = self.done(address)
        if status is None:
            raise PalestraError(
                f"the output {self.place(address)} is missing or incomplete: it has no {STATUS} of its step. "
                "Run the pipeline again to rebuild it."
            )
        return status

    def send(self, address: str, attempt: str) -> dict[str, Any]:
        """Make what a step has written durable; returns what its status stores of it."""
        folder = self.partial(address, attempt)
        if (folder / STATUS).exists():
            raise UsageError(f"the step wrote {folder / STATUS} itself: that name is reserved, use another")
        _sync_tree(folder)
        return {}

    def commit(self, address: str, attempt: str, status: Mapping[str, Any]) -> None:
        """Mark the step as done: `status.json`, then the rename. To be called inside the lease's `fenced`."""
        write_json(self.partial(address, attempt) / STATUS, redacted(status))
        self.finish(address)

    def finish(self, address: str) -> bool:
        """Rename the folder of a step that is half done; returns whether there was one."""
        folder, final = self.half_done(address), self.path(address)
        if folder is None:
            return False
        try:
            self._refuse_in_the_way(address)
        except UsageError:
            (folder / STATUS).unlink()
            raise
        folder.rename(final)
        sync_folder(final.parent)
        return True

    def _refuse_in_the_way(self, address: str) -> None:
        final = self.path(address)
        if final.exists():  # without a status, else the step would not run: not ours, and not to be lost
            raise UsageError(f"{final} is in the way of a step's output: it has no {STATUS}. Move it elsewhere.")

    def publish_log(self, address: str) -> None:
        """Upload the log for other machines; a local one is readable already."""

    def read_log(self, address: str) -> bytes:
        """The log; empty if there is none."""
        return self.log(address).read_bytes() if self.log(address).is_file() else b""

    def report_folder(self, address: str) -> Path | None:
        """The folder with the files of a step that a report shows, done or not; None if there is none."""
        folder = self.current(address)
        return folder if folder.is_dir() else None

    def publish(self, name: str, data: bytes) -> str:
        """Write a file about the whole pipeline next to the outputs; returns its place."""
        self.prefix.mkdir(parents=True, exist_ok=True)
        write_bytes(self.prefix / name, data)
        return str(self.prefix / name)

    def earlier(self, name: str) -> list[dict[str, Any]]:
        """The statuses of all steps of a name that are done, the newest first."""
        statuses = [self.done(address) for address in self._addresses(name)]
        named = [status for status in statuses if status is not None and status["name"] == name]
        return sorted(named, key=lambda status: status["finished"], reverse=True)

    def _addresses(self, name: str) -> list[str]:
        folders = [path.parent for path in self.prefix.glob(f"{name}-*/{STATUS}")]
        return [folder.relative_to(self.prefix).as_posix() for folder in folders]

    def stored(self) -> list["Stored"]:
        """All outputs, and what attempts that have ended left behind."""
        found = []
        for file in sorted(self.prefix.rglob(STATUS)):
            address = file.parent.relative_to(self.prefix).as_posix()
            try:
                status = None if address.startswith(".") else self.done(address)
            except PalestraError as error:  # torn, or a step's own file of that name
                log.warning("left out: %s", error)
                continue
            if status is not None:
                found.append(Stored(address, _size(file.parent), status["finished"]))
        for folder in sorted(self.prefix.rglob("*.partial-*")):
            address = folder.relative_to(self.prefix).as_posix()
            if not address.startswith(".") and folder.is_dir() and self._ended(address):
                found.append(Stored(address, _size(folder), None))
        return found

    def remove(self, address: str) -> None:
        """Remove an output or a left-over; a step that is running is refused. Its pipeline would make it again."""
        if not self._ended(address):
            raise UsageError(f"{self.place(address)} is being made: wait for its step, or stop it")
        self._delete(address)
        shutil.rmtree(self.prefix / ".steps" / address, ignore_errors=True)

    def _ended(self, address: str) -> bool:
        return self.lease(address.partition(".partial-")[0]).holder() is None

    def _delete(self, address: str) -> None:
        removed = self._removed(address)
        if self.path(address).exists():
            self.path(address).rename(removed)  # first: what a kill leaves of it is no output, nor in the way of one
        shutil.rmtree(removed, ignore_errors=True)

    def _removed(self, address: str) -> Path:
        """A place for a folder until all of it is removed."""
        folder = self.prefix / ".steps" / address
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f".removed-{uuid.uuid4().hex[:8]}"


def open_outputs(prefix: str) -> Outputs:
    """The outputs under a prefix: a local folder, or a URL that machines share."""
    if prefix.startswith("file://"):
        return Outputs(prefix.removeprefix("file://"))
    if "://" not in prefix:
        return Outputs(Path(prefix).expanduser())
    return RemoteOutputs(prefix)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _status(folder: Path, address: str) -> dict[str, Any] | None:
    """The status that the runner wrote; a `status.json` of the step's own does not count."""
    try:
        status = read_json(folder / STATUS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status if isinstance(status, dict) and status.get("address") == address else None


def _sync_tree(folder: Path) -> None:
    """Make files and names durable: after a power cut a status must not outlive its files."""
    for where, _, names in os.walk(folder):
        for path in (Path(where, name) for name in names):
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    os.fsync(file)
        sync_folder(Path(where))


REPORTED = re.compile(r"latest|(counts|trial|summary|manifest|status)\.json|metrics\.jsonl|.*\.png")
"""The files of an output that a report reads: counts of rows, and all of a run except its checkpoints."""


class RemoteOutputs(Outputs):
    """The outputs under one URL: a bucket with conditional PUT, see `FsspecStore`."""

    beat_seconds, look_seconds = 5.0, 2.0  # each is a paid request; leases last 30 s

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        name = f"{self.url.rpartition('/')[2]}-{hashlib.sha256(self.url.encode()).hexdigest()[:10]}"
        super().__init__(cache_root() / "pipelines" / name)
        self.where = self.url
        self.steps = FsspecStore(f"{self.url}/.steps")
        self.bucket = FsspecStore(self.url)
        _ = self.bucket.files  # a URL that cannot be used is refused before anything else

    def done(self, address: str) -> dict[str, Any] | None:
        return _parsed(self.bucket.get(f"{address}/{STATUS}"), self.place(address))

    def half_done(self, address: str) -> Path | None:
        return None  # nothing is renamed

    def _refuse_in_the_way(self, address: str) -> None:
        """What is here is a copy: `commit` is what counts."""

    def fetch(self, address: str) -> Path:
        """The output of a step that is done, downloaded the first time; complete, or an error."""
        status = self._require(address)
        return self._download(status, status["files"], self.path(address))

    def send(self, address: str, attempt: str) -> dict[str, Any]:
        """Upload what a step has written, under a name that no other upload has."""
        super().send(address, attempt)
        folder, store, upload = self.partial(address, attempt), self.bucket, f"files-{uuid.uuid4().hex[:12]}"
        files = sorted(Path(where, name) for where, _, names in os.walk(folder) for name in names)
        listing = {path.relative_to(folder).as_posix(): _checksum(path) for path in files}
        for name in listing:
            store.try_often(
                f"uploading {self.place(address)}/{name}",
                lambda name=name: store.files.put_file(str(folder / name), f"{store.path}/{address}/{upload}/{name}"),
            )
        return {"files": listing, "upload": upload}

    def commit(self, address: str, attempt: str, status: Mapping[str, Any]) -> None:
        """Mark the step as done: `status.json`, if there is none. The local copy counts as fetched."""
        data = json.dumps(redacted(status), indent=1).encode()
        if not self.bucket.swap(f"{address}/{STATUS}", None, data):
            raise LeaseLost(f"another process finished {self.place(address)} first")
        write_json(self.partial(address, attempt) / STATUS, redacted(status))
        self._move(self.partial(address, attempt), self.path(address))

    def publish_log(self, address: str) -> None:
        if self.log(address).exists():
            self.steps.put(f"{address}/log.txt", self.log(address).read_bytes() or b"\n")

    def read_log(self, address: str) -> bytes:
        """The uploaded log; of an attempt that has not ended, the local one."""
        return self.steps.get(f"{address}/log.txt") or super().read_log(address)

    def report_folder(self, address: str) -> Path | None:
        """As above; if the output is not here, only the files that a report reads are downloaded."""
        status = self.done(address)
        if status is None or _status(self.path(address), address) == status:
            return super().report_folder(address)
        names = [name for name in status["files"] if REPORTED.fullmatch(name.rpartition("/")[2])]
        return self._download(status, names, self.prefix / ".reported" / address)

    def publish(self, name: str, data: bytes) -> str:
        """Upload a file about the whole pipeline, and keep a local copy."""
        super().publish(name, data)
        self.bucket.put(name, data)
        return f"{self.url}/{name}"

    def _addresses(self, name: str) -> list[str]:
        store = self.bucket
        keys = store.try_often(f"listing {self.url}", lambda: store.files.glob(f"{store.path}/{name}-*/{STATUS}"))
        return [key.removeprefix(f"{store.path}/").removesuffix(f"/{STATUS}") for key in keys]

    def stored(self) -> list["Stored"]:
        """All outputs."""
        keys = [key for key in self.bucket.listed() if key.endswith(f"/{STATUS}") and "/files-" not in key]
        statuses = [self.done(key.removesuffix(f"/{STATUS}")) for key in keys if not key.startswith(".")]
        sizes = [(one, sum(file["size"] for file in one["files"].values())) for one in statuses if one is not None]
        return [Stored(status["address"], size, status["finished"]) for status, size in sizes]

    def _delete(self, address: str) -> None:
        self.bucket.files.rm_file(f"{self.bucket.path}/{address}/{STATUS}")  # first: what is left of it is no output
        self.bucket.files.rm(f"{self.bucket.path}/{address}", recursive=True)
        super()._delete(address)

    def _download(self, status: Mapping[str, Any], names: Iterable[str], folder: Path) -> Path:
        """Download files of an output into a folder, which has all of them or does not exist."""
        address = status["address"]
        if (folder / STATUS).exists():
            if _status(folder, address) == status:
                return folder
            shutil.rmtree(folder)  # of an output that was removed and made again since
        temporary = self.prefix / ".fetching" / f"{address.replace('/', '_')}-{uuid.uuid4().hex[:8]}"
        try:
            temporary.mkdir(parents=True)
            for name in names:
                self._get(status, name, temporary / name)
            write_json(temporary / STATUS, status)
            self._move(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def _get(self, status: Mapping[str, Any], name: str, target: Path) -> None:
        place, key, store = self.place(status["address"]), f"{status['address']}/{status['upload']}/{name}", self.bucket
        if not target.resolve().is_relative_to(self.prefix.resolve()):
            raise PalestraError(f"{place} names a file outside of itself ({name!r}): it is not a valid output")
        target.parent.mkdir(parents=True, exist_ok=True)
        store.try_often(
            f"downloading {self.url}/{key}", lambda: store.files.get_file(f"{store.path}/{key}", str(target))
        )
        if _checksum(target) != status["files"][name]:
            raise PalestraError(
                f"{self.url}/{key} is damaged: its checksum is not that of the step's file. "
                f"Remove {place} and run the pipeline again."
            )

    @staticmethod
    def _move(source: Path, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            source.rename(folder)
        except OSError:
            if not (folder / STATUS).exists():  # another process of this machine was first, with the same bytes
                raise


def _parsed(data: bytes | None, where: str) -> dict[str, Any] | None:
    try:
        return None if data is None else json.loads(data)
    except ValueError as error:
        raise PalestraError(f"{where} is not valid JSON ({error}): remove it and run the pipeline again") from error


def _checksum(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}
