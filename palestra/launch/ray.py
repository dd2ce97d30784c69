"""Jobs of a running Ray cluster, submitted to its dashboard over HTTP; Ray itself need not be installed here."""

import hashlib
import json
import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from pydantic import Field

from palestra.errors import PalestraError, UsageError
from palestra.launch.clusters import Cluster, Record, Variable, state_of
from palestra.launch.job import Job, bundle
from palestra.spec.words import Words

SECONDS = 60.0
"""Of a request."""


class NotThere(PalestraError):
    """What was asked for does not exist there."""


class Ray(Cluster):
    """The project is the job's working folder, sent as a package that Ray keeps by its hash."""

    address: Annotated[str, Words("http://HOST:PORT")] = Field(default="http://127.0.0.1:8265", pattern=r"^https?://")
    """The dashboard."""
    token_env: Variable | None = None
    """Environment variable with the cluster's token; null: RAY_AUTH_TOKEN, else ~/.ray/auth_token, else none."""
    temp_dir: str | None = None
    """Ray's folder for sockets and logs of clusters that the job itself starts."""

    def variables(self) -> dict[str, str]:
        return super().variables() | ({"RAY_TMPDIR": self.temp_dir} if self.temp_dir else {})

    def request(self, job: Job) -> str:
        return json.dumps(_body(job, bundle(job, "zip"), job.shown), indent=1) + "\n"

    def submit(self, job: Job) -> Record:
        package = bundle(job, "zip")
        body = _body(job, package, job.hidden)
        path = f"/api/packages/{body['runtime_env']['working_dir'].replace('://', '/')}"
        try:
            self._call("GET", path)
        except NotThere:
            self._call("PUT", path, package)
        self._call("POST", "/api/jobs/", json.dumps(body).encode())
        return {"id": job.label}

    def state(self, record: Record) -> str:
        return state_of(json.loads(self._call("GET", f"/api/jobs/{record['handle']['id']}"))["status"])

    def logs(self, record: Record) -> bytes:
        return json.loads(self._call("GET", f"/api/jobs/{record['handle']['id']}/logs"))["logs"].encode()

    def stop(self, record: Record) -> None:
        self._call("POST", f"/api/jobs/{record['handle']['id']}/stop")

    def _call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        token = self._token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= {"Content-Type": "application/json"} if method == "POST" else {}
        request = Request(self.address.rstrip("/") + path, data, headers, method=method)
        try:
            with urlopen(request, timeout=SECONDS) as answer:
                return answer.read()
        except HTTPError as error:
            if error.code == 404:
                raise NotThere(f"Ray at {self.address} does not know {path}") from error
            lines = error.read().decode(errors="replace").strip().splitlines()
            said = f"failed: {lines[-1] if lines else error}"
            if error.code in (401, 403):
                need = "needs a token: set RAY_AUTH_TOKEN, or `token_env` of the cluster"
                said = "refused the token: set the one of the cluster" if token else need
            raise PalestraError(f"Ray at {self.address} {said}") from error
        except (URLError, OSError) as error:
            reason = f"({getattr(error, 'reason', error)}): start it, or correct `address`"
            raise PalestraError(f"no Ray dashboard answers at {self.address} {reason}") from error

    def _token(self) -> str | None:
        if self.token_env is not None and not os.environ.get(self.token_env):
            raise UsageError(f"token_env: {self.token_env} is not set: export it with the token of the Ray cluster")
        token, file = os.environ.get(self.token_env or "RAY_AUTH_TOKEN"), _token_file()
        return token or (file.read_text().strip() if file.is_file() else None)


def _body(job: Job, package: bytes, hidden: Mapping[str, str]) -> dict[str, Any]:
    name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:16]}.zip"
    runtime: dict[str, Any] = {"working_dir": f"gcs://{name}", "env_vars": {**job.env, **hidden}}
    if job.extras:  # a path of the project begins where Ray unpacks it
        needed = shlex.split(job.install())[-1]
        runtime["pip"] = [
            needed.replace(".", "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}", 1) if needed[0] == "." else needed
        ]
    gpus = {"entrypoint_num_gpus": job.cluster.gpu_count} if job.cluster.gpus else {}
    return {"submission_id": job.label, "entrypoint": job.entrypoint, "runtime_env": runtime, **gpus}


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()


def auth_token(*, generate: bool = False) -> tuple[str, str]:
    """The token that Ray's dashboard asks for on this machine and where it is from; made, if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token, "RAY_AUTH_TOKEN"
    file = _token_file()
    if not file.is_file():
        if not generate:
            raise UsageError(f"there is no token: neither RAY_AUTH_TOKEN nor {file}. `--generate` writes one there")
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_hex(32))
    if not (token := file.read_text().strip()):
        raise UsageError(f"{file} is empty: remove it, then `--generate` writes a token there")
    return token, str(file)
