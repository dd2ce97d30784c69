"""Jobs of SkyPilot and of dstack: a task as YAML, submitted by their own client."""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from palestra.launch.clusters import Dstack, SkyPilot
from palestra.launch.job import Job, call
from palestra.spec.source import write_text

SKY = {
    "SUCCEEDED": "done", "CANCELLED": "stopped", "CANCELLING": "running", "PENDING": "pending", "SUBMITTED": "pending",
    "STARTING": "pending", "RUNNING": "running", "RECOVERING": "running", "WINDING_DOWN": "running",
}  # fmt: skip
DSTACK = {
    "done": "done", "terminated": "stopped", "aborted": "stopped", "pending": "pending", "submitted": "pending",
    "provisioning": "pending", "pulling": "pending", "running": "running", "terminating": "running",
}  # fmt: skip
"""States of their clients; any other has failed."""


class SkyPilotTarget:
    """A managed job, which SkyPilot starts again on another machine when it is preempted."""

    def request(self, job: Job) -> str:
        cluster = job.cluster
        assert isinstance(cluster, SkyPilot)
        gpus = f"{cluster.gpu_type or 'GPU'}:{cluster.gpu_count}" if cluster.gpus else None
        resources = {
            "infra": cluster.infra, "instance_type": cluster.instance_type, "accelerators": gpus,
            "use_spot": cluster.spot, "disk_size": cluster.disk_gb,
            "image_id": None if cluster.image is None else f"docker:{cluster.image}",
        }  # fmt: skip
        task = {
            "name": job.name,
            "num_nodes": cluster.nodes,
            "resources": {key: value for key, value in resources.items() if value is not None},
            "workdir": ".",
            "envs": dict(job.env),
            "secrets": dict.fromkeys(job.hidden),  # values are given to the client
            "setup": "\n".join([*cluster.setup, job.install()]),
            "run": shlex.join(job.on_nodes),
        }
        return write_text({key: value for key, value in task.items() if value})

    def submit(self, job: Job) -> dict[str, Any]:
        secrets = [part for name in job.hidden for part in ("--secret", name)]
        _apply(job, self.request(job), ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets])
        return {"id": job.name}

    def state(self, record: dict[str, Any]) -> str:
        listed = json.loads(call(["sky", "jobs", "queue", "--all", "--output", "json"]))
        rows = [row for row in listed if row.get("job_name") == record["name"]]
        return SKY.get(rows[0]["status"].rpartition(".")[2], "failed") if rows else "killed"

    def logs(self, record: dict[str, Any]) -> bytes:
        return call(["sky", "jobs", "logs", "--no-follow", "--tail", "0", "--name", record["name"]]).encode()

    def stop(self, record: dict[str, Any]) -> None:
        call(["sky", "jobs", "cancel", "--yes", "--name", record["name"]])


class DstackTarget:
    """A task, which dstack starts again when its machine is interrupted."""

    def request(self, job: Job) -> str:
        cluster = job.cluster
        assert isinstance(cluster, Dstack)
        gpu = ":".join(filter(None, (cluster.gpu_type, str(cluster.gpu_count)))) if cluster.gpus else None
        task = {
            "type": "task",
            "name": job.name,
            "nodes": cluster.nodes,
            "image": cluster.image,
            "python": None if cluster.image else "3.11",
            "env": [*(f"{key}={value}" for key, value in job.env.items()), *job.hidden],
            "files": [".:/workflow"],
            "working_dir": "/workflow",
            "commands": [*cluster.setup, job.install(), shlex.join(job.on_nodes)],
            "resources": {"gpu": gpu} if gpu else None,
            "backends": cluster.backends,
            "instance_types": [cluster.instance_type] if cluster.instance_type else None,
            "spot_policy": "spot" if cluster.spot else "on-demand",
            "max_price": cluster.price,
            "max_duration": None if cluster.hours is None else f"{cluster.hours}h",
            "retry": {"on_events": ["interruption"], "duration": "4h"},
        }
        return write_text({key: value for key, value in task.items() if value})

    def submit(self, job: Job) -> dict[str, Any]:
        _apply(job, self.request(job), ["dstack", "apply", "--yes", "--detach", "--file"])
        return {"id": job.name}

    def state(self, record: dict[str, Any]) -> str:
        runs = json.loads(call(["dstack", "ps", "--all", "--json"]))["runs"]
        rows = [run for run in runs if run["name"] == record["name"]]
        return DSTACK.get(rows[0]["status"], "failed") if rows else "killed"

    def logs(self, record: dict[str, Any]) -> bytes:
        return call(["dstack", "logs", record["name"]]).encode()

    def stop(self, record: dict[str, Any]) -> None:
        call(["dstack", "stop", "--yes", record["name"]])


def _apply(job: Job, request: str, command: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{job.name}.dstack.yml"
        file.write_text(request)
        call([*command, str(file)], env=job.hidden)
