"""Jobs of Kubernetes: a RayJob of KubeRay, and a Secret with its hidden variables, applied by kubectl."""

import json
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from palestra.errors import UsageError
from palestra.launch.clusters import Cluster, Record, state_of
from palestra.launch.job import Job, call
from palestra.spec.source import write_text
from palestra.spec.words import Words


class Kubernetes(Cluster):
    """The head has the driver; the workers are the other machines. `image` must have the code and its dependencies."""

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
        about = json.loads(self._kubectl("get", "rayjob", record["handle"]["id"], "--output=json"))
        status = about.get("status", {})
        failed = status.get("jobDeploymentStatus") == "Failed"
        return "failed" if failed else state_of(status.get("jobStatus") or "PENDING")

    def logs(self, record: Record) -> bytes:
        return self._kubectl("logs", f"--selector=job-name={record['handle']['id']}", "--tail=-1").encode()

    def stop(self, record: Record) -> None:
        self._kubectl("delete", "rayjob", record["handle"]["id"])

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
