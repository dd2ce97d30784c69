"""Training jobs of Amazon SageMaker: a bundle in a bucket, an image by docker, and one request by boto3."""

import base64
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from palestra import __version__
from palestra.errors import PalestraError, UsageError, did_you_mean, needs_extra
from palestra.launch.clusters import Cluster, Record, state_of
from palestra.launch.job import RUNS_THERE, Job, bundle, call
from palestra.spec.words import Words

GROUP = "/aws/sagemaker/TrainingJobs"
SKEW = timedelta(minutes=2)
"""By which the clocks of AWS and of this machine may differ; a job that is older is another one."""
MISSING = {
    "NoCredentialsError": "credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "NoRegionError": "region: give `region` of the cluster",
}
"""What boto3 lacks, by its error."""
CODE, DATA = "/opt/ml/code", "/opt/ml/input/data/source"


class SageMaker(Cluster):
    """The container unpacks the bundle and runs the command, which syncs the run: a spot instance continues it."""

    names: ClassVar[str] = r"[A-Za-z0-9](-?[A-Za-z0-9]){0,62}"

    role: Annotated[str, Words("an ARN such as arn:aws:iam::123456789012:role/train")] = Field(
        default="arn:aws:iam::ACCOUNT:role/ROLE", pattern=r"^arn:aws[\w-]*:iam::\w+:role/.+"
    )
    """The IAM role of the job."""
    bucket: Annotated[str, Words("s3://BUCKET/FOLDER")] = Field(default="s3://BUCKET/palestra", pattern=r"^s3://")
    """Where source bundles, checkpoints and outputs are put."""
    image: str = f"ACCOUNT.dkr.ecr.REGION.amazonaws.com/palestra:{__version__}"
    """The container image."""
    instance_type: Annotated[str, Words("a type such as ml.p4d.24xlarge")] = Field(
        default="ml.g5.xlarge", pattern=r"^ml\.[\w-]+\.[\w-]+$"
    )
    """The machine."""
    region: str | None = None
    """The region; null: that of the AWS configuration."""
    spot: bool = False
    """Use spot instances; an interrupted job continues from its checkpoints."""
    hours: int = Field(default=24, ge=1, le=672)
    """The longest a job may train."""
    disk_gb: int = Field(default=100, ge=1)
    """Disk of each machine."""

    @property
    def place(self) -> str:
        return self.sync or f"{self.bucket}/runs"

    def request(self, job: Job) -> str:
        return f"{json.dumps(self._request(job, job.shown), indent=1)}\n# {job.label}/job.sh\n{entry(job)}"

    def submit(self, job: Job) -> Record:
        for field in ("role", "bucket", "image"):
            if (example := type(self).model_fields[field].default) == getattr(self, field):
                raise UsageError(f"sagemaker: `{field}` is missing: give it in a cluster file, like {example}")
        with explained("submitting the training job"):
            sagemaker, s3 = client("sagemaker", self), client("s3", self)
            known = sagemaker.meta.service_model.shape_for("TrainingInstanceType").enum
            if self.instance_type not in known:
                hint = did_you_mean(self.instance_type, known, "AWS lists its types in the pricing of SageMaker")
                raise UsageError(f"--instance-type {self.instance_type}: SageMaker does not train on it. {hint}")
            bucket, _, prefix = self.bucket.removeprefix("s3://").rstrip("/").partition("/")
            for name, data in (("source.tar.gz", bundle(job, "tar.gz")), ("job.sh", entry(job).encode())):
                s3.put_object(Bucket=bucket, Key="/".join(filter(None, (prefix, "source", job.label, name))), Body=data)
            _create(sagemaker, self._request(job, job.hidden))
        return {"id": job.label}

    def state(self, record: Record) -> str:
        with explained(f"asking for {record['name']}"):
            about = client("sagemaker", self).describe_training_job(TrainingJobName=record["handle"]["id"])
        return state_of(about["TrainingJobStatus"])

    def logs(self, record: Record) -> bytes:
        streams = {"logGroupName": GROUP, "logStreamNamePrefix": f"{record['handle']['id']}/"}
        with explained(f"reading the log of {record['name']}"):
            logs = client("logs", self)
            try:
                pages = list(logs.get_paginator("filter_log_events").paginate(**streams))
            except logs.exceptions.ResourceNotFoundException:
                pages = []  # it has not begun
        return "".join(event["message"] + "\n" for page in pages for event in page["events"]).encode()

    def stop(self, record: Record) -> None:
        with explained(f"stopping {record['name']}"):
            client("sagemaker", self).stop_training_job(TrainingJobName=record["handle"]["id"])

    def _request(self, job: Job, hidden: Mapping[str, str]) -> dict[str, Any]:
        base, seconds = self.bucket.rstrip("/"), self.hours * 3600
        where = {"S3DataType": "S3Prefix", "S3Uri": f"{base}/source/{job.label}/"}
        source = {"S3DataSource": {**where, "S3DataDistributionType": "FullyReplicated"}}
        return {
            "TrainingJobName": job.label,
            "RoleArn": self.role,
            "AlgorithmSpecification": {
                "TrainingImage": self.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": ["bash", f"{DATA}/job.sh"],
            },
            "InputDataConfig": [{"ChannelName": "source", "DataSource": source}],
            "OutputDataConfig": {"S3OutputPath": f"{base}/output"},
            "ResourceConfig": {
                "InstanceType": self.instance_type, "InstanceCount": self.nodes, "VolumeSizeInGB": self.disk_gb,
            },
            "StoppingCondition": {
                "MaxRuntimeInSeconds": seconds, **({"MaxWaitTimeInSeconds": 2 * seconds} if self.spot else {}),
            },
            "Environment": {**job.env, **hidden, "PALESTRA_GRACE": "100"},  # spot: two minutes from SIGTERM to the end
            "EnableManagedSpotTraining": self.spot,
        }  # fmt: skip


