"""Jobs as shell scripts that see this disk: a background process of this machine, or a batch job of Slurm."""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from palestra.errors import PalestraError
from palestra.launch.clusters import Cluster, Record
from palestra.launch.job import Job, call
from palestra.runs.lease import Owner
from palestra.runs.store import write_bytes
from palestra.spec.model import Conflict
from palestra.spec.words import Words

ENDED = {"0": "done", "130": "stopped", "143": "stopped"}
"""States by exit code; any other has failed."""
PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "PREEMPTED")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED")
JOINED = """\
export PALESTRA_HEAD=$(hostname -I | cut -d' ' -f1) PALESTRA_RAY_PORT=$((20000 + SLURM_JOB_ID % 20000))
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"""
"""Of several nodes; the script runs on the first."""
REQUEUE = """\
if [ $code = 130 ] && [ ! -e {stop} ] && [ "$(squeue -h -j $SLURM_JOB_ID -o %T)" = RUNNING ]; then
  scontrol requeue $SLURM_JOB_ID && sleep 60  # preempted, or near the time limit, and saved; this script is killed
fi"""
"""Slurm itself requeues what it kills, not what ends in time because it was warned."""


class OnThisDisk(Cluster):
    """The script, the output and the exit code are in the job's home, and tell its state, also later."""

    sees_this_disk: ClassVar[bool] = True

    def logs(self, record: Record) -> bytes:
        """The logs of an array one after the other."""
        home = Path(record["home"])
        if not home.is_dir():
            raise PalestraError(f"the log of {record['name']} is in {home} of the machine that it runs on")
        return b"".join(file.read_bytes() for file in sorted(home.glob("log*.txt")))

    def _write(self, job: Job) -> str:
        """Write the script; nothing of an earlier attempt is left to mislead."""
        write_bytes(job.home / "job.sh", self.request(job).encode())
        for left in (*job.home.glob("exit*"), job.home / "stop"):
            left.unlink(missing_ok=True)
        return str(job.home / "job.sh")


class Local(OnThisDisk):
    """A process in a session of its own, which outlives the shell that started it; pid and start time find it."""

    device_ids: str | None = None
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
        file = self._write(job)
        with (job.home / "log.txt").open("ab") as out:
            process = subprocess.Popen(
                ["/bin/sh", file],
                env={**os.environ, **job.hidden},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return asdict(Owner.here(process.pid))

    def state(self, record: Record) -> str:
        owner, here = Owner.read(record["handle"]), Owner.here()
        if owner.host != here.host:
            raise PalestraError(f"it runs on {owner.host}: ask there")
        alive = owner.machine == here.machine and owner.alive(0.0)  # asked first: it may end meanwhile
        return exited(record) or ("running" if alive else "killed")

    def stop(self, record: Record) -> None:
        if self.state(record) == "running":
            os.killpg(record["handle"]["pid"], signal.SIGTERM)


class Slurm(OnThisDisk):
    """`sbatch`, `squeue` and `scancel`; exit codes are in the job's home, because Slurm forgets jobs."""

    partition: str | None = None
    """The partition."""
    account: str | None = None
    """The account that is charged."""
    time: Annotated[str | None, Words("a time such as '1-00:00:00'")] = Field(
        default=None, pattern=r"^\d+(-\d+)?(:\d+){0,2}$"
    )
    """The time limit, such as `1-00:00:00`."""
    cpus: int | None = Field(default=None, ge=1)
    """Cores of each machine."""
    memory: Annotated[str | None, Words("a size such as '64G'")] = Field(default=None, pattern=r"^\d+[KMGT]?$")
    """Memory of each machine, such as `64G`."""
    container: Literal["enroot", "apptainer"] = "enroot"
    """What runs `image`: enroot (pyxis) or apptainer."""
    options: list[str] = Field(default=[])
    """More options of sbatch, such as `--qos=high`."""

    def request(self, job: Job) -> str:
        options = {
            "job-name": job.name, "nodes": self.nodes, "ntasks-per-node": 1, "partition": self.partition,
            "account": self.account, "time": self.time, "cpus-per-task": self.cpus, "mem": self.memory,
            "gpus-per-node": self.type_and_count, "array": f"0-{job.array - 1}" if job.array else None,
            "output": f"{job.home}/log{'%a' if job.array else ''}.txt", "open-mode": "append",
            "signal": "TERM@120" if self.time else None,
        }  # fmt: skip
        lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None)]
        lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in self.options)]
        lines += [JOINED] if self.nodes > 1 else []
        step = "srun --kill-on-bad-exit=1 --wait=60"
        if self.image is not None and self.container == "enroot":
            step += f" --container-image={self.image} --container-mount-home --container-workdir=$PWD"
        elif self.image is not None:
            step += f" apptainer exec {'--nv ' if self.gpus else ''}{self.image}"
        exits = "exit${SLURM_ARRAY_TASK_ID}" if job.array else "exit"
        again = REQUEUE.format(stop=shlex.quote(str(job.home / "stop")))
        return "\n".join([*lines, script(job, f"{step} {shell(job.on_nodes)}", exits, [again])])

    def submit(self, job: Job) -> Record:
        return {"id": call(["sbatch", "--parsable", self._write(job)], env=job.hidden).strip().partition(";")[0]}

    def state(self, record: Record) -> str:
        """By squeue while Slurm has it; then by the exit codes, of which an array has one for each task."""
        try:
            listed = call(["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={record['handle']['id']}"])
        except PalestraError as error:
            if "Invalid job id" not in str(error):
                raise
            listed = ""  # forgotten, some minutes after its end
        states = listed.split()
        for state, words in {"running": RUNNING, "pending": PENDING}.items():
            if any(word in words for word in states):
                return state
        left = "stopped" if "CANCELLED" in states else "failed" if states else "killed"
        ended = [exited(record, task) or left for task in (range(record["array"]) if record["array"] else ("",))]
        return next(state for state in ("failed", "killed", "stopped", "done") if state in ended)

    def stop(self, record: Record) -> None:
        write_bytes(Path(record["home"]) / "stop", b"")  # not preempted: it is not requeued
        save = ["--signal=TERM"] if self.state(record) == "running" else []
        call(["scancel", *save, record["handle"]["id"]])


def script(job: Job, command: str, exit_file: str = "exit", then: Sequence[str] = ()) -> str:
    """The body of a shell script that runs the job and leaves its exit code in its home."""
    exits = f"{shlex.quote(str(job.home))}/{exit_file}"
    lines = ["trap : TERM INT HUP", f"cd {shlex.quote(job.cluster.folder or str(job.folder))}", f"rm -f {exits}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    lines += [*job.cluster.setup, "code=0", f"{command} || code=$?"]
    lines += [*then, f"echo $code > {exits}.part && mv {exits}.part {exits}", "exit $code"]
    return "\n".join(lines) + "\n"


def shell(command: Sequence[str]) -> str:
    """A command for a shell; of its variables only those of an array's task are filled in."""
    return " ".join(f'"{word}"' if "SLURM_ARRAY_TASK_ID" in word else shlex.quote(word) for word in command)


def exited(record: Record, task: int | str = "") -> str | None:
    """The state of a job that has left its exit code; None for one that has not."""
    file = Path(record["home"]) / f"exit{task}"
    return ENDED.get(file.read_text().strip(), "failed") if file.exists() else None
