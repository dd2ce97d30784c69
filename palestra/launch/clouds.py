"""Jobs of SkyPilot, dstack and Kubernetes: YAML that their own client submits."""

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from palestra.errors import UsageError
from palestra.launch.clusters import Cluster, Record, state_of
from palestra.launch.job import Job, call
from palestra.spec.model import Conflict
from palestra.spec.source import write_text
from palestra.spec.words import Words


class Cloud(Cluster):
    """Machines of many clouds; an interrupted job is started again on another one."""

    instance_type: str | None = None
    """The machine."""
    spot: bool = False
    """Use spot instances."""

    def _submit(self, job: Job, *client: str) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{job.name}.dstack.yml"
            file.write_text(self.request(job))
            call([*client, str(file)], env=job.hidden)
        return {"id": job.name}


class SkyPilot(Cloud):
    """Managed jobs of SkyPilot."""

    names: ClassVar[str] = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"

    infra: str | None = None
    """The cloud, such as `aws/us-east-1` or `k8s`; null: the cheapest."""
    disk_gb: int | None = Field(default=None, ge=1)
    """Disk of each machine."""

    def conflicts(self) -> Iterator[Conflict]:
        """A number of GPUs of no type."""
        if self.gpus is not None and self.gpu_type is None:
            yield Conflict(("gpus",), "expected GPUs with their type, such as 8xH100")

    def request(self, job: Job) -> str:
        resources = {
            "infra": self.infra, "instance_type": self.instance_type, "accelerators": self.type_and_count,
            "use_spot": self.spot, "disk_size": self.disk_gb, "image_id": self.image and f"docker:{self.image}",
        }  # fmt: skip
        task = {
            "name": job.name,
            "num_nodes": self.nodes,
            "resources": {key: value for key, value in resources.items() if value is not None},
            "workdir": ".",
            "envs": dict(job.env),
            "secrets": dict.fromkeys(job.hidden),  # values are given to the client
            "setup": "\n".join([*self.setup, job.install()]),
            "run": shlex.join(job.on_nodes),
        }
        return write_text({key: value for key, value in task.items() if value})

    def submit(self, job: Job) -> Record:
        secrets = [part for name in job.hidden for part in ("--secret", name)]
        return self._submit(job, "sky", "jobs", "launch", "--yes", "--detach-run", *secrets)

    def state(self, record: Record) -> str:
        listed = json.loads(call(["sky", "jobs", "queue", "--all", "--output", "json"]))
        words = [row["status"].rpartition(".")[2] for row in listed if row.get("job_name") == record["name"]]
        return state_of(words[0]) if words else "killed"

    def logs(self, record: Record) -> bytes:
        return call(["sky", "jobs", "logs", "--no-follow", "--tail", "0", "--name", record["name"]]).encode()

    def stop(self, record: Record) -> None:
        call(["sky", "jobs", "cancel", "--yes", "--name", record["name"]])


class Dstack(Cloud):
    """Tasks of dstack."""

    names: ClassVar[str] = r"[a-z][a-z0-9-]{1,40}"

    backends: list[str] = Field(default=[])
    """The clouds to choose from; empty: all that are configured."""
    hours: int | None = Field(default=None, ge=1)
    """The longest a job may run."""
    price: float | None = Field(default=None, gt=0)
    """The most that an hour may cost, in dollars."""

    def request(self, job: Job) -> str:
        task = {
            "type": "task",
            "name": job.name,
            "nodes": self.nodes,
            "image": self.image,
            "python": None if self.image else "3.11",
            "env": [*(f"{key}={value}" for key, value in job.env.items()), *job.hidden],
            "files": [".:/workflow"],
            "working_dir": "/workflow",
            "commands": [*self.setup, job.install(), shlex.join(job.on_nodes)],
            "resources": {"gpu": self.type_and_count} if self.gpus else None,
            "backends": self.backends,
            "instance_types": [self.instance_type] if self.instance_type else None,
            "spot_policy": "spot" if self.spot else "on-demand",
            "max_price": self.price,
            "max_duration": self.hours and f"{self.hours}h",
            "retry": {"on_events": ["interruption"], "duration": "4h"},
        }
        return write_text({key: value for key, value in task.items() if value})

    def submit(self, job: Job) -> Record:
        return self._submit(job, "dstack", "apply", "--yes", "--detach", "--file")

    def state(self, record: Record) -> str:
        listed = json.loads(call(["dstack", "ps", "--all", "--json"]))["runs"]
        words = [run["status"] for run in listed if run["name"] == record["name"]]
        return state_of(words[0]) if words else "killed"

    def logs(self, record: Record) -> bytes:
        return call(["dstack", "logs", record["name"]]).encode()

    def stop(self, record: Record) -> None:
        call(["dstack", "stop", "--yes", record["name"]])


