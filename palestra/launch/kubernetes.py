"""Jobs of Kubernetes: a RayJob of KubeRay, and a Secret with its hidden variables, applied by kubectl."""

import json
import shlex
from typing import Any

from palestra.errors import UsageError
from palestra.launch.clusters import Kubernetes
from palestra.launch.job import Job, call
from palestra.spec.source import write_text

STATES = {"SUCCEEDED": "done", "FAILED": "failed", "STOPPED": "stopped", "RUNNING": "running", "PENDING": "pending"}


class KubernetesTarget:
    """The head has the driver; the workers are the other machines. The code is in the image."""

    def request(self, job: Job) -> str:
        return "---\n".join(map(write_text, _documents(job, job.shown)))

    def submit(self, job: Job) -> dict[str, Any]:
        if job.cluster.image is None:
            raise UsageError("kubernetes: `image` is missing: name one that has the code")
        call(["kubectl", "apply", "-f", "-"], text="---\n".join(map(write_text, _documents(job, job.hidden))))
        return {"id": job.label, "namespace": job.cluster.namespace}  # type: ignore[attr-defined]

    def state(self, record: dict[str, Any]) -> str:
        about = json.loads(_kubectl(record, "get", "rayjob", record["handle"]["id"], "--output=json"))
        status = about.get("status", {})
        if status.get("jobDeploymentStatus") == "Failed":
            return "failed"
        return STATES.get(status.get("jobStatus") or "PENDING", "failed")

    def logs(self, record: dict[str, Any]) -> bytes:
        return _kubectl(record, "logs", f"--selector=job-name={record['handle']['id']}", "--tail=-1").encode()

    def stop(self, record: dict[str, Any]) -> None:
        _kubectl(record, "delete", "rayjob", record["handle"]["id"])


def _kubectl(record: dict[str, Any], *arguments: str) -> str:
    return call(["kubectl", f"--namespace={record['handle']['namespace']}", *arguments])


def _documents(job: Job, hidden: Any) -> list[dict[str, Any]]:
    cluster = job.cluster
    assert isinstance(cluster, Kubernetes)
    about = {"name": job.label, "namespace": cluster.namespace, "labels": {"app.kubernetes.io/managed-by": "palestra"}}
    size: dict[str, Any] = {"cpu": cluster.cpus, "memory": cluster.memory}
    size |= {"nvidia.com/gpu": cluster.gpu_count} if cluster.gpus else {}
    container = {
        "image": cluster.image or "IMAGE",
        "env": [{"name": key, "value": value} for key, value in job.env.items()],
        "envFrom": [{"secretRef": {"name": job.label}}] if hidden else [],
        "resources": {"limits": size, "requests": size},
    }
    pod = {"serviceAccountName": cluster.service_account} if cluster.service_account else {}

    def group(name: str) -> dict[str, Any]:
        return {"rayStartParams": {}, "template": {"spec": {**pod, "containers": [{"name": name, **container}]}}}

    workers = {"groupName": "workers", "replicas": cluster.nodes - 1, "minReplicas": cluster.nodes - 1}
    workers |= {"maxReplicas": cluster.nodes - 1, **group("ray-worker")}
    setup = "".join(f"{line} && " for line in cluster.setup)
    ray_job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": about,
        "spec": {
            "entrypoint": f"bash -c {shlex.quote(setup + shlex.join(job.command))}",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 3,  # the same command continues the run
            "rayClusterSpec": {
                "headGroupSpec": group("ray-head"),
                **({"workerGroupSpecs": [workers]} if cluster.nodes > 1 else {}),
            },
        },
    }
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": about, "stringData": dict(hidden)}
    return [secret, ray_job] if hidden else [ray_job]
