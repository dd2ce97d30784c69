"""Jobs of Slurm: a script for sbatch, whose nodes share a disk; preempted ones are requeued and continue."""

import shlex
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from palestra.errors import PalestraError
from palestra.launch.clusters import Cluster, Record
from palestra.launch.job import Job, call, script, shell
from palestra.launch.local import exited, write_script
from palestra.runs.store import write_bytes
from palestra.spec.words import Words

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


class Slurm(Cluster):
    """`sbatch`, `squeue` and `scancel`; exit codes are in the job's home, because Slurm forgets jobs."""

    sees_this_disk: ClassVar[bool] = True

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
        file = write_script(job, self.request(job))
        return {"id": call(["sbatch", "--parsable", file], env=job.hidden).strip().partition(";")[0]}

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
