"""Where the outputs of steps lie, which of them are done, and who is at work on which.

Under the prefix: `NAME-HASH/` is the output of a step that is done, `NAME-HASH.partial/` where one is at work or was,
`.steps/NAME-HASH/` its lease, its log and how the last attempt ended. Done is what has a `status.json`: it is written
last, and the folder gets its name after that. Killed at any instant a folder is one or the other.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.runs.lease import Lease, Owner
from palestra.runs.store import LocalStore, read_json, sync_folder, write_json

STATUS = "status.json"


class Outputs:
    """The outputs under one local prefix."""

    def __init__(self, prefix: Path | str):
        self.prefix = Path(prefix)
        self.store = LocalStore(self.prefix / ".steps")

    def path(self, address: str) -> Path:
        """Where the output of a step is once it is done."""
        return self.prefix / address

    def partial(self, address: str) -> Path:
        """Where a step works."""
        return self.prefix / f"{address}.partial"

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
        try:
            return read_json(self.path(address) / STATUS)
        except FileNotFoundError:
            return None

    def current(self, address: str) -> Path:
        """The output as it is now, done or not: for those who do not wait."""
        return self.path(address) if self.done(address) is not None else self.partial(address)

    def attempt(self, address: str) -> dict[str, Any] | None:
        """How the last attempt stands or ended, where the step is not done."""
        try:
            return read_json(self.prefix / ".steps" / address / "attempt.json")
        except FileNotFoundError:
            return None

    def write_attempt(self, address: str, about: Mapping[str, Any]) -> None:
        """Note how an attempt stands."""
        write_json(self.prefix / ".steps" / address / "attempt.json", dict(about))

    def begin(self, address: str, *, resumes: bool) -> Path:
        """The folder to work in: what a killed attempt left where the step goes on with that, else empty."""
        folder = self.partial(address)
        if folder.exists() and not resumes:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, address: str, status: Mapping[str, Any]) -> None:
        """The step is done: `status.json`, then the name."""
        write_json(self.partial(address) / STATUS, dict(status))
        self.finish(address)

    def finish(self, address: str) -> bool:
        """Name a folder whose step was done when somebody was killed; says whether there was one."""
        folder, final = self.partial(address), self.path(address)
        if not (folder / STATUS).exists():
            return False
        if final.exists():  # without a status, else the step would not have run: not ours, and not to be lost
            raise UsageError(f"{final} is in the way of a step's output: it has no {STATUS}. Move it away.")
        folder.rename(final)
        sync_folder(final.parent)
        return True

    def earlier(self, name: str) -> list[dict[str, Any]]:
        """The statuses of all steps of a name that are done, the newest first."""
        found = [read_json(path) for path in self.prefix.glob(f"{name}-*/{STATUS}")]
        return sorted((each for each in found if each["name"] == name), key=lambda s: s["finished"], reverse=True)


def open_outputs(prefix: str) -> Outputs:
    """The outputs under a prefix: a local folder."""
    return Outputs(prefix)
