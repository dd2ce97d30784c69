"""Outputs of steps, in folders or under a URL that machines share: which are done, and who is at work on which.

Under the prefix: `NAME-HASH/` is the output of a step that is done, `NAME-HASH.partial-ATTEMPT/` where one attempt is
at work or was, `.steps/NAME-HASH/` its lease, its log and how the last attempt ended. Done is what has a `status.json`:
it is written last, and the folder gets its name after that. Killed at any instant a folder is one or the other. The
worker of a runner that has lost the lease goes on in the folder of its own attempt, which nobody reads.

Under the URL lies what lies under a local prefix, but for the folders of work: those are in the local folder of this
prefix, `PALESTRA_CACHE/pipelines/…`, where a step that was killed goes on and where outputs are fetched to, once: an
address never changes what it means. Each attempt uploads under a name of its own, `NAME-HASH/files-…/`, and
`NAME-HASH/status.json`, written on the condition that there is none, says which of them is the output: whoever comes
late, its lease lost, changes nothing. What such a one has uploaded stays until a person removes it.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from palestra.data.cache import cache_root, file_sha256
from palestra.errors import PalestraError, UsageError
from palestra.runs.lease import Lease, LeaseLost, Owner
from palestra.runs.store import FsspecStore, LocalStore, read_json, sync_folder, write_bytes, write_json
from palestra.work.redact import redacted

STATUS = "status.json"
LEAVE_SECONDS = 60.0
"""How long a killed attempt's processes may take to be gone."""


