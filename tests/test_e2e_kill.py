"""A run that is killed again and again and resumed each time ends with the numbers of one that was not."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zygote
from conftest import ENVIRONMENT, SHORT, Scratch, last_step, numbers, wait_until

import palestra
from palestra.runs.checkpoint import load, metas
from palestra.runs.run import new_trial
from palestra.runs.session import state_of
from palestra.spec.model import plain

STEPS = SHORT["train"]["frames"] // 128


def assert_equal_runs(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == list(range(1, len(reference) + 1))  # none missing, none doubled
    for row, expected in zip(rows, reference, strict=True):
        assert json.dumps(row) == json.dumps(expected)  # as text: NaN equals NaN, and every digit counts


def begin(scratch: Scratch, spec: str) -> subprocess.Popen:
    """The first start, or a resume where there is a run."""
    arguments = ["--resume", Path(spec).stem] if list(scratch.path.glob("runs/*/*/trial.json")) else [spec]
    return scratch.start("train", *arguments, "--quiet")


def session_of(scratch: Scratch, process: subprocess.Popen, seed: int = 0) -> Path:
    """The session's folder, once this process or a worker of it owns it."""

    def owned() -> Path | None:
        for lease in scratch.path.glob(f"runs/*/*/sessions/{seed}/lease.json"):
            try:
                owner = json.loads(lease.read_text())["pid"]
                if owner == process.pid or process.pid in map(_pid, psutil.Process(owner).parents()):
                    return lease.parent
            except (FileNotFoundError, psutil.NoSuchProcess):
                continue
        return None

    return wait_until(owned, process)


def _pid(process: psutil.Process) -> int:
    return process.pid


def kill(process: subprocess.Popen) -> None:
    """SIGKILL the process alone, then see that nothing it started outlives it."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"left behind: {alive}"


def kill_at(scratch: Scratch, spec: str, step: int, wait: float, seed: int = 0) -> None:
    """Start or resume, wait for a step's row and then some more, and kill."""
    process = begin(scratch, spec)
    session = session_of(scratch, process, seed)
    wait_until(lambda: last_step(session) >= step, process)
    time.sleep(wait)
    kill(process)
    assert state_of(session) == "killed"


def kill_in_checkpoint(scratch: Scratch, spec: str, step: int) -> None:
    """Start or resume, and kill while a checkpoint at or after that step is being written."""
    process = begin(scratch, spec)
    session = session_of(scratch, process)

    def writing() -> bool:
        names = os.listdir(session / "checkpoints")
        return any(name.startswith(".step_") and ".part-" in name and int(name[6:15]) >= step for name in names)

    wait_until(writing, process, every=0.001)  # it is written within milliseconds
    kill(process)


def finish(scratch: Scratch, spec: str) -> None:
    process = begin(scratch, spec)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err


@pytest.mark.parametrize(
    ("kills", "saving"), [(1, (30,)), pytest.param(7, (30, 33), marks=pytest.mark.slow)], ids=["three", "ten"]
)
def test_run_killed_at_so_many_moments_equals_one_that_was_not(scratch, finished, kills, saving):
    spec, moments = scratch.spec(), random.Random(20)
    process = begin(scratch, spec)
    session = session_of(scratch, process)
    kill(process)  # before there is anything to resume from
    assert not metas(session)
    for i in range(kills):
        kill_at(scratch, spec, 4 * i + moments.randint(1, 3), moments.uniform(0, 0.06))
    for step in saving:
        kill_in_checkpoint(scratch, spec, step)
    finish(scratch, spec)
    assert_equal_runs(scratch.rows(), finished.rows())
    assert state_of(session) == "done"
    assert sorted(os.listdir(session / "checkpoints")) == sorted(os.listdir(finished.session() / "checkpoints"))
    trained, reference = (load(metas(folder)[-1].path).state["algorithm"] for folder in (session, finished.session()))
    weights = reference["policy"]["weights"]
    assert all(torch.equal(trained["policy"]["weights"][name], weights[name]) for name in weights)
    trace = json.loads((session / "trace.json").read_text())
    assert sum(event["name"] == "learn" for event in trace) == STEPS


def test_run_killed_before_its_first_checkpoint_restarts_and_equals(scratch, finished):
    spec = scratch.spec(every={"checkpoint": "5 minutes", "eval": None})
    reference = [{key: value for key, value in row.items() if "eval/" not in key} for row in finished.rows()]
    kill_at(scratch, spec, 10, 0)
    assert not metas(scratch.session())
    finish(scratch, spec)
    rows = [{key: value for key, value in row.items() if "eval/" not in key} for row in scratch.rows()]
    assert_equal_runs(rows, reference)


def test_trial_killed_before_its_first_session_was_made_is_resumed_from_its_own_spec(tmp_path):
    spec = palestra.check({**SHORT, "train": {"frames": 256}, "seed": 3}).spec
    new_trial(tmp_path, "short", seeds=[3], command=[], spec=plain(spec))
    done = palestra.run(resume="short", root=tmp_path, quiet=True)
    assert done.state == "done"
    assert [(row["seed"], row["step"]) for row in done.metrics()] == [(3, 1), (3, 2)]


