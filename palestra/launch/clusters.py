"""Clusters: what a launch must know of the place where a job runs; named ones are files, checked like specs."""

import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from palestra.errors import UsageError, did_you_mean
from palestra.spec.model import Model
from palestra.spec.source import Origin, Tree, read_file
from palestra.spec.validate import SpecError, SpecProblem, checked
from palestra.spec.words import Words

if TYPE_CHECKING:
    from palestra.launch.job import Job

KINDS = {
    "local": "scripts:Local", "ray": "ray:Ray", "slurm": "scripts:Slurm", "sagemaker": "sagemaker:SageMaker",
    "skypilot": "clouds:SkyPilot", "dstack": "clouds:Dstack", "kubernetes": "clouds:Kubernetes",
}  # fmt: skip
"""File and class of each kind, imported where it is used."""
FOLDERS = ("clusters", "~/.config/palestra/clusters")
"""Where named clusters are, the project's before the user's."""
STATES = {
    "pending": ("PENDING", "SUBMITTED", "STARTING", "PROVISIONING", "PULLING"),
    "running": ("RUNNING", "INPROGRESS", "STOPPING", "CANCELLING", "TERMINATING", "RECOVERING", "WINDING_DOWN"),
    "done": ("SUCCEEDED", "COMPLETED", "DONE"),
    "stopped": ("STOPPED", "CANCELLED", "TERMINATED", "ABORTED"),
}
"""Our states by the words of Ray, SageMaker, SkyPilot, dstack and KubeRay; with any other word it has failed."""
Gpus = Annotated[
    str,
    Field(pattern=r"^([1-9][0-9]*x)?[A-Za-z][\w-]*$|^[0-9]+$"),
    Words("GPUs of a machine such as '8xH100' or '8'"),
]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$"), Words("the name of an environment variable")]
Record = dict[str, Any]
"""A launch in the job log."""


class Cluster(Model):
    """What all kinds of clusters have in common: settings, and how jobs are submitted there and followed."""

    names: ClassVar[str] = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
    """What a job may be called there."""
    sees_this_disk: ClassVar[bool] = False
    """Then no bundle is sent, and runs stay in the folder of runs."""

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
        return re.sub(r"^\d+x?", "", self.gpus or "") or None

    @property
    def type_and_count(self) -> str | None:
        """GPUs of each machine as most clients write them: `H100:8` or `8`."""
        return ":".join(filter(None, (self.gpu_type, str(self.gpu_count)))) if self.gpus else None

    @property
    def place(self) -> str | None:
        """Where runs are copied to."""
        return self.sync

    def variables(self) -> dict[str, str]:
        """Environment variables that follow from the settings."""
        cache = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"} if self.compile_cache else {}
        return self.env | {name: f"{self.compile_cache}/{folder}" for name, folder in cache.items()}

    @abstractmethod
    def request(self, job: "Job") -> str:
        """Exactly what is submitted, without hidden variables."""

    @abstractmethod
    def submit(self, job: "Job") -> Record:
        """Submit it; what finds it again."""

    @abstractmethod
    def state(self, record: Record) -> str:
        """pending, running, done, failed, stopped or killed."""

    @abstractmethod
    def logs(self, record: Record) -> bytes:
        """Its output so far."""

    @abstractmethod
    def stop(self, record: Record) -> None:
        """Ask it to save and end."""


def state_of(word: str) -> str:
    """The state that a cluster calls so."""
    return next((state for state, words in STATES.items() if word.upper() in words), "failed")


def cluster_of(record: Record) -> Cluster:
    """The cluster of a launch, not checked again: another version may have written the record."""
    return resolve_name(f"palestra.launch.{KINDS[record['on']]}").model_construct(**record["settings"])


def open_cluster(on: str | None, name: str | None, given: Mapping[str, Any]) -> Cluster:
    """The cluster of a kind, or the named one, with the fields that options gave."""
    if on is None and name is None:
        raise UsageError(f"where? Give --on {'|'.join(KINDS)}, or --cluster NAME")
    tree = Tree({"on": on}, {(): Origin(how="--on")}) if name is None else _named(name)
    kind = tree.data.get("on")
    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS, f"The kinds are: {', '.join(KINDS)}")
        raise SpecError([SpecProblem(("on",), tree.origin(("on",)), f"unknown kind of cluster: {kind!r}", hint)])
    if on is not None and on != kind:
        raise UsageError(f"--on {on}, but the cluster {name} is of kind {kind}: leave --on out")
    model = resolve_name(f"palestra.launch.{KINDS[kind]}")
    options = {field: f"--{field.replace('_', '-')}" for field in given}
    for field, option in options.items():
        if field not in model.model_fields:
            raise UsageError(f"{option}: {kind} has no such setting; it has {', '.join(model.model_fields)}")
    data = {**tree.data, **given, "env": {**tree.data.get("env", {}), **given.get("env", {})}}
    whole = Tree(data, tree.origins | {(field,): Origin(how=option) for field, option in options.items()})
    cluster = checked(model, whole)
    if problems := [SpecProblem(at, whole.origin(at), why) for at, why in cluster.all_conflicts()]:
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
