"""Clusters: what a launch must know of the place where a job runs; named ones are files, checked like specs."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from palestra.errors import UsageError, did_you_mean
from palestra.spec.model import Conflict, Model
from palestra.spec.source import Origin, Tree, read_file
from palestra.spec.validate import SpecError, SpecProblem, checked
from palestra.spec.words import Words

FOLDERS = ("clusters", "~/.config/palestra/clusters")
"""Where named clusters are, the project's before the user's."""
Gpus = Annotated[
    str,
    Field(pattern=r"^([1-9][0-9]*x)?[A-Za-z][\w-]*$|^[0-9]+$"),
    Words("GPUs of a machine such as '8xH100' or '8'"),
]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$"), Words("the name of an environment variable")]


class Cluster(Model):
    """What all kinds of clusters have in common."""

    names: ClassVar[str] = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
    """What a job may be called there."""

    on: str
    """The kind of cluster."""
    nodes: int = Field(default=1, ge=1)
    """Machines; more than one are joined by Ray."""
    gpus: Gpus | None = None
    """GPUs of each machine, such as `8xH100` or `8`; null: none are asked for."""
    env: dict[Variable, str] = Field(default={})
    """Environment variables of the job."""
    sync: str | None = None
    """Where runs are copied to while they train: `s3://…`, a folder or `dev`; null: nowhere."""
    folder: str | None = None
    """The project's folder there; null: the folder of the launch."""
    setup: list[str] = Field(default=[])
    """Shell commands before the job, such as `module load cuda`."""
    image: str | None = None
    """The container image."""
    compile_cache: str | None = None
    """A folder that all machines share for what torch compiles."""

    @property
    def gpu_count(self) -> int:
        """GPUs of each machine."""
        digits = re.match(r"\d+", self.gpus or "0")
        return int(digits[0]) if digits else 1

    @property
    def gpu_type(self) -> str | None:
        """Their type, such as H100."""
        kind = re.sub(r"^\d+x?", "", self.gpus or "")
        return kind or None

    def conflicts(self) -> Iterator[Conflict]:
        """More machines than the kind of cluster has."""
        if self.on == "local" and self.nodes > 1:
            yield Conflict(("nodes",), "expected 1, because `on: local` is this machine")


class Local(Cluster):
    """This machine."""

    on: Literal["local"] = "local"
    """A background process of this machine."""


class Ray(Cluster):
    """A Ray cluster that is running."""

    on: Literal["ray"] = "ray"
    """Jobs are submitted to the dashboard of a Ray cluster."""
    address: str = Field(default="http://127.0.0.1:8265", pattern=r"^https?://")
    """The dashboard."""
    token_env: Variable | None = None
    """Environment variable with the cluster's token; null: RAY_AUTH_TOKEN, else ~/.ray/auth_token, else none."""
    temp_dir: str | None = None
    """Ray's folder for sockets and logs of clusters that the job itself starts."""


class Slurm(Cluster):
    """A Slurm cluster whose nodes share a disk."""

    on: Literal["slurm"] = "slurm"
    """Jobs are scripts for `sbatch`."""
    partition: str | None = None
    """The partition."""
    account: str | None = None
    """The account that is charged."""
    time: str | None = Field(default=None, pattern=r"^\d+(-\d+)?(:\d+){0,2}$")
    """The time limit, such as `1-00:00:00`."""
    cpus: int | None = Field(default=None, ge=1)
    """Cores of each machine."""
    memory: str | None = Field(default=None, pattern=r"^\d+[KMGT]?$")
    """Memory of each machine, such as `64G`."""
    container: Literal["enroot", "apptainer"] = "enroot"
    """What runs `image`: enroot (pyxis) or apptainer."""
    options: list[str] = Field(default=[])
    """More options of sbatch, such as `--qos=high`."""


class SageMaker(Cluster):
    """Training jobs of Amazon SageMaker."""

    names: ClassVar[str] = r"[A-Za-z0-9](-?[A-Za-z0-9]){0,62}"

    on: Literal["sagemaker"] = "sagemaker"
    """Jobs are training jobs of Amazon SageMaker."""
    role: str = Field(default="arn:aws:iam::ACCOUNT:role/ROLE", pattern=r"^arn:aws[\w-]*:iam::\w+:role/.+")
    """The IAM role of the job."""
    bucket: str = Field(default="s3://BUCKET/palestra", pattern=r"^s3://")
    """Where source bundles, checkpoints and outputs are put."""
    instance_type: str = Field(default="ml.g5.xlarge", pattern=r"^ml\.[\w-]+\.[\w-]+$")
    """The machine."""
    region: str | None = None
    """The region; null: that of the AWS configuration."""
    spot: bool = False
    """Use spot instances; an interrupted job continues from its checkpoints."""
    hours: int = Field(default=24, ge=1, le=672)
    """The longest a job may train."""
    disk_gb: int = Field(default=100, ge=1)
    """Disk of each machine."""


