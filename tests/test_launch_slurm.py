"""Jobs of a real Slurm: one node, arrays of seeds and of a sweep, two nodes joined by Ray, preemption and requeue."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from conftest import SHORT, numbers
from slurm_cluster import slurm_cluster

import palestra
from palestra.launch.clusters import open_cluster
from palestra.launch.job import plan
from palestra.launch.log import FINAL, JobLog
from palestra.runs.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = {**SHORT, "train": {"frames": 8 * 128}}
LONG = {**SHORT, "train": {"frames": 300 * 128}, "every": {"checkpoint": ["30 steps"], "eval": "150 steps"}}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def log(slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    return JobLog(str(tmp_path / "log"))


def launched(log: JobLog, spec: dict, name: str, array: int = 0, **settings) -> dict:
    Path(f"{name}.yaml").write_text(json.dumps(spec))
    job, record, diff = plan(f"{name}.yaml", open_cluster("slurm", None, settings), name=name, array=array)
    return log.launch(job, record, diff)


def until(log: JobLog, name: str, *states: str) -> dict:
    end = time.monotonic() + 500
    while (record := log.refreshed(log.get(name)))["state"] not in states:
        assert time.monotonic() < end, record
        time.sleep(0.3)
    return record


def output(log: JobLog, name: str) -> str:
    return "".join(path.read_text() for path in Path(log.get(name)["home"]).glob("log*.txt"))


def test_job_on_one_node_ends_as_the_same_run_here(log):
    launched(log, SMALL, "one")
    record = until(log, "one", *FINAL)
    assert record["state"] == "done", output(log, "one")
    here = palestra.run(SMALL, root="here", quiet=True)
    assert numbers(Run(record["results"]).session(0)) == numbers(here.session(0))


def test_array_of_seeds_trains_each(log):
    launched(log, {**SMALL, "seed": 5}, "seeds", array=3)
    assert until(log, "seeds", *FINAL)["state"] == "done", output(log, "seeds")
    runs = sorted(Path("runs/short").glob("*-*-*"))
    assert [Run(run).seeds for run in runs] == [[5], [6], [7]]
    assert [Run(run).state for run in runs] == ["done"] * 3


def test_array_over_a_sweep_runs_each_point_once(log):
    sweep = {"axes": {"lr": {"values": [1e-4, 1e-3], "of": ["algorithm.lr"]}}}
    launched(log, {**SMALL, "sweep": sweep}, "points", array=2)
    assert until(log, "points", *FINAL)["state"] == "done", output(log, "points")
    runs = [Run(path.parent) for path in Path("runs/points").glob("*/trial.json")]
    assert sorted(run.spec["algorithm"]["lr"] for run in runs) == [1e-4, 1e-3]
    assert all(run.state == "done" for run in runs)


def test_two_nodes_are_one_ray_cluster(log):
    pytest.importorskip("ray")
    launched(log, {**SMALL, "max_session": 2, "threads": 2}, "two", nodes=2)  # a seed takes a whole node
    record = until(log, "two", *FINAL)
    assert record["state"] == "done", output(log, "two")
    assert [session.seed for session in Run(record["results"]).sessions] == [0, 1]


def test_preempted_job_saves_is_requeued_and_continues_to_the_same_rows(log):
    launched(log, LONG, "low", cpus=2)
    folder = Path(log.get("low")["results"])
    end = time.monotonic() + 120
    while not list(folder.glob("sessions/0/checkpoints/step_*/meta.json")):
        assert time.monotonic() < end, output(log, "low")
        time.sleep(0.1)
    command = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 2"]
    subprocess.run(command, check=True, env=os.environ, capture_output=True)
    until(log, "low", "pending")
    start = ["scontrol", "update", f"jobid={log.get('low')['handle']['id']}", "starttime=now"]  # else in two minutes
    subprocess.run(start, check=True, capture_output=True)
    record = until(log, "low", *FINAL)
    assert record["state"] == "done", output(log, "low")
    said = (folder / "sessions/0/log.txt").read_text()
    assert "resumed at step" in said
    whole = palestra.run(LONG, root="here", quiet=True)
    assert numbers(folder / "sessions/0") == numbers(whole.session(0))


def test_stopped_job_has_saved_and_continues_on_retry(log):
    launched(log, LONG, "stopped", cpus=2)
    folder = Path(log.get("stopped")["results"])
    end = time.monotonic() + 120
    while not list(folder.glob("sessions/0/checkpoints/step_*/meta.json")):
        assert time.monotonic() < end, output(log, "stopped")
        time.sleep(0.1)
    log.stop("stopped")
    assert until(log, "stopped", *FINAL)["state"] == "stopped", output(log, "stopped")
    assert Run(folder).state == "interrupted"
    log.retry("stopped")
    record = until(log, "stopped", *FINAL)
    assert (record["state"], record["attempts"], Run(folder).state) == ("done", 2, "done"), output(log, "stopped")
