"""Outputs under a URL that machines share: worked on in a local folder, uploaded, `status.json` last.

Under the URL lies what lies under a local prefix, but for the folders of work: those are in the local folder of this
prefix, `PALESTRA_CACHE/pipelines/…`, where a step that was killed goes on and where outputs are fetched to, once: an
address never changes what it means. Each attempt uploads under a name of its own, `NAME-HASH/files-…/`, and
`NAME-HASH/status.json`, written on the condition that there is none, says which of them is the output: whoever comes
late, its lease lost, changes nothing. What such a one has uploaded stays until a person removes it.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from palestra.data.cache import cache_root, file_sha256
from palestra.errors import PalestraError
from palestra.pipeline.outputs import STATUS, Outputs
from palestra.runs.lease import Lease, LeaseLost
from palestra.runs.redact import redacted
from palestra.runs.remote_store import FsspecStore
from palestra.runs.store import read_json, write_json

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