class Kubernetes(Cluster):
    """A RayJob of KubeRay, and a Secret with hidden variables. `image` must have the code and its dependencies."""

    names: ClassVar[str] = r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?"

    namespace: str = "default"
    """The namespace."""
    cpus: int = Field(default=8, ge=1)
    """Cores of each machine."""
    memory: Annotated[str, Words("a size such as '32Gi'")] = Field(default="32Gi", pattern=r"^\d+[KMGT]i$")
    """Memory of each machine."""
    service_account: str | None = None
    """The service account of the pods."""

    def request(self, job: Job) -> str:
        return self._manifest(job, job.shown)

    def submit(self, job: Job) -> Record:
        if self.image is None:
            raise UsageError("kubernetes: `image` is missing: name one that has the code, with --image")
        call(["kubectl", "apply", "-f", "-"], text=self._manifest(job, job.hidden))
        return {"id": job.label}

    def state(self, record: Record) -> str:
        about = self._kubectl("get", "rayjob", record["handle"]["id"], "--output=json", "--ignore-not-found")
        if not about:
            return "stopped"  # and so deleted
        status = json.loads(about).get("status", {})
        failed = status.get("jobDeploymentStatus") == "Failed"
        return "failed" if failed else state_of(status.get("jobStatus") or "PENDING")

    def logs(self, record: Record) -> bytes:
        return self._kubectl("logs", f"--selector=job-name={record['handle']['id']}", "--tail=-1").encode()

    def stop(self, record: Record) -> None:
        self._kubectl("delete", "rayjob,secret", record["handle"]["id"], "--ignore-not-found")

    def _kubectl(self, *arguments: str) -> str:
        return call(["kubectl", f"--namespace={self.namespace}", *arguments])

    def _manifest(self, job: Job, hidden: Mapping[str, str]) -> str:
        labels = {"app.kubernetes.io/managed-by": "palestra"}
        about = {"name": job.label, "namespace": self.namespace, "labels": labels}
        size = {"cpu": self.cpus, "memory": self.memory, **({"nvidia.com/gpu": self.gpu_count} if self.gpus else {})}
        container = {
            "image": self.image or "IMAGE",
            "env": [{"name": key, "value": value} for key, value in job.env.items()],
            "envFrom": [{"secretRef": {"name": job.label}}] if hidden else [],
            "resources": {"limits": size, "requests": size},
        }
        pod = {"serviceAccountName": self.service_account} if self.service_account else {}

        def group(name: str) -> dict[str, Any]:
            return {"rayStartParams": {}, "template": {"spec": {**pod, "containers": [{"name": name, **container}]}}}

        cluster: dict[str, Any] = {"headGroupSpec": group("ray-head")}
        if self.nodes > 1:
            count = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), self.nodes - 1)
            cluster["workerGroupSpecs"] = [{"groupName": "workers", **count, **group("ray-worker")}]
        spec = {
            "entrypoint": f"bash -c {shlex.quote(job.entrypoint)}",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 3,  # the same command continues the run
            "rayClusterSpec": cluster,
        }
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": dict(hidden)}
        ray_job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": about, "spec": spec}
        return "---\n".join(map(write_text, [secret, ray_job] if hidden else [ray_job]))
