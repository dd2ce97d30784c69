"""Jobs as background processes of this machine, which outlive the shell that started them."""

import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from palestra.errors import PalestraError
from palestra.launch.job import Job, script, shell
from palestra.runs.lease import Owner
from palestra.runs.store import write_bytes

ENDED = {"0": "done", "130": "stopped", "143": "stopped"}
"""States by exit code; any other has failed."""


class LocalTarget:
    """A shell script in a session of its own; its exit code, pid and start time tell its state, also later."""

    def request(self, job: Job) -> str:
        return f"#!/bin/sh\n{script(job, shell(job.command))}"

    def submit(self, job: Job) -> dict[str, Any]:
        file = job.home / "job.sh"
        write_bytes(file, self.request(job).encode())
        (job.home / "exit").unlink(missing_ok=True)
        with (job.home / "log.txt").open("ab") as out:
            process = subprocess.Popen(
                ["/bin/sh", str(file)],
                env={**os.environ, **job.hidden},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        here = Owner.here()
        return asdict(Owner(here.host, here.machine, process.pid, psutil.Process(process.pid).create_time()))

    def state(self, record: dict[str, Any]) -> str:
        owner, here = Owner.read(record["handle"]), Owner.here()
        if owner.host != here.host:
            raise PalestraError(f"it runs on {owner.host}: ask there")
        alive = owner.machine == here.machine and owner.alive(0.0)  # asked first: it may end meanwhile
        return exited(Path(record["home"])) or ("running" if alive else "killed")

    def logs(self, record: dict[str, Any]) -> bytes:
        return read_log(record)

    def stop(self, record: dict[str, Any]) -> None:
        if self.state(record) == "running":
            os.killpg(record["handle"]["pid"], signal.SIGTERM)


def exited(home: Path, name: str = "exit") -> str | None:
    """The state of a job that has left its exit code; None for one that has not."""
    file = home / name
    return ENDED.get(file.read_text().strip(), "failed") if file.exists() else None


def read_log(record: dict[str, Any]) -> bytes:
    """The logs of a job that sees this disk; those of an array one after the other."""
    files = sorted(Path(record["home"]).glob("log*.txt"))
    if not files and not Path(record["home"]).is_dir():
        raise PalestraError(f"the log of {record['name']} is in {record['home']} of the machine that it runs on")
    return b"".join(file.read_bytes() for file in files)
