"""Whole sweeps: real runs in real processes, shared, killed, failed and gone on with, and what is left of them."""

import csv
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Scratch, last_step, numbers, wait_until
from tiny_lm import EXPERTS, Lab

from palestra.errors import UsageError
from palestra.runs.run import Run, list_runs, open_run
from palestra.sweep.results import comparison, roles
from palestra.sweep.run import TargetsFailed, plan, sweep

AXES: dict[str, Any] = {
    "experts": {"values": ["swiglu", "bilinear"], "of": ["model.shape.moe.activation"]},
    "lr": {"multiply": [0.5, 2], "of": ["optim.lr"]},
}


def states(folder: Path) -> dict[str, tuple[str, int]]:
    found = [path for path in (folder / "claims").glob("*.json") if not path.name.endswith(".lease.json")]
    told = {path.stem: json.loads(path.read_text()) for path in found}
    return {name: (one["state"], one["tries"]) for name, one in told.items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four mixtures of experts, two seeds at a time; only to be read."""
    folder = tmp_path_factory.mktemp("sweep")
    lab = Lab(folder)
    spec = lab.spec("pretrain", train__steps=4, model__shape__moe=EXPERTS, sweep={"axes": AXES}, every__eval=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_CACHE", str(folder / "cache"))
        sweep(plan(spec, root=lab.root, group="experts"), quiet=True)
        again = sweep(plan(spec, root=lab.root, group="experts"), quiet=True)
    assert len(again["runs"]) == 4
    return lab.root / "experts"


def test_sweep_done_has_run_everything_once_and_the_second_call_nothing(done):
    assert Counter(states(done).values()) == {("done", 1): 4}


def test_runs_of_a_sweep_are_runs_like_any_other(done):
    found = list_runs(done.parent)

    assert {run.name for run in found} == {"experts"}
    for run in found:
        assert open_run(f"experts/{run.id}", done.parent).path == run.path
        assert run.state == "done"
        assert run.spec["name"] == run.id
        assert run.spec["track"]["project"] == "experts"
        assert run.spec["sweep"] is None


def test_summary_of_a_sweep_has_the_scores_of_its_runs_and_names_the_best(done):
    summary = json.loads((done / "summary.json").read_text())
    scores = {row["run"]: row["score"] for row in summary["runs"]}

    assert scores == {run.id: run.metrics()[-1]["eval/loss"] for run in list_runs(done.parent)}
    assert summary["best"] == min(scores, key=lambda name: scores[name])
    with (done / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["experts"], row["lr"]) for row in rows} == {
        (e, x) for e in ("swiglu", "bilinear") for x in ("0.5", "2")
    }
    assert {row["run"]: float(row["eval/loss"]) for row in rows} == scores


def test_settings_of_a_sweep_reach_its_runs(done):
    for run in list_runs(done.parent):
        at = json.loads((run.path / "point.json").read_text())["at"]
        assert run.spec["model"]["shape"]["moe"]["activation"] == at["experts"]
        assert run.spec["optim"]["lr"] == 3e-3 * at["lr"]


def test_comparison_of_a_sweep_is_drawn(done):
    assert (done / "plots" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (done / "plots" / "comparison.svg").stat().st_size > 1000


def test_roles_put_numbers_along_and_the_shortest_axis_in_colour():
    assert roles({"size": ["s", "m", "l"], "experts": ["a", "b"], "lr": [0.5, 2]}) == ("lr", "experts", ["size"])
    assert roles({"size": ["s", "m"], "experts": ["a", "b"], "lr": [0.5, 2]}) == ("lr", "experts", ["size"])
    assert roles({"experts": ["a", "b"]}) == ("experts", None, [])


def test_comparison_of_runs_without_scores_draws_nothing(tmp_path):
    rows = [{"run": name, "at": {"x": name}, "score": None, "by_seed": {}} for name in "ab"]

    assert comparison({"runs": rows, "metric": "eval/loss"}, tmp_path / "c") == []


def test_run_that_fails_leaves_the_others_and_is_tried_again(tmp_path, monkeypatch):
    """A file of data that is missing for one run, and there the second time."""
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    lab = Lab(tmp_path)
    paths = [str(tmp_path / "absent.jsonl"), str(tmp_path / "text.jsonl")]
    axes = {"data": {"values": paths, "of": ["data.train.text.path"]}}
    spec = lab.spec("pretrain", train__steps=2, sweep={"axes": axes})
    planned = plan(spec, root=lab.root, group="g")
    with pytest.raises(TargetsFailed, match="1 of 2 failed"):
        sweep(planned, quiet=True)
    assert sorted(states(planned.folder).values()) == [("done", 1), ("failed", 1)]

    (tmp_path / "absent.jsonl").write_bytes((tmp_path / "other.jsonl").read_bytes())
    sweep(planned, quiet=True)

    assert sorted(states(planned.folder).values()) == [("done", 1), ("done", 2)]


def test_spec_without_a_sweep_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has no block 'sweep'"):
        plan(Lab(tmp_path).spec("pretrain"))


def test_sweep_that_is_stopped_advises_the_command_that_resumes_it(scratch: Scratch):
    spec = scratch.spec(sweep={"axes": {"seed": [0, 1]}, "group": "g"})
    running = scratch.start("sweep", spec, "--quiet")
    session = wait_until(lambda: next(scratch.path.glob("runs/g/seed0-*/sessions/0"), None), running)
    wait_until(lambda: last_step(session) > 2, running)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "the same command resumes it" in said
    assert "palestra train" not in said


@pytest.mark.slow
def test_sweep_command_shared_by_two_processes_of_which_one_is_killed_runs_each_once(scratch: Scratch):
    """The killed process's run goes on where it was and ends with the numbers of a run that nobody interrupted."""
    spec = scratch.spec(sweep={"axes": {"seed": [0, 1]}, "group": "g"}, train={"frames": 66 * 128})
    plan_ = scratch("sweep", "--plan", spec)
    assert plan_.returncode == 0, plan_.stderr
    assert "2 runs in" in plan_.stdout
    assert "frames" in plan_.stdout
    assert not (scratch.path / "runs").exists()

    first = scratch.start("sweep", spec, "--quiet")
    session = wait_until(lambda: next(scratch.path.glob("runs/g/seed0-*/sessions/0"), None), first)
    wait_until(lambda: last_step(session) > 10, first)
    second = scratch.start("sweep", spec, "--quiet")
    wait_until(lambda: next(scratch.path.glob("runs/g/seed1-*/sessions/1/metrics.jsonl"), None), second)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    out, err = second.communicate(timeout=240)

    assert second.returncode == 0, err
    assert "seed1-" in out
    folder = scratch.path / "runs" / "g"
    assert list(states(folder).values()) == [("done", 1), ("done", 1)]
    assert {Run(path.parent).state for path in folder.glob("*/trial.json")} == {"done"}
    whole = scratch.here("train", spec, "seed=0", "--runs", "whole", "--quiet")
    assert whole.returncode == 0, whole.stderr
    (uninterrupted,) = scratch.path.glob("whole/*/*/sessions/0")
    assert numbers(session) == numbers(uninterrupted)


@pytest.mark.slow
def test_sweep_command_with_workers_in_parallel_runs_each_once(scratch: Scratch):
    spec = scratch.spec(sweep={"axes": {"seed": [0, 1, 2]}, "group": "g"}, train={"frames": 10 * 128})
    done = scratch("sweep", spec, "--quiet", "--parallel", "2")

    assert done.returncode == 0, done.stderr
    assert list(states(scratch.path / "runs" / "g").values()) == [("done", 1)] * 3
    owners = {
        json.loads(path.read_text())["owner"]["pid"]
        for path in (scratch.path / "runs/g/claims").glob("*.json")
        if not path.name.endswith(".lease.json")
    }
    assert len(owners) == 2
