"""Training jobs of Amazon SageMaker: a bundle in a bucket, and one request by boto3."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from palestra import __version__
from palestra.errors import PalestraError, UsageError, did_you_mean, needs_extra
from palestra.launch.clusters import SageMaker
from palestra.launch.job import Job, bundle

STATES = {"InProgress": "running", "Stopping": "running", "Completed": "done", "Stopped": "stopped", "Failed": "failed"}
GROUP = "/aws/sagemaker/TrainingJobs"
SKEW = timedelta(minutes=2)
"""By which the clocks of AWS and of this machine may differ; a job that is older is another one."""
CODE, DATA = "/opt/ml/code", "/opt/ml/input/data/source"


class SageMakerTarget:
    """The container unpacks the bundle and runs the command, which syncs the run: a spot instance continues it."""

    def request(self, job: Job) -> str:
        return f"{json.dumps(_request(job, job.shown), indent=1)}\n# {job.label}/job.sh\n{entry(job)}"

    def submit(self, job: Job) -> dict[str, Any]:
        cluster = job.cluster
        assert isinstance(cluster, SageMaker)
        request = _request(job, job.hidden)
        for field, value in {"role": cluster.role, "bucket": cluster.bucket, "image": image_of(job)}.items():
            if "ACCOUNT" in value or "BUCKET" in value:
                raise UsageError(f"sagemaker: `{field}` is missing: give it in a cluster file ({value} is an example)")
        _check_instance(cluster)
        with explained("submitting the training job"):
            bucket, _, prefix = cluster.bucket.removeprefix("s3://").rstrip("/").partition("/")
            s3 = client("s3", cluster)
            for name, data in (("source.tar.gz", bundle(job, "tar.gz")), ("job.sh", entry(job).encode())):
                s3.put_object(Bucket=bucket, Key="/".join(filter(None, (prefix, "source", job.label, name))), Body=data)
            _create(client("sagemaker", cluster), request)
        return {"id": job.label, "region": cluster.region}

    def state(self, record: dict[str, Any]) -> str:
        with explained(f"asking for {record['name']}"):
            about = _client("sagemaker", record).describe_training_job(TrainingJobName=record["handle"]["id"])
        return STATES[about["TrainingJobStatus"]]

    def logs(self, record: dict[str, Any]) -> bytes:
        with explained(f"reading the log of {record['name']}"):
            logs, text = _client("logs", record), []
            try:
                pages = logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=f"{record['handle']['id']}/")
            except logs.exceptions.ResourceNotFoundException:
                return b""  # it has not begun
            for stream in pages["logStreams"]:
                about: dict[str, Any] = {"logGroupName": GROUP, "logStreamName": stream["logStreamName"]}
                token = None
                while True:
                    more = {"nextToken": token} if token else {"startFromHead": True}
                    page = logs.get_log_events(**about, **more)
                    text += [event["message"] + "\n" for event in page["events"]]
                    if page["nextForwardToken"] == token:
                        break
                    token = page["nextForwardToken"]
        return "".join(text).encode()

    def stop(self, record: dict[str, Any]) -> None:
        with explained(f"stopping {record['name']}"):
            _client("sagemaker", record).stop_training_job(TrainingJobName=record["handle"]["id"])


def image_of(job: Job) -> str:
    """The image of the job's container."""
    return job.cluster.image or f"ACCOUNT.dkr.ecr.REGION.amazonaws.com/palestra:{__version__}"


def entry(job: Job) -> str:
    """The script that the container runs."""
    lines = ["set -e", f"mkdir -p {CODE} && cd {CODE}", f"tar -xzf {DATA}/source.tar.gz", *job.cluster.setup]
    lines += [f"{job.install()} --quiet", f"exec {shlex.join(job.on_nodes)}"]
    return "\n".join(lines) + "\n"


def _request(job: Job, hidden: Any) -> dict[str, Any]:
    cluster = job.cluster
    assert isinstance(cluster, SageMaker)
    base, seconds = cluster.bucket.rstrip("/"), cluster.hours * 3600
    where = {"S3DataType": "S3Prefix", "S3Uri": f"{base}/source/{job.label}/"}
    source = {"S3DataSource": {**where, "S3DataDistributionType": "FullyReplicated"}}
    request: dict[str, Any] = {
        "TrainingJobName": job.label,
        "RoleArn": cluster.role,
        "AlgorithmSpecification": {
            "TrainingImage": image_of(job),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", f"{DATA}/job.sh"],
        },
        "InputDataConfig": [{"ChannelName": "source", "DataSource": source}],
        "OutputDataConfig": {"S3OutputPath": f"{base}/output"},
        "ResourceConfig": {
            "InstanceType": cluster.instance_type, "InstanceCount": cluster.nodes, "VolumeSizeInGB": cluster.disk_gb,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": seconds},
        "Environment": {**job.env, **hidden, "PALESTRA_GRACE": "100"},  # spot: two minutes from SIGTERM to the end
    }  # fmt: skip
    if cluster.spot:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = 2 * seconds
    return request


def _create(sagemaker: Any, request: dict[str, Any]) -> None:
    """Start the job. If the answer to that is lost, boto3 asks again and is told that the name is taken: by us."""
    from botocore.exceptions import ClientError, HTTPClientError

    begin, where = datetime.now(UTC), request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
    try:
        sagemaker.create_training_job(**request)
    except (ClientError, HTTPClientError) as error:
        if isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") != "ResourceInUse":
            raise
        try:
            there = sagemaker.describe_training_job(TrainingJobName=request["TrainingJobName"])
        except ClientError:
            raise error from None  # there is none: it failed indeed
        source = there["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"]
        if source != where or there["CreationTime"] < begin - SKEW:
            raise


def client(service: str, cluster: SageMaker) -> Any:
    """A client of boto3."""
    with needs_extra("SageMaker", "sagemaker"):
        import boto3
    return boto3.Session(region_name=cluster.region).client(service)  # type: ignore[call-overload]


def _client(service: str, record: dict[str, Any]) -> Any:
    return client(service, SageMaker.model_validate(record["settings"]))


def _check_instance(cluster: SageMaker) -> None:
    """The types that this boto3 knows."""
    with explained("reading the instance types"):
        known = client("sagemaker", cluster).meta.service_model.shape_for("TrainingInstanceType").enum
    if cluster.instance_type not in known:
        hint = did_you_mean(cluster.instance_type, known)
        raise UsageError(f"--instance-type {cluster.instance_type}: SageMaker does not train on it. {hint}")


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an error of boto3 into a sentence."""
    with needs_extra("SageMaker", "sagemaker"):
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
    try:
        yield
    except (NoCredentialsError, NoRegionError) as error:
        words = "credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        words = words if isinstance(error, NoCredentialsError) else "region: give `region` of the cluster"
        raise UsageError(f"{what}: there is no AWS {words}") from error
    except ClientError as error:
        about = error.response.get("Error", {})
        raise PalestraError(f"{what} failed: {about.get('Code')}: {about.get('Message')}") from error
    except BotoCoreError as error:
        raise PalestraError(f"{what} failed: {error}") from error