class Outputs:
    """The outputs under one local prefix."""

    beat_seconds = 2.0
    """How often a lease is renewed."""
    look_seconds = 0.2
    """How often to look whether another process is done with a step."""

    def __init__(self, prefix: Path | str):
        self.prefix = Path(os.path.abspath(prefix))
        self.store = LocalStore(self.prefix / ".steps")

    @property
    def where(self) -> str:
        """The prefix, for people to read."""
        return str(self.prefix)

    def place(self, address: str) -> str:
        """Where the output of a step is once it is done, for people to read."""
        return f"{self.where}/{address}"

    def path(self, address: str) -> Path:
        """Where the output of a step is once it is done and fetched."""
        return self.prefix / address

    def partial(self, address: str, attempt: str) -> Path:
        """Where an attempt at a step works."""
        return self.prefix / f"{address}.partial-{attempt[:8]}"

    def partials(self, address: str) -> list[Path]:
        """The folders that attempts at a step have left or work in, the newest first."""
        found = []
        for path in self.prefix.glob(f"{address}.partial-*"):
            with suppress(FileNotFoundError):  # got its name meanwhile
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found, reverse=True)]

    def log(self, address: str) -> Path:
        """What a step printed, all attempts one after the other."""
        return self.prefix / ".steps" / address / "log.txt"

    def lease(self, address: str) -> Lease:
        """Who is at work on a step."""
        return Lease(self.store, f"{address}/lease.json")

    def owner(self, address: str) -> Owner | None:
        """The process that is at work on a step, where there is one."""
        return self.lease(address).holder()

    def done(self, address: str) -> dict[str, Any] | None:
        """The status of a step that is done, else None."""
        return _status(self.path(address), address)

    def half_done(self, address: str) -> bool:
        """Whether all of a step is there but the name of its folder."""
        return any(_status(folder, address) is not None for folder in self.partials(address))

    def current(self, address: str) -> Path:
        """The output as it is now, done or not: for those who do not wait."""
        left = [] if self.done(address) is not None else self.partials(address)
        return left[0] if left else self.path(address)

    def attempt(self, address: str) -> dict[str, Any] | None:
        """How the last attempt stands or ended, where the step is not done."""
        try:
            return read_json(self.prefix / ".steps" / address / "attempt.json")
        except FileNotFoundError:
            return None

    def write_attempt(self, address: str, about: Mapping[str, Any]) -> None:
        """Note how an attempt stands."""
        write_json(self.prefix / ".steps" / address / "attempt.json", redacted(about))

    @contextmanager
    def alone(self, address: str) -> Iterator[None]:
        """Work on a step of which no process of a killed attempt is left on this machine.

        The lease of a killed process is free at once, its workers need a moment more to die. The lock is theirs until
        the last of them, and of what they forked, is gone.
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
                            f"a process of an earlier attempt at {address} does not end: look for who has {path} open"
                        ) from None
                    time.sleep(0.02)
            try:
                yield
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def begin(self, address: str, attempt: str, *, resumes: bool) -> Path:
        """The folder to work in: what a killed attempt left where the step goes on with that, else empty.

        Only by a worker of the lease's holder. What another attempt left gets the name of this one, so that a process
        of that attempt which is still at work, on a machine that hangs, no longer finds it.
        """
        folder = self.partial(address, attempt)
        with self.lease(address).held_by(attempt):
            for left in self.partials(address):
                if resumes and (left == folder or not folder.exists()):
                    left.rename(folder)
                else:  # aside first: a kill in the middle of removing would leave a folder that looks like an attempt's
                    left.rename(self.prefix / ".steps" / address / f".removed-{uuid.uuid4().hex[:8]}")
            folder.mkdir(parents=True, exist_ok=True)
        for rest in self.log(address).parent.glob(".removed-*"):
            shutil.rmtree(rest, ignore_errors=True)
        return folder

    def fetch(self, address: str) -> Path:
        """The output of a step that is done, on this machine."""
        if self.done(address) is None:
            raise self.missing(address)
        return self.path(address)

    def missing(self, address: str) -> PalestraError:
        """The error that says that an output is not there."""
        return PalestraError(
            f"the output {self.place(address)} is needed and not there, or not whole: it has no {STATUS} of its step. "
            "Run the pipeline again to make it anew."
        )

    def send(self, address: str, attempt: str) -> dict[str, Any]:
        """Make sure that what a step has written lasts; what to note of it in its status."""
        folder = self.partial(address, attempt)
        if (folder / STATUS).exists():
            raise UsageError(f"the step wrote {folder / STATUS} itself: that name is the runner's, use another")
        _sync_tree(folder)
        return {}

    def commit(self, address: str, attempt: str, status: Mapping[str, Any]) -> None:
        """The step is done: `status.json`, then the name. To be called with the lease's `fenced` around it."""
        write_json(self.partial(address, attempt) / STATUS, redacted(status))
        self.finish(address)

    def finish(self, address: str) -> bool:
        """Name a folder whose step was done when somebody was killed; says whether there was one."""
        folder = next((left for left in self.partials(address) if _status(left, address) is not None), None)
        final = self.path(address)
        if folder is None:
            return False
        if final.exists():  # without a status, else the step would not have run: not ours, and not to be lost
            (folder / STATUS).unlink()
            raise UsageError(f"{final} is in the way of a step's output: it has no {STATUS}. Move it away.")
        folder.rename(final)
        sync_folder(final.parent)
        return True

    def publish_log(self, address: str) -> None:
        """Bring the log to where others read it: here it is there already."""

    def read_log(self, address: str) -> bytes:
        """The log, as far as there is one."""
        return self.log(address).read_bytes() if self.log(address).is_file() else b""

    def told(self, address: str) -> Path | None:
        """The folder in which to read what a step has to tell, done or not; None where there is nothing of it."""
        folder = self.current(address)
        return folder if folder.is_dir() else None

    def publish(self, name: str, data: bytes) -> str:
        """Write a file about the whole beside the outputs; where it is."""
        self.prefix.mkdir(parents=True, exist_ok=True)
        write_bytes(self.prefix / name, data)
        return str(self.prefix / name)

    def earlier(self, name: str) -> list[dict[str, Any]]:
        """The statuses of all steps of a name that are done, the newest first."""
        folders = [path.parent for path in self.prefix.glob(f"{name}-*/{STATUS}")]
        found = [_status(folder, folder.relative_to(self.prefix).as_posix()) for folder in folders]
        named = [status for status in found if status is not None and status["name"] == name]
        return sorted(named, key=lambda status: status["finished"], reverse=True)


