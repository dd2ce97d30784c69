"""Training jobs of SageMaker against moto; StopTrainingJob, which moto lacks, against a recorded answer."""

import io
import json
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from conftest import SHORT
from s3_server import s3_server

from palestra.errors import PalestraError, UsageError
from palestra.launch import job as jobs
from palestra.launch import sagemaker
from palestra.launch.clusters import cluster_of, open_cluster
from palestra.launch.job import plan
from palestra.launch.log import JobLog
from palestra.launch.sagemaker import prepare, run_locally

boto3 = pytest.importorskip("boto3", reason="the extra sagemaker is not installed")
CLUSTER = """\
on: sagemaker
role: arn:aws:iam::123456789012:role/train
bucket: s3://lab/palestra
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/palestra:1
instance_type: ml.g5.12xlarge
spot: true
"""


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


@pytest.fixture
def project(server, tmp_path, monkeypatch):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.fail_every, server.deny = 0, None
    s3 = boto3.client("s3")
    if "lab" not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket="lab")
    folder = tmp_path / "project"
    (folder / "clusters").mkdir(parents=True)
    monkeypatch.chdir(folder)
    (folder / "small.yaml").write_text(json.dumps(SHORT))
    (folder / "clusters/aws.yaml").write_text(CLUSTER)
    (folder / ".gitignore").write_text("*.bin\n.env\n")
    (folder / "weights.bin").write_bytes(b"x" * 1000)
    (folder / ".env").write_text("WANDB_API_KEY=very-secret-1\n")
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], check=True)
    yield folder
    server.fail_every, server.deny = 0, None


@pytest.fixture
def log(tmp_path):
    return JobLog(str(tmp_path / "log"))


def launched(log: JobLog, name: str | None = None, **given):
    job, record, diff = plan("small.yaml", open_cluster(None, "aws", given), name=name)
    return job, log.launch(job, record, diff)


def test_job_is_submitted_as_the_dry_run_shows_it(project, server, log):
    server.requests, server.failed, server.fail_every = 0, 1, 3  # the third is the request itself
    job, record = launched(log)
    server.fail_every = 0
    assert server.failed > 1
    assert job.name.startswith("palestra-adhoc-20")  # it does not tell what is trained
    shown, _ = json.JSONDecoder().raw_decode(job.cluster.request(job))
    there = boto3.client("sagemaker").describe_training_job(TrainingJobName=job.name)
    sent = next(post for post in reversed(server.posts) if "RoleArn" in post)
    assert shown["Environment"].pop("WANDB_API_KEY") == "(redacted)"
    assert sent["Environment"].pop("WANDB_API_KEY") == "very-secret-1"
    assert sent == shown
    assert there["EnableManagedSpotTraining"] is True
    assert record["results"] == f"s3://lab/palestra/runs/{record['run']}"
    assert log.refreshed(record)["state"] == "done"  # moto's jobs end at once
    assert "very-secret" not in Path(log.store.root, job.name, "job.json").read_text()