def test_run_stopped_by_sigterm_then_sigint_saves_exits_130_and_resumes_equal(scratch, finished, monkeypatch):
    spec = scratch.spec(every={"checkpoint": "5 minutes"})
    for number, step in ((signal.SIGTERM, 10), (signal.SIGINT, 22)):
        process = begin(scratch, spec)
        session = session_of(scratch, process)
        wait_until(lambda session=session, step=step: last_step(session) >= step, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "continue with: palestra train --resume " in err
        assert f"runs/short/{scratch.trial().name}" in err
        assert "Traceback" not in err
        assert scratch.status()["state"] == "interrupted"
        assert metas(session)[-1].step == last_step(session)
    monkeypatch.setitem(ENVIRONMENT, zygote.PICTURES, "1")
    process = begin(scratch, spec)
    wait_until((scratch.trial() / "summary.json").exists, process)
    process.send_signal(signal.SIGTERM)  # after the sessions: while it draws
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "palestra: interrupted\n")
    assert not list((scratch.trial() / "plots").iterdir())
    finish(scratch, spec)
    assert (scratch.trial() / "plots" / "learning_curve.png").exists()
    assert_equal_runs(scratch.rows(), finished.rows())


def test_trial_of_two_seeds_killed_leaves_no_orphan_and_equals(scratch, finished, two_seeds):
    spec = scratch.spec(max_session=2)
    kill_at(scratch, spec, 10, 0.02, seed=1)
    finish(scratch, spec)
    assert_equal_trials(scratch, finished, two_seeds)


@pytest.mark.slow
def test_trial_of_two_seeds_killed_and_stopped_equals(scratch, finished, two_seeds):
    spec, moments = scratch.spec(max_session=2), random.Random(2)
    for i in range(3):
        kill_at(scratch, spec, 6 * i + moments.randint(1, 5), moments.uniform(0, 0.06), seed=i % 2)
    process = begin(scratch, spec)
    session = session_of(scratch, process, seed=1)
    wait_until(lambda: last_step(session) >= 25, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert {scratch.status(seed=seed)["state"] for seed in (0, 1)} <= {"interrupted", "done"}
    finish(scratch, spec)
    assert_equal_trials(scratch, finished, two_seeds)


def assert_equal_trials(scratch: Scratch, finished: Scratch, two_seeds: Scratch) -> None:
    assert_equal_runs(scratch.rows(seed=0), finished.rows())  # a trial's session is the run of its seed
    assert_equal_runs(scratch.rows(seed=1), two_seeds.rows(seed=1))
    summaries = [json.loads((one.trial() / "summary.json").read_text()) for one in (scratch, two_seeds)]
    assert summaries[0] == summaries[1]


@pytest.fixture
def reference_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reference")


FAMILIES: dict[str, dict[str, Any]] = {
    "replayed": {"env": {"id": "LunarLander-v3", "num_envs": 2}},
    "continuous": {"env": {"id": "Pendulum-v1", "num_envs": 2}},
    "mujoco": {"env": {"id": "Hopper-v5", "num_envs": 2}},
    "processes": {"env": {"id": "Acrobot-v1", "num_envs": 2, "vectorize": "async"}},
    "compiled": {"env": {"id": "CartPole-v1", "num_envs": 2}, "train": {"frames": 64 * 30, "compile": "on"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_run_of_another_family_killed_three_times_equals_one_that_was_not(scratch, reference_root, family):
    if family == "replayed":
        pytest.importorskip("Box2D", reason="needs Box2D: see CONTRIBUTING.md")
    changes = {"train": {"frames": 64 * 30}, "eval": {"episodes": 2, "num_envs": 2}, **FAMILIES[family]}
    spec = scratch.spec(**changes)
    reference = numbers(palestra.run(scratch.path / spec, root=reference_root, quiet=True).sessions[0].path)
    moments = random.Random(family)
    for i in range(3):
        kill_at(scratch, spec, 9 * i + moments.randint(1, 8), moments.uniform(0, 0.05))
    finish(scratch, spec)
    assert_equal_runs(scratch.rows(), reference)


def test_ctrl_c_with_environments_in_processes_saves_exits_130_and_resumes_equal(scratch, reference_root):
    changes = {
        "env": {"id": "CartPole-v1", "num_envs": 2, "vectorize": "async"},
        "train": {"frames": 64 * 20},
        "eval": {"episodes": 2, "num_envs": 1},
        "every": {"checkpoint": "5 minutes", "eval": None},
    }
    spec = scratch.spec(**changes)
    reference = numbers(palestra.run(scratch.path / spec, root=reference_root, quiet=True).sessions[0].path)
    process = begin(scratch, spec)
    session = session_of(scratch, process)
    wait_until(lambda: last_step(session) >= 5, process)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the environments' processes get it too
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert len(family) >= 3
    assert not psutil.wait_procs(family, timeout=10)[1]
    finish(scratch, spec)
    assert_equal_runs(scratch.rows(), reference)