def entry(job: Job) -> str:
    """The script that the container runs."""
    lines = ["set -e", f"mkdir -p {CODE} && cd {CODE}", f"tar -xzf {DATA}/source.tar.gz", *job.cluster.setup]
    lines += [f"{job.install()} --quiet", f"exec {shlex.join(job.on_nodes)}"]
    return "\n".join(lines) + "\n"


def _create(sagemaker: Any, request: dict[str, Any]) -> None:
    """Start the job. If the answer to that is lost, boto3 asks again and is told that the name is taken: by us."""
    from botocore.exceptions import ClientError, HTTPClientError

    begin = datetime.now(UTC)
    try:
        sagemaker.create_training_job(**request)
    except (ClientError, HTTPClientError) as error:
        if isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") != "ResourceInUse":
            raise
        try:
            there = sagemaker.describe_training_job(TrainingJobName=request["TrainingJobName"])
        except ClientError:
            raise error from None  # there is none: it failed indeed
        ours, source = (
            about["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] for about in (request, there)
        )
        if source != ours or there["CreationTime"] < begin - SKEW:
            raise


def client(service: str, cluster: SageMaker) -> Any:
    """A client of boto3."""
    import boto3

    return boto3.Session(region_name=cluster.region).client(service)  # type: ignore[call-overload]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of boto3 into a sentence."""
    with needs_extra("SageMaker", "sagemaker"):
        from botocore.exceptions import BotoCoreError, ClientError
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        if missing := MISSING.get(type(error).__name__):
            raise UsageError(f"{what}: there is no AWS {missing}") from error
        about = getattr(error, "response", {}).get("Error", {})
        reason = f"{about.get('Code')}: {about.get('Message')}" if about else error
        raise PalestraError(f"{what} failed: {reason}") from error


def prepare(job: Job, *, build: bool, push: bool) -> None:
    """Build the project's Dockerfile as the job's image, and push it."""
    image = _checked_image(job)
    if build:
        if not (job.folder / "Dockerfile").is_file():
            raise UsageError(f"there is no Dockerfile in {job.folder}: copy the one of Palestra's repository")
        _docker("build", "--tag", image, str(job.folder))
    if push:
        host, _, rest = image.partition("/")
        if isinstance(job.cluster, SageMaker) and ".dkr.ecr." in host:
            _log_in(job.cluster, host, rest.partition(":")[0])
        _docker("push", image)


def run_locally(job: Job) -> None:
    """Run the container of a training job on this machine, with the folders that SageMaker gives it."""
    image = _checked_image(job)
    runs = job.home / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as source:
        (Path(source) / "source.tar.gz").write_bytes(bundle(job, "tar.gz"))
        (Path(source) / "job.sh").write_text(entry(job))
        variables = [part for name in (*job.env, *job.hidden) for part in ("--env", name)]
        mounts = ["--volume", f"{source}:{DATA}:ro", "--volume", f"{runs}:{RUNS_THERE}"]
        gpus = ["--gpus", "all"] if job.cluster.gpus else []
        command = ["--rm", *variables, *mounts, *gpus, "--entrypoint", "bash", image, f"{DATA}/job.sh"]
        _docker("run", *command, env={**job.env, **job.hidden})


def _checked_image(job: Job) -> str:
    try:
        call(["docker", "info", "--format", "{{json .ServerVersion}}"])
    except PalestraError as error:
        raise UsageError(f"building, pushing and --local need docker, and it does not answer here ({error})") from error
    if job.cluster.image is None:
        raise UsageError("`image` is missing: name the one to build and push, with --image")
    return job.cluster.image


def _log_in(cluster: SageMaker, host: str, repository: str) -> None:
    with explained("making the ECR repository"):
        ecr = client("ecr", cluster)
        with suppress(ecr.exceptions.RepositoryAlreadyExistsException):
            ecr.create_repository(repositoryName=repository)
        token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    user, _, password = base64.b64decode(token).decode().partition(":")
    call(["docker", "login", "--username", user, "--password-stdin", host], text=password)


def _docker(*arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run docker with its output shown."""
    if code := subprocess.call(["docker", *arguments], env={**os.environ, **(env or {})}):
        raise PalestraError(f"docker {arguments[0]} failed with exit code {code}")
