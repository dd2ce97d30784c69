"""What goes wrong ends with the right exit code, a message a person can act on, and an intact run folder."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Scratch, last_step, wait_until

import palestra
from palestra.control.episodes import NotFinite
from palestra.errors import UsageError
from palestra.runs.checkpoint import load, metas

FAULTY = {
    "kind": "control",
    "env": {"id": "Faulty-v0", "module": "envs", "num_envs": 1},
    "algorithm": {"name": "ppo", "horizon": 64, "minibatch": 64, "epochs": 1},
    "net": {"hidden": [8]},
    "train": {"frames": 64 * 20},
    "eval": {"episodes": 2, "num_envs": 2},
    "every": {"checkpoint": "3 steps", "eval": None},
}


def assert_refused(result: subprocess.CompletedProcess, scratch: Scratch, *said: str) -> None:
    """Exit code 2, one paragraph that says all of it, and no run folder."""
    assert result.returncode == 2, result.stderr
    for text in said:
        assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not (scratch.path / "runs").exists()


def assert_failed(scratch: Scratch, result: subprocess.CompletedProcess, *said: str, step: int, seed: int = 0) -> None:
    """Exit code 1, a paragraph, a status with the traceback, and the checkpoint of `step` loadable."""
    assert result.returncode == 1, result.stderr
    status = scratch.status("faulty", seed)
    assert status["state"] == "failed"
    assert "Traceback" in status["traceback"]
    assert "Traceback" not in result.stderr
    for text in said:
        assert text in result.stderr
        assert text in status["reason"]
    assert load(scratch.session("faulty", seed) / f"checkpoints/step_{step:09d}").step == step


# ---- specs


def test_spec_with_unknown_key_and_wrong_type_and_missing_variable_is_refused_with_each_place(scratch):
    path = scratch.path / "bad.yaml"
    path.write_text(
        "kind: control\n"
        "env: {id: CartPole-v1}\n"
        "algorithm:\n"
        "  name: ppo\n"
        "  leaning_rate: 1e-3\n"
        "  horizon: many\n"
        "train: {framse: 100}\n"
    )
    result = scratch.here("train", "bad.yaml")
    assert_refused(result, scratch, "bad.yaml:5", "leaning_rate", "bad.yaml:6", "many", "bad.yaml:7", "frames")
    path.write_text("kind: control\nenv: {id: '${game}-v1'}\nalgorithm: {name: ppo}\ntrain: {frames: 100}\n")
    assert_refused(scratch.here("train", "bad.yaml"), scratch, "bad.yaml:2", "game", "-s game=")


def test_spec_that_extends_itself_through_another_is_refused_with_the_way_round_and_with_debug_a_traceback(scratch):
    (scratch.path / "a.yaml").write_text("extends: b.yaml\n")
    (scratch.path / "b.yaml").write_text("extends: a.yaml\n")
    assert_refused(scratch.here("train", "a.yaml"), scratch, "a.yaml", "b.yaml", "extends")
    result = scratch.here("--debug", "train", "a.yaml")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_environment_that_does_not_exist_is_refused_with_a_near_one(scratch):
    spec = scratch.spec(env={"id": "CartPol-v1"})
    assert_refused(scratch.here("train", spec), scratch, "env.id", "CartPol-v1", "Did you mean: `CartPole`")


def test_environment_without_its_extra_is_refused_with_what_to_install(scratch, monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)  # whose import then fails
    result = scratch.here("train", scratch.spec(env={"id": "ALE/Pong-v5"}))
    assert_refused(result, scratch, "pip install 'palestra[atari]'")


def test_training_without_its_extra_is_refused_with_what_to_install(scratch):
    (scratch.path / "absent").mkdir()
    absent = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    (scratch.path / "absent" / "torch.py").write_text(absent)  # found before the installed one
    result = scratch("train", scratch.spec(), PYTHONPATH=str(scratch.path / "absent"))
    assert_refused(result, scratch, "pip install 'palestra[train]'")


def test_hook_and_environment_modules_that_do_not_exist_are_refused(scratch):
    spec = scratch.spec(hooks=["no_such_module:hook"])
    assert_refused(scratch.here("train", spec), scratch, "hooks: no_such_module cannot be imported", str(scratch.path))
    spec = scratch.path / scratch.spec(env={"module": "no_such_module"})
    with pytest.raises(UsageError, match=r"env\.module: no_such_module cannot be imported from"):
        palestra.run(spec, root=scratch.path / "runs", quiet=True)


# ---- environments and hooks that fail


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "Faulty-v0 raised ValueError in vector step 1000"),
        ("nan_reward", "Faulty-v0 returned a reward of nan"),
    ],
)
def test_environment_that_fails_in_step_1000_fails_the_run_which_resumes_once_it_is_fixed(scratch, fault, said):
    broken = scratch.path / "broken"
    broken.touch()
    kwargs = {"at": 1000, "fault": fault, "while_there": str(broken)}
    result = scratch("train", scratch.spec("faulty", FAULTY, env={"kwargs": kwargs}))
    assert_failed(scratch, result, said, "vector step 1000", step=15)
    assert scratch("runs").stdout.count("failed") == 1
    broken.unlink()
    result = scratch("train", "--resume", "faulty")
    assert result.returncode == 0, result.stderr
    assert [row["step"] for row in scratch.rows("faulty")] == list(range(1, 21))
    assert scratch.status("faulty")["state"] == "done"


def test_environment_that_fails_in_a_process_of_its_own_fails_the_run_and_leaves_no_process(scratch):
    env = {"vectorize": "async", "num_envs": 2, "kwargs": {"at": 500}}
    process = scratch.start("train", scratch.spec("faulty", FAULTY, env=env))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("palestra: Faulty-v0 raised ValueError in vector step 500")
    assert scratch.status("faulty")["state"] == "failed"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(("fault", "at"), [("nan_obs", 990), ("nan_obs", 1024), ("nan_final", 1000)])
def test_observation_of_nan_anywhere_is_not_learned_from(tmp_path, fault, at):
    env = {**FAULTY["env"], "kwargs": {"at": at, "fault": fault}}
    with pytest.raises(NotFinite, match=rf"observation of nan in environment 0 at vector step {at} "):
        palestra.run({**FAULTY, "name": "faulty", "env": env}, root=tmp_path, quiet=True)
    run = palestra.open_run("faulty", tmp_path)
    assert run.state == "failed"
    assert run.metrics()[-1]["step"] == 15


def test_hook_that_fails_in_one_session_of_two_says_which_and_resumes_once_it_is_fixed(scratch):
    hooks = scratch.path / "my_hooks.py"
    hooks.write_text(
        "def strict(moment):\n    if moment.folder.name == '1' and moment.step == 5:\n        raise ValueError('no')\n"
    )
    spec = scratch.spec("faulty", FAULTY, max_session=2, hooks=["my_hooks:strict"])
    result = scratch("train", spec)
    assert "1 of 2 sessions failed" in result.stderr
    assert_failed(scratch, result, "the hook my_hooks:strict raised ValueError at step 5: no", step=3, seed=1)
    assert "seed 1: " in result.stderr
    assert scratch.status("faulty", 0)["state"] == "done"
    hooks.write_text("def strict(moment):\n    pass\n")
    before = (scratch.session("faulty", 0) / "status.json").read_bytes()
    result = scratch("train", "--resume", "faulty")
    assert result.returncode == 0, result.stderr
    assert last_step(scratch.session("faulty", 1)) == 20
    assert (scratch.session("faulty", 0) / "status.json").read_bytes() == before  # it was done


# ---- disks


@pytest.fixture
def disk(scratch: Scratch) -> Iterator[Path]:
    """A very small disk for the runs."""
    path = scratch.path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("needs the right to mount")
    yield path
    scratch.end()
    subprocess.run(["umount", path], check=True)


def test_disk_full_at_a_checkpoint_fails_the_run_which_resumes_once_there_is_room(scratch, disk):
    spec = scratch.spec("faulty", FAULTY, net={"hidden": [64, 64]}, every={"checkpoint": "1 steps"})
    result = scratch("train", spec, "--runs", "disk")
    assert result.returncode == 1, result.stderr
    assert "No space left on device" in result.stderr
    assert "resume" in result.stderr
    assert "Traceback" not in result.stderr
    (session,) = disk.glob("faulty/*/sessions/0")
    kept = metas(session)
    assert 0 < len(kept) < 20
    assert all(load(meta.path).step == meta.step for meta in kept)
    subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
    result = scratch("train", "--resume", "faulty", "--runs", "disk")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (session / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))


def test_file_size_limit_at_a_checkpoint_fails_the_run_with_the_place(scratch):
    spec = scratch.spec("faulty", FAULTY, net={"hidden": [256, 256]})  # a checkpoint of more than a megabyte
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    result = scratch("train", spec, before=limit)
    assert result.returncode == 1, result.stderr
    assert "could not write the checkpoint" in result.stderr
    assert "File too large" in result.stderr
    assert "step_000000003" in result.stderr
    assert scratch.status("faulty")["state"] == "failed"
    assert os.listdir(scratch.session("faulty") / "checkpoints") == []
    palestra.run(resume="faulty", root=scratch.path / "runs", quiet=True)
    assert [row["step"] for row in scratch.rows("faulty")] == list(range(1, 21))


def test_run_folder_that_cannot_be_written_is_a_clear_error(scratch, disk):
    spec = scratch.spec()
    (scratch.path / "file").touch()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for place, why in (("file", "Not a directory"), ("disk", "Read-only file system")):
        result = scratch("train", spec, "--runs", place)
        assert result.returncode == 1
        assert f"cannot write the run folder {place}" in result.stderr
        assert why in result.stderr
        assert "Traceback" not in result.stderr
    assert os.listdir(disk) == []


# ---- resuming


def test_second_process_on_a_run_folder_is_refused_with_the_pid_and_changes_nothing(scratch):
    process = scratch.start("train", scratch.spec(train={"frames": 10**7}), "--quiet")
    wait_until(lambda: list(scratch.path.glob("runs/short/*/sessions/0/metrics.jsonl")), process)
    identity = [(scratch.session() / name).read_bytes() for name in ("manifest.json", "spec.yaml")]
    result = scratch("train", "--resume", "short", "train.frames=1e6", "--allow", "train.frames")
    assert result.returncode == 2, result.stderr
    assert f"in use by process {process.pid}" in result.stderr
    assert process.poll() is None
    assert [(scratch.session() / name).read_bytes() for name in ("manifest.json", "spec.yaml")] == identity
    assert scratch.status()["state"] == "running"
    assert scratch.status()["pid"] == process.pid


def test_changed_spec_is_refused_unless_allowed_and_a_damaged_checkpoint_is_skipped(scratch, finished):
    shutil.copytree(finished.path / "runs", scratch.path / "runs")
    more = "train.frames=5120"  # 40 steps instead of 36
    result = scratch("train", "--resume", "short", more, "algorithm.lr=1e-3", "--allow", "train")
    assert result.returncode == 2
    assert "algorithm.lr: 0.0003 → 0.001" in result.stderr
    assert "--allow algorithm.lr" in result.stderr
    assert "train.frames" not in result.stderr

    newest = metas(scratch.session())[-1]
    assert newest.step == 36
    weights = newest.path / "state/arrays.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    result = scratch("train", "--resume", "short", more, "--allow", "train.frames")
    assert result.returncode == 0, result.stderr
    assert f"checkpoint {newest.path} is damaged" in result.stderr
    rows = scratch.rows()
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert rows[:35] == finished.rows()[:35]
    manifest = json.loads((scratch.session() / "manifest.json").read_text())
    assert manifest["spec"]["train"]["frames"] == 5120
    assert manifest["before"]["spec"]["train"]["frames"] == 36 * 128