@pytest.mark.parametrize("other", [False, True])
def test_answer_lost_after_the_job_was_made_finds_that_job(project, log, monkeypatch, other):
    from botocore.exceptions import ClientError

    real = sagemaker.client

    def client(service, cluster):
        made = real(service, cluster)
        if service == "sagemaker":
            create = made.create_training_job

            def lost(**request):
                if other:  # the name is taken, by a job of another folder
                    request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] += "other/"
                create(**request)
                if other:
                    request["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] = "s3://lab/ours/"
                # What AWS answers to the second attempt; moto takes a name twice.
                said = {"Code": "ResourceInUse", "Message": "Training job names must be unique"}
                raise ClientError({"Error": said}, "CreateTrainingJob")

            monkeypatch.setattr(made, "create_training_job", lost)
        return made

    monkeypatch.setattr(sagemaker, "client", client)
    name = f"lost-{'other' if other else 'ours'}"
    if other:
        with pytest.raises(PalestraError, match="ResourceInUse: Training job names must be unique"):
            launched(log, name)
        return
    job, record = launched(log, name)
    assert record["handle"]["id"] == job.label
    assert log.refreshed(record)["state"] == "done"


def test_bundle_has_what_git_would_commit_and_the_script_runs_it(project, log):
    job, _ = launched(log, "bundled")
    s3 = boto3.client("s3")
    bodies = {
        name: s3.get_object(Bucket="lab", Key=f"palestra/source/{job.name}/{name}")["Body"].read()
        for name in ("source.tar.gz", "job.sh")
    }
    with tarfile.open(fileobj=io.BytesIO(bodies["source.tar.gz"])) as archive:
        names = archive.getnames()
    assert names == [".gitignore", "clusters/aws.yaml", "small.yaml"]
    script = bodies["job.sh"].decode()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "train small.yaml --id" in script
    assert "--sync s3://lab/palestra/runs" in script


def test_bundle_that_is_too_large_names_its_largest_files(project, log, monkeypatch):
    monkeypatch.setattr(jobs, "BUNDLE_LIMIT_MB", 1)
    (project / "video.mp4").write_bytes(b"x" * 900_000)
    (project / "data.jsonl").write_bytes(b"x" * 700_000)
    with pytest.raises(UsageError, match=r"has 2 MB, and at most 1 MB.*video.mp4 \(0.9 MB\), data.jsonl \(0.7 MB\)"):
        launched(log)


def test_instance_type_that_does_not_exist_is_refused_with_the_nearest(project, log):
    with pytest.raises(
        UsageError, match=r"ml.p4d.24xlage: SageMaker does not train on it. Did you mean 'ml.p4d.24xlarge"
    ):
        launched(log, instance_type="ml.p4d.24xlage")


def test_no_credentials_and_refused_ones_are_said(project, log, server, monkeypatch):
    server.deny = "ExpiredToken"
    with pytest.raises(PalestraError, match="submitting the training job failed: ExpiredToken: as asked"):
        launched(log, "expired")
    assert "ExpiredToken" in log.get("expired")["reason"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(project))
    with pytest.raises(UsageError, match="there is no AWS credentials: set AWS_PROFILE"):
        launched(log, "nobody")


def test_name_that_sagemaker_does_not_take_and_examples_left_in_are_refused(project, log):
    with pytest.raises(UsageError, match="sagemaker does not accept this name"):
        launched(log, "my_job")
    (project / "clusters/aws.yaml").write_text("on: sagemaker\n")
    with pytest.raises(UsageError, match="sagemaker: `role` is missing"):
        launched(log, "examples")


def test_stop_asks_for_it(project, log, monkeypatch):
    from botocore.stub import Stubber

    _, record = launched(log, "stopped")
    client = boto3.client("sagemaker")
    monkeypatch.setattr(sagemaker, "client", lambda service, cluster: client)
    with Stubber(client) as stub:
        stub.add_response("stop_training_job", {}, {"TrainingJobName": "stopped"})
        cluster_of(record).stop(record)
        stub.assert_no_pending_responses()


def test_logs_are_those_of_cloudwatch(project, log):
    _, record = launched(log, "logged")
    target, logs = cluster_of(record), boto3.client("logs")
    assert target.logs(record) == b""
    logs.create_log_group(logGroupName=sagemaker.GROUP)
    logs.create_log_stream(logGroupName=sagemaker.GROUP, logStreamName="logged/algo-1")
    events = [{"timestamp": int(time.time() * 1000) + index, "message": f"line {index}"} for index in range(3)]
    logs.put_log_events(logGroupName=sagemaker.GROUP, logStreamName="logged/algo-1", logEvents=events)
    assert target.logs(record) == b"line 0\nline 1\nline 2\n"


def test_without_docker_images_and_local_runs_are_refused(project, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    job, _, _ = plan("small.yaml", open_cluster(None, "aws", {}))
    for act in (lambda: prepare(job, build=True, push=False), lambda: run_locally(job)):
        with pytest.raises(UsageError, match="need docker, and it does not answer here"):
            act()
