"""Jobs of Slurm: a script for sbatch, whose nodes share a disk; preempted ones are requeued and continue."""

import shlex
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.launch.clusters import Slurm
from palestra.launch.job import Job, call, script, shell
from palestra.launch.local import exited, read_log
from palestra.runs.store import write_bytes

PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "PREEMPTED")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STAGE_OUT", "SIGNALING", "RESIZING", "STOPPED")
PORT = "$((20000 + SLURM_JOB_ID % 20000))"
TOKEN = "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"

REQUEUE = """\
if [ $code = 130 ] && [ ! -e {stop} ] && [ "$(squeue -h -j $SLURM_JOB_ID -o %T)" = RUNNING ]; then
  scontrol requeue $SLURM_JOB_ID && sleep 60  # preempted, or near the time limit, and saved; this script is killed
fi"""
"""Slurm itself requeues what it kills, not what ends in time because it was warned."""


class SlurmTarget:
    """`sbatch`, `squeue` and `scancel`; exit codes are in the job's home, because Slurm forgets jobs."""

    def request(self, job: Job) -> str:
        cluster = job.cluster
        assert isinstance(cluster, Slurm)
        task = "%a" if job.array else ""
        gpus = ":".join(filter(None, (cluster.gpu_type, str(cluster.gpu_count)))) if cluster.gpus else None
        options = {
            "job-name": job.name, "nodes": cluster.nodes, "ntasks-per-node": 1, "partition": cluster.partition,
            "account": cluster.account, "time": cluster.time, "cpus-per-task": cluster.cpus, "mem": cluster.memory,
            "gpus-per-node": gpus,
            "array": f"0-{job.array - 1}" if job.array else None, "output": f"{job.home}/log{task}.txt",
            "open-mode": "append", "signal": "TERM@120" if cluster.time else None,
        }  # fmt: skip
        lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None)]
        lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in cluster.options)]
        if cluster.nodes > 1:  # this script runs on the first node
            lines += ["export PALESTRA_HEAD=$(hostname -I | cut -d' ' -f1)", f"export PALESTRA_RAY_PORT={PORT}"]
            lines += [f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN={TOKEN}"]
        step = ["srun", "--kill-on-bad-exit=1", "--wait=60"]
        if cluster.image is not None and cluster.container == "enroot":
            step += [f"--container-image={cluster.image}", "--container-mount-home", "--container-workdir=$PWD"]
        elif cluster.image is not None:
            step += ["apptainer", "exec", *(["--nv"] if cluster.gpus else []), cluster.image]
        exits = "exit${SLURM_ARRAY_TASK_ID}" if job.array else "exit"
        again = REQUEUE.format(stop=shlex.quote(str(job.home / "stop")))
        return "\n".join([*lines, script(job, f"{' '.join(step)} {shell(job.on_nodes)}", exits, [again])])

    def submit(self, job: Job) -> dict[str, Any]:
        file = job.home / "job.sh"
        write_bytes(file, self.request(job).encode())
        for left in (*job.home.glob("exit*"), job.home / "stop"):
            left.unlink(missing_ok=True)
        return {"id": call(["sbatch", "--parsable", str(file)], env=job.hidden).strip().partition(";")[0]}

    def state(self, record: dict[str, Any]) -> str:
        """By squeue while Slurm has it; then by the exit codes, of which an array has one for each task."""
        try:
            listed = call(["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={record['handle']['id']}"])
        except PalestraError as error:
            if "Invalid job id" not in str(error):
                raise
            listed = ""  # forgotten, some minutes after its end
        states = listed.split()
        if any(state in RUNNING for state in states):
            return "running"
        if any(state in PENDING for state in states):
            return "pending"
        tasks = range(record["array"]) if record["array"] else ("",)
        ended = [exited(Path(record["home"]), f"exit{task}") for task in tasks]
        left = "stopped" if "CANCELLED" in states else "failed" if states else "killed"
        return next(
            state for state in ("failed", "killed", "stopped", "done") if state in [end or left for end in ended]
        )

    def logs(self, record: dict[str, Any]) -> bytes:
        return read_log(record)

    def stop(self, record: dict[str, Any]) -> None:
        write_bytes(Path(record["home"]) / "stop", b"")  # not preempted: it is not requeued
        save = ["--signal=TERM"] if self.state(record) == "running" else []
        call(["scancel", *save, record["handle"]["id"]])