def open_outputs(prefix: str) -> Outputs:
    """The outputs under a prefix: a local folder, or a URL that machines share."""
    if prefix.startswith("file://"):
        return Outputs(prefix.removeprefix("file://"))
    if "://" not in prefix:
        return Outputs(Path(prefix).expanduser())
    return RemoteOutputs(prefix)


def _status(folder: Path, address: str) -> dict[str, Any] | None:
    """The status that the runner wrote; a step may write a `status.json` of its own, which says nothing."""
    try:
        found = read_json(folder / STATUS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if isinstance(found, dict) and found.get("address") == address else None


def _sync_tree(folder: Path) -> None:
    """Make files and names durable: a status must not outlive, in a power cut, what it says is there."""
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where, name)
            if path.is_file() and not path.is_symlink():
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        sync_folder(Path(where))


TELLING = re.compile(r"latest|(counts|trial|summary|manifest|status)\.json|metrics\.jsonl|.*\.png")
"""The files of an output that say what came of a step: counts of rows, and all of a run but its checkpoints."""


class RemoteOutputs(Outputs):
    """The outputs under one URL; a bucket with writes on a condition, see `FsspecStore`."""

    beat_seconds, look_seconds = 5.0, 2.0  # each is a request that is paid for; leases last 30 s

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        name = f"{self.url.rpartition('/')[2]}-{hashlib.sha256(self.url.encode()).hexdigest()[:10]}"
        super().__init__(cache_root() / "pipelines" / name)
        self.done_ones = FsspecStore(self.url)
        self.steps = FsspecStore(f"{self.url}/.steps")
        _ = self.done_ones.files  # a URL that cannot be used is refused before anything else

    @property
    def where(self) -> str:
        """The URL."""
        return self.url

    def lease(self, address: str) -> Lease:
        """Who is at work on a step, on any machine."""
        return Lease(self.steps, f"{address}/lease.json")

    def done(self, address: str) -> dict[str, Any] | None:
        """The status of a step that is done, else None."""
        return _parsed(self.done_ones.get(f"{address}/{STATUS}"), self.place(address))

    def half_done(self, address: str) -> bool:
        """Nothing is renamed here: a step is done or it is not."""
        return False

    def attempt(self, address: str) -> dict[str, Any] | None:
        """How the last attempt stands or ended."""
        return _parsed(self.steps.get(f"{address}/attempt.json"), f"{self.url}/.steps/{address}/attempt.json")

    def write_attempt(self, address: str, about: Mapping[str, Any]) -> None:
        """Note how an attempt stands."""
        self.steps.put(f"{address}/attempt.json", json.dumps(redacted(about), indent=1).encode())

    def fetch(self, address: str) -> Path:
        """The output of a step that is done, downloaded the first time; whole, or an error."""
        status = self.done(address)
        if status is None:
            raise self.missing(address)
        return self._bring(status, status["files"], self.path(address))

    def send(self, address: str, attempt: str) -> dict[str, Any]:
        """Upload what a step has written, under a name that no other attempt has, nor this one where it sends twice."""
        super().send(address, attempt)
        folder, store, upload = self.partial(address, attempt), self.done_ones, f"files-{uuid.uuid4().hex[:12]}"
        listing = {path.relative_to(folder).as_posix(): _described(path) for path in _files(folder)}
        for name in listing:
            store.try_often(
                f"uploading {self.place(address)}/{name}",
                lambda name=name: store.files.put_file(str(folder / name), f"{store.path}/{address}/{upload}/{name}"),
            )
        return {"files": listing, "upload": upload}

    def commit(self, address: str, attempt: str, status: Mapping[str, Any]) -> None:
        """The step is done: `status.json`, if there is none. What is here is kept, as if it had been fetched."""
        data = json.dumps(redacted(status), indent=1).encode()
        if not self.done_ones.swap(f"{address}/{STATUS}", None, data):
            raise LeaseLost(f"another process finished {self.place(address)} first")
        write_json(self.partial(address, attempt) / STATUS, redacted(status))
        self._keep(self.partial(address, attempt), self.path(address))

    def finish(self, address: str) -> bool:
        """Nothing is renamed here."""
        return False

    def publish_log(self, address: str) -> None:
        """Upload the log of a step."""
        if self.log(address).exists():
            self.steps.put(f"{address}/log.txt", self.log(address).read_bytes() or b"\n")

    def read_log(self, address: str) -> bytes:
        """The log as it was uploaded; of an attempt that has not ended, what this machine has of it."""
        return self.steps.get(f"{address}/log.txt") or super().read_log(address)

    def told(self, address: str) -> Path | None:
        """What a step has to tell: downloaded without the rest where the output itself is not here."""
        status = self.done(address)
        if status is None or _kept(self.path(address)) == status:
            return super().told(address)
        names = [name for name in status["files"] if TELLING.fullmatch(name.rpartition("/")[2])]
        return self._bring(status, names, self.prefix / ".told" / address)

    def publish(self, name: str, data: bytes) -> str:
        """Upload a file about the whole, and keep it here too."""
        super().publish(name, data)
        self.done_ones.put(name, data)
        return f"{self.url}/{name}"

    def earlier(self, name: str) -> list[dict[str, Any]]:
        """The statuses of all steps of a name that are done, the newest first."""
        store = self.done_ones
        keys = store.try_often(f"listing {self.url}", lambda: store.files.glob(f"{store.path}/{name}-*/{STATUS}"))
        found = [self.done(key.removeprefix(f"{store.path}/").removesuffix(f"/{STATUS}")) for key in keys]
        named = [status for status in found if status is not None and status["name"] == name]
        return sorted(named, key=lambda status: status["finished"], reverse=True)

    def _bring(self, status: Mapping[str, Any], names: Iterable[str], folder: Path) -> Path:
        """Download files of an output into a folder, which has all of them or is not there."""
        if (folder / STATUS).exists():
            if _kept(folder) == status:
                return folder
            shutil.rmtree(folder)  # of a run whose output somebody has removed since
        address = status["address"]
        beside = self.prefix / ".fetching" / f"{address.replace('/', '_')}-{uuid.uuid4().hex[:8]}"
        try:
            beside.mkdir(parents=True)
            for name in names:
                self._get(status, name, beside / name)
            write_json(beside / STATUS, status)
            self._keep(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return folder

    def _get(self, status: Mapping[str, Any], name: str, target: Path) -> None:
        place, key = self.place(status["address"]), f"{status['address']}/{status['upload']}/{name}"
        if not target.resolve().is_relative_to(self.prefix.resolve()):
            raise PalestraError(f"{place} names a file outside of itself ({name!r}): it is no output")
        target.parent.mkdir(parents=True, exist_ok=True)
        store = self.done_ones
        store.try_often(
            f"downloading {self.url}/{key}", lambda: store.files.get_file(f"{store.path}/{key}", str(target))
        )
        if _described(target) != status["files"][name]:
            raise PalestraError(
                f"{self.url}/{key} is damaged: its bytes are not those that the step wrote. "
                f"Remove {place} and run the pipeline again."
            )

    @staticmethod
    def _keep(made: Path, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / STATUS).exists():  # another process of this machine was first, with the same bytes
                raise


def _kept(folder: Path) -> dict[str, Any] | None:
    """The status of an output of which this machine has a copy."""
    return read_json(folder / STATUS) if (folder / STATUS).exists() else None


def _parsed(data: bytes | None, where: str) -> dict[str, Any] | None:
    try:
        return None if data is None else json.loads(data)
    except ValueError as error:
        raise PalestraError(f"{where} is not valid JSON ({error}): remove it and run the pipeline again") from error


def _files(folder: Path) -> list[Path]:
    return sorted(Path(where, name) for where, _, names in os.walk(folder) for name in names)


def _described(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}
