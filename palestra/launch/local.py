"""Jobs as background processes of this machine, which outlive the shell that started them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, ClassVar

import psutil
from pydantic import Field

from palestra.errors import PalestraError
from palestra.launch.clusters import Cluster, Record
from palestra.launch.job import Job, script, shell
from palestra.runs.lease import Owner
from palestra.runs.store import write_bytes
from palestra.spec.model import Conflict
from palestra.spec.words import Words

ENDED = {"0": "done", "130": "stopped", "143": "stopped"}
"""States by exit code; any other has failed."""


class Local(Cluster):
    """A shell script in a session of its own; its exit code, pid and start time tell its state, also later."""

    sees_this_disk: ClassVar[bool] = True

    device_ids: Annotated[str | None, Words("GPUs such as '0,1'")] = Field(default=None, pattern=r"^\d+(,\d+)*$")
    """The GPUs to use, such as `0,1`; null: all."""

    def conflicts(self) -> Iterator[Conflict]:
        """More machines than this one."""
        if self.nodes > 1:
            yield Conflict(("nodes",), "expected 1, because `on: local` is this machine")

    def variables(self) -> dict[str, str]:
        return super().variables() | ({"CUDA_VISIBLE_DEVICES": self.device_ids} if self.device_ids else {})

    def request(self, job: Job) -> str:
        return f"#!/bin/sh\n{script(job, shell(job.command))}"

    def submit(self, job: Job) -> Record:
        file = write_script(job, self.request(job))
        with (job.home / "log.txt").open("ab") as out:
            process = subprocess.Popen(
                ["/bin/sh", file],
                env={**os.environ, **job.hidden},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return asdict(replace(Owner.here(), pid=process.pid, born=psutil.Process(process.pid).create_time()))

    def state(self, record: Record) -> str:
        owner, here = Owner.read(record["handle"]), Owner.here()
        if owner.host != here.host:
            raise PalestraError(f"it runs on {owner.host}: ask there")
        alive = owner.machine == here.machine and owner.alive(0.0)  # asked first: it may end meanwhile
        return exited(record) or ("running" if alive else "killed")

    def stop(self, record: Record) -> None:
        if self.state(record) == "running":
            os.killpg(record["handle"]["pid"], signal.SIGTERM)


def write_script(job: Job, text: str) -> str:
    """Write the script of a job into its home, where nothing of an earlier attempt is left to mislead; its path."""
    write_bytes(job.home / "job.sh", text.encode())
    for left in (*job.home.glob("exit*"), job.home / "stop"):
        left.unlink(missing_ok=True)
    return str(job.home / "job.sh")


def exited(record: Record, task: int | str = "") -> str | None:
    """The state of a job that has left its exit code; None for one that has not."""
    file = Path(record["home"]) / f"exit{task}"
    return ENDED.get(file.read_text().strip(), "failed") if file.exists() else None
