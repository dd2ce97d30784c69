"""The job log: a record of every launch, in a folder or a bucket that people share, and what can be done to one."""

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError, UsageError, did_you_mean
from palestra.launch.clusters import Record, cluster_of
from palestra.launch.job import Job, again
from palestra.runs.run import NAME
from palestra.runs.store import FsspecStore, LocalStore
from palestra.work.redact import redact, secrets

FINAL = ("done", "failed", "stopped", "killed")
DEFAULT = "~/.local/state/palestra/jobs"
REVISIONS = 20
"""How many changes a record remembers: by them a process knows its own, whose answer was lost."""


class JobLog:
    """Records by name; every change is on the condition that nobody else has changed the record meanwhile."""

    def __init__(self, where: str | None = None):
        where = where or os.environ.get("PALESTRA_JOBS") or DEFAULT
        remote = "://" in where and not where.startswith("file://")
        folder = Path(where.removeprefix("file://")).expanduser()
        self.store: LocalStore | FsspecStore = FsspecStore(where) if remote else LocalStore(folder)

    def add(self, record: Record, diff: str) -> None:
        """A new record; a name that is taken is refused."""
        first = {**record, "revisions": [uuid.uuid4().hex[:12]]}  # no two people write the same bytes
        if not self.store.swap(_key(record["name"]), None, _bytes(first)):
            raise UsageError(f"there is a job {record['name']!r} in {self.store.root} already: choose another --name")
        if diff:
            self.store.put(f"{record['name']}/git.diff", diff.encode())

    def get(self, name: str) -> Record:
        """The record of a name, or of the only one that begins so."""
        data = self.store.get(_key(name)) if NAME.fullmatch(name) else None
        if data is not None:
            return json.loads(data)
        names = self.names()
        if len(near := [known for known in names if name and known.startswith(name)]) == 1:
            return self.get(near[0])
        known = f"There are: {', '.join(names[-10:])}." if names else "The log is empty."
        raise UsageError(f"no job {name!r} in {self.store.root}. {did_you_mean(name, names, known)}")

    def names(self) -> list[str]:
        """All names, sorted."""
        return [key.partition("/")[0] for key in self.store.listed() if key.endswith("/job.json")]

    def diff(self, name: str) -> str:
        """How the tree differed from its commit at the launch."""
        return (self.store.get(f"{name}/git.diff") or b"").decode()

    def change(self, name: str, changed: Callable[[Record], Mapping[str, Any]]) -> Record:
        """Change fields of a record as a function of what they are now."""
        mine = uuid.uuid4().hex[:12]
        while True:
            stored = self.store.get(_key(name))
            if stored is None:
                raise UsageError(f"there is no job {name!r} in {self.store.root} any more")
            record = json.loads(stored)
            if mine in record["revisions"]:  # written, though the answer was lost, and changed by others since
                return record
            new = {**record, **changed(record)}
            if new == record:
                return record
            new["revisions"] = [*record["revisions"], mine][-REVISIONS:]
            if self.store.swap(_key(name), stored, _bytes(new)):
                return new

    def launch(self, job: Job, record: Record, diff: str) -> Record:
        """Write the record, submit the job, and note what finds it again."""
        self.add({**record, "request": job.cluster.request(job)}, diff)
        return self._submit(job)

    def _submit(self, job: Job) -> Record:
        try:
            handle = job.cluster.submit(job)
        except BaseException as error:
            reason = redact(str(error), [*secrets(), *job.hidden.values()])
            self.change(job.name, lambda _: {"state": "failed", "reason": reason})
            raise
        return self.change(job.name, lambda _: {"state": "pending", "handle": handle, "attempts": job.attempt})

    def refreshed(self, record: Record) -> Record:
        """The record with today's state, which is stored; one that cannot be asked has its last one and says why."""
        if record["state"] in FINAL or not record["handle"]:
            return record
        try:
            state = cluster_of(record).state(record)
        except PalestraError as error:
            return {**record, "reason": str(error)}
        same = record["attempts"]
        return self.change(record["name"], lambda now: {"state": state} if now["attempts"] == same else {})

    def stop(self, name: str) -> Record:
        """Ask a job to save and end."""
        record = self.refreshed(self.get(name))
        if record["state"] in FINAL:
            raise UsageError(f"{name} is {record['state']} already")
        if not record["handle"]:  # its launch was killed before it was submitted
            return self.change(record["name"], lambda _: {"state": "killed"})
        cluster_of(record).stop(record)
        return record

    def retry(self, name: str) -> Record:
        """Submit a job again that has ended: it continues the same run."""
        record = self.refreshed(self.get(name))
        if record["state"] not in FINAL:
            raise UsageError(f"{name} is {record['state']}: stop it first, with palestra jobs stop {name}")
        job, before = again(record), record["attempts"]
        mine = {"state": "new", "reason": None, "handle": {}, "claim": uuid.uuid4().hex[:12]}
        taken = self.change(job.name, lambda old: mine if old["state"] in FINAL and old["attempts"] == before else {})
        if taken.get("claim") != mine["claim"]:
            raise UsageError(f"{name} was retried by somebody else just now")
        return self._submit(job)


def followed(log: JobLog, name: str, wait: Callable[[], None]) -> Iterator[bytes]:
    """The output of a job as it grows, until it has ended."""
    seen = 0
    while True:
        record = log.refreshed(log.get(name))
        output = cluster_of(record).logs(record)
        yield output[seen:]
        seen = len(output)
        if record["state"] in FINAL:
            return
        wait()


def _key(name: str) -> str:
    return f"{name}/job.json"


def _bytes(record: Record) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()
