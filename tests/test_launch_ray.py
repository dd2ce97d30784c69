"""Jobs submitted to the dashboard of a real Ray cluster that wants a token."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SHORT, numbers
from zygote import ENVIRONMENT

import palestra
from palestra.errors import PalestraError, UsageError
from palestra.launch.clusters import cluster_of, open_cluster
from palestra.launch.job import plan
from palestra.launch.log import FINAL, JobLog
from palestra.runs.run import Run

pytest.importorskip("ray", reason="the extra ray is not installed")
pytest.importorskip("aiohttp_cors", reason="Ray's dashboard is not installed: pip install 'ray[default]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SMALL = {**SHORT, "train": {"frames": 4 * 128}}
TOKEN = "0123456789abcdef0123456789abcdef"
ROOT = Path(palestra.__file__).parents[1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def dashboard():
    """A head with a dashboard, in a folder of a short path."""
    port, gcs = free_port(), free_port()
    env = {**ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
    env |= {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--port={gcs}",
        "--num-cpus=2",
    ]
    command += [
        "--include-dashboard=true",
        f"--dashboard-port={port}",
        "--disable-usage-stats",
        "--temp-dir=/tmp/pl-ray",
    ]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "Ray did not start"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture
def project(tmp_path, monkeypatch, dashboard):
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_AUTH_TOKEN", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLUSTER_TOKEN", TOKEN)
    Path("small.yaml").write_text(json.dumps(SMALL))
    Path("clusters").mkdir()
    Path("clusters/ray.yaml").write_text(
        f"on: ray\naddress: {dashboard}\ntoken_env: CLUSTER_TOKEN\nsync: {tmp_path}/place\n"
    )
    Path(".gitignore").write_text("*\n!small.yaml\n")
    subprocess.run(["git", "init", "-q"], check=True)
    return tmp_path


def launched(log: JobLog, name: str, *overrides: str) -> dict:
    job, record, diff = plan("small.yaml", open_cluster(None, "ray", {}), name=name, overrides=overrides)
    return log.launch(job, record, diff)


def until(log: JobLog, name: str, *states: str) -> dict:
    end = time.monotonic() + 300
    while (record := log.refreshed(log.get(name)))["state"] not in states:
        assert time.monotonic() < end, record
        time.sleep(0.5)
    return record


def test_job_runs_there_and_its_results_come_by_the_place(project):
    log = JobLog(str(project / "log"))
    launched(log, "one")
    record = until(log, "one", *FINAL)
    said = cluster_of(record).logs(record).decode()
    assert record["state"] == "done", said
    assert "run folder" in said
    there = Run(project / "place" / record["run"])
    here = palestra.run(SMALL, root=project / "here", quiet=True)
    assert numbers(there.session(0)) == numbers(here.session(0))


def test_job_that_is_stopped_has_synced_and_continues_on_retry(project):
    log = JobLog(str(project / "log"))
    record = launched(log, "long", "train.frames=256000", "every.checkpoint=2 steps")
    until(log, "long", "running")
    trial = project / "place" / record["run"]
    while not list(trial.glob("sessions/0/checkpoints/step_*/meta.json")):
        time.sleep(0.5)
    log.stop("long")
    assert until(log, "long", *FINAL)["state"] == "stopped"
    assert log.retry("long")["handle"]["id"] == "long-2"
    until(log, "long", "running")
    log.stop("long")
    until(log, "long", *FINAL)


def test_wrong_token_is_refused_and_none_is_asked_for(project, monkeypatch):
    log = JobLog(str(project / "log"))
    monkeypatch.setenv("CLUSTER_TOKEN", "f" * 32)
    with pytest.raises(PalestraError, match=r"Ray at http://127.0.0.1:\d+ refused the token"):
        launched(log, "wrong")
    assert log.get("wrong")["state"] == "failed"
    monkeypatch.delenv("CLUSTER_TOKEN")
    with pytest.raises(UsageError, match="token_env: CLUSTER_TOKEN is not set"):
        launched(log, "none")


def test_cluster_that_does_not_answer_is_said(project):
    Path("clusters/ray.yaml").write_text(f"on: ray\naddress: http://127.0.0.1:{free_port()}\nsync: {project}/place\n")
    with pytest.raises(PalestraError, match="no Ray dashboard answers at"):
        launched(JobLog(str(project / "log")), "nobody")
