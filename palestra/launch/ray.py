"""Jobs of a running Ray cluster, submitted to its dashboard over HTTP; Ray itself need not be installed here."""

import hashlib
import json
import os
import secrets
import shlex
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from palestra.errors import PalestraError, UsageError
from palestra.launch.clusters import Ray
from palestra.launch.job import Job, bundle

STATES = {"PENDING": "pending", "RUNNING": "running", "SUCCEEDED": "done", "STOPPED": "stopped", "FAILED": "failed"}
SECONDS = 60.0
"""Of a request."""


class RayTarget:
    """The project is the job's working folder, sent as a package that Ray keeps by its hash."""

    def request(self, job: Job) -> str:
        return json.dumps(self._body(job, bundle(job, "zip"), job.shown), indent=1) + "\n"

    def submit(self, job: Job) -> dict[str, Any]:
        cluster, package = job.cluster, bundle(job, "zip")
        assert isinstance(cluster, Ray)
        body = self._body(job, package, job.hidden)
        name = body["runtime_env"]["working_dir"].partition("://")[2]
        try:
            _call(cluster, "GET", f"/api/packages/gcs/{name}")
        except NotThere:
            _call(cluster, "PUT", f"/api/packages/gcs/{name}", package)
        _call(cluster, "POST", "/api/jobs/", json.dumps(body).encode())
        return {"id": job.label}

    def state(self, record: dict[str, Any]) -> str:
        return STATES[json.loads(_of(record, "GET", ""))["status"]]

    def logs(self, record: dict[str, Any]) -> bytes:
        return json.loads(_of(record, "GET", "/logs"))["logs"].encode()

    def stop(self, record: dict[str, Any]) -> None:
        _of(record, "POST", "/stop")

    def _body(self, job: Job, package: bytes, hidden: Any) -> dict[str, Any]:
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:16]}.zip"
        runtime: dict[str, Any] = {"working_dir": f"gcs://{name}", "env_vars": {**job.env, **hidden}}
        if job.extras:
            package_name = shlex.split(job.install())[-1]
            own = package_name.removeprefix(".")
            runtime["pip"] = [package_name if own == package_name else "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}" + own]
        gpus = {"entrypoint_num_gpus": job.cluster.gpu_count} if job.cluster.gpus else {}
        setup = "".join(f"{line} && " for line in job.cluster.setup)
        entrypoint = f"{setup}{shlex.join(job.command)}"
        return {"submission_id": job.label, "entrypoint": entrypoint, "runtime_env": runtime, **gpus}


class NotThere(PalestraError):
    """What was asked for does not exist there."""


def _of(record: dict[str, Any], method: str, path: str) -> bytes:
    return _call(Ray.model_validate(record["settings"]), method, f"/api/jobs/{record['handle']['id']}{path}")


def _call(cluster: Ray, method: str, path: str, data: bytes | None = None) -> bytes:
    token = _token(cluster)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if method == "POST":
        headers["Content-Type"] = "application/json"
    try:
        with urlopen(
            Request(cluster.address.rstrip("/") + path, data, headers, method=method), timeout=SECONDS
        ) as answer:
            return answer.read()
    except HTTPError as error:
        if error.code == 404:
            raise NotThere(f"Ray at {cluster.address} does not know {path}") from error
        if error.code in (401, 403):
            said = "refused the token" if token else "needs a token: set RAY_AUTH_TOKEN, or `token_env` of the cluster"
            raise PalestraError(f"Ray at {cluster.address} {said}") from error
        lines = error.read().decode(errors="replace").strip().splitlines()
        raise PalestraError(f"Ray at {cluster.address} failed: {lines[-1] if lines else error}") from error
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise PalestraError(
            f"no Ray dashboard answers at {cluster.address} ({reason}): start it, or correct `address`"
        ) from error


def auth_token(*, generate: bool = False) -> tuple[str, str]:
    """The token that Ray's dashboard asks for on this machine and where it is from; made, if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token, "RAY_AUTH_TOKEN"
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if not file.is_file():
        if not generate:
            raise UsageError(f"there is no token: neither RAY_AUTH_TOKEN nor {file}. `--generate` writes one there")
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_hex(32))
    if not (token := file.read_text().strip()):
        raise UsageError(f"{file} is empty: remove it, then `--generate` writes a token there")
    return token, str(file)


def _token(cluster: Ray) -> str | None:
    if cluster.token_env is not None and not os.environ.get(cluster.token_env):
        raise UsageError(f"token_env: {cluster.token_env} is not set: export it with the token of the Ray cluster")
    if token := os.environ.get(cluster.token_env or "RAY_AUTH_TOKEN"):
        return token
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    return file.read_text().strip() if file.is_file() else None