class SkyPilot(Cluster):
    """Machines of many clouds through SkyPilot."""

    names: ClassVar[str] = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"

    on: Literal["skypilot"] = "skypilot"
    """Jobs are managed jobs of SkyPilot."""
    infra: str | None = None
    """The cloud, such as `aws/us-east-1` or `k8s`; null: the cheapest."""
    instance_type: str | None = None
    """The machine."""
    spot: bool = False
    """Use spot instances."""
    disk_gb: int | None = Field(default=None, ge=1)
    """Disk of each machine."""

    def conflicts(self) -> Iterator[Conflict]:
        """A number of GPUs of no type."""
        if self.gpus is not None and self.gpu_type is None:
            yield Conflict(("gpus",), "expected GPUs with their type, such as 8xH100")


class Dstack(Cluster):
    """Machines of many clouds through dstack."""

    names: ClassVar[str] = r"[a-z][a-z0-9-]{1,40}"

    on: Literal["dstack"] = "dstack"
    """Jobs are tasks of dstack."""
    backends: list[str] = Field(default=[])
    """The clouds to choose from; empty: all that are configured."""
    instance_type: str | None = None
    """The machine."""
    spot: bool = False
    """Use spot instances."""
    hours: int | None = Field(default=None, ge=1)
    """The longest a job may run."""
    price: float | None = Field(default=None, gt=0)
    """The most that an hour may cost, in dollars."""


class Kubernetes(Cluster):
    """A Kubernetes cluster with KubeRay."""

    names: ClassVar[str] = r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?"

    on: Literal["kubernetes"] = "kubernetes"
    """Jobs are RayJobs of KubeRay; `image` must have the code and its dependencies."""
    namespace: str = "default"
    """The namespace."""
    cpus: int = Field(default=8, ge=1)
    """Cores of each machine."""
    memory: str = Field(default="32Gi", pattern=r"^\d+[KMGT]i$")
    """Memory of each machine."""
    service_account: str | None = None
    """The service account of the pods."""


KINDS: dict[str, type[Cluster]] = {
    "local": Local, "ray": Ray, "slurm": Slurm, "sagemaker": SageMaker, "skypilot": SkyPilot, "dstack": Dstack,
    "kubernetes": Kubernetes,
}  # fmt: skip


def open_cluster(on: str | None, name: str | None, given: Mapping[str, Any]) -> Cluster:
    """The cluster of a kind, or the named one, with the fields that options gave."""
    tree = Tree({"on": on or "local"}, {(): Origin(how="--on")}) if name is None else _named(name)
    kind = tree.data.get("on")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS, f"The kinds are: {', '.join(KINDS)}")
        raise SpecError([SpecProblem(("on",), tree.origin(("on",)), f"unknown kind of cluster: {kind!r}", hint)])
    if on is not None and on != kind:
        raise UsageError(f"--on {on}, but the cluster {name} is of kind {kind}: leave --on out")
    model = KINDS[kind]
    for field in given:
        if field not in model.model_fields:
            raise UsageError(f"--{field.replace('_', '-')}: {kind} has no such setting")
    data = {**tree.data, **given, "env": {**tree.data.get("env", {}), **given.get("env", {})}}
    origins = tree.origins | {(field,): Origin(how=f"--{field.replace('_', '-')}") for field in given}
    cluster = checked(model, Tree(data, origins))
    if problems := [SpecProblem(at, Tree(data, origins).origin(at), why) for at, why in cluster.all_conflicts()]:
        raise SpecError(problems)
    return cluster


def _named(name: str) -> Tree:
    folders = [Path(folder).expanduser() for folder in reversed(FOLDERS)]
    files = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    if name not in files:
        known = f"There are: {', '.join(files)}." if files else "There are none."
        where = " or ".join(f"{folder}/{name}.yaml" for folder in FOLDERS)
        raise UsageError(f"no cluster {name!r}. {did_you_mean(name, files, known)} A cluster is a file: {where}")
    tree = read_file(files[name])
    if not isinstance(tree.data, dict):
        raise UsageError(f"{files[name]} is not a cluster: expected a mapping with `on:`")
    return tree
