"""Images of jobs: built and pushed by docker, to a repository of ECR that is made where needed; or run here."""

import base64
import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from palestra.errors import PalestraError, UsageError
from palestra.launch.job import RUNS_THERE, Job, bundle, call
from palestra.launch.sagemaker import DATA, SageMaker, client, entry, explained


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
        with contextlib.suppress(ecr.exceptions.RepositoryAlreadyExistsException):
            ecr.create_repository(repositoryName=repository)
        token = ecr.get_authorization_token()["authorizationData"][0]["authorizationToken"]
    user, _, password = base64.b64decode(token).decode().partition(":")
    call(["docker", "login", "--username", user, "--password-stdin", host], text=password)


def _docker(*arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run docker with its output shown."""
    if code := subprocess.call(["docker", *arguments], env={**os.environ, **(env or {})}):
        raise PalestraError(f"docker {arguments[0]} failed with exit code {code}")
