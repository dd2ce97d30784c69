"""Post-training that is killed or stopped: no prompt is lost, none is trained twice, synchronous runs end equal."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import fast_only, last_step, wait_until
from posttrain_lab import TASK, Lab, assert_equal_runs, letters, rollouts_of, rows_of, session_of
from posttrain_tasks import Signalling

import palestra
from palestra.errors import Interrupted
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.checkpoint import metas
from palestra.runs.run import Run, open_run
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.tasks.stream import Prompts
from palestra.tasks.task import make_task

# Forked from a process that has imported torch already: a new one would take seconds to start.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["palestra.kinds.posttrain", "torch._dynamo", "pytest"])

BATCH = 4


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_LAB", str(tmp_path))
    Signalling.judged = 0


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def train(path: str, environment: dict[str, str], changes: dict[str, Any], resume: str | None) -> None:
    """Train or resume in a process of its own."""
    os.environ.update(environment)
    lab = Lab(Path(path))
    lab.run(**changes) if resume is None else lab.resume(resume)


def start(lab: Lab, changes: dict[str, Any], resume: str | None = None) -> Any:
    environment = {"PALESTRA_LAB": str(lab.path), "OMP_NUM_THREADS": "1"}
    process = PROCESSES.Process(target=train, args=(str(lab.path), environment, changes, resume))
    process.start()
    return process


def moved(lab: Lab, name: str, before: int) -> int | None:
    """The step it is at now, if it has made one since."""
    found = list((lab.root / name).glob("*/sessions/0"))
    now = last_step(found[0]) if found else 0
    return now if now > before else None


def kill_at_random(lab: Lab, changes: dict[str, Any], draws: random.Random, kills: int) -> Run:
    """Train, killed so many times at random moments and resumed after each, then to the end."""
    name = changes["name"]
    process, hit = start(lab, changes), 0
    for _ in range(kills):
        deadline = time.monotonic() + 120
        time.sleep(draws.random() * 0.3)  # also before the first step, and while it loads
        before = moved(lab, name, -1) or 0
        while draws.random() < 0.8 and moved(lab, name, before) is None and process.is_alive():
            assert time.monotonic() < deadline, "no step for two minutes"
            time.sleep(0.005)
        time.sleep(draws.random() * 0.05)
        process.kill()
        process.join(60)
        hit += process.exitcode == -signal.SIGKILL
        begun = (lab.root / name).exists() and list((lab.root / name).glob("*/sessions/0/manifest.json"))
        process = start(lab, changes, resume=name if begun else None)
    process.join(240)
    assert process.exitcode == 0
    assert hit > 1, "it ended before it could be killed: more steps are needed"
    return open_run(name, lab.root)


def assert_once_each(lab: Lab, run: Run, changes: dict[str, Any], steps: int) -> None:
    """Along the surviving chain every number is trained once, left out, or still to come; and is the prompt it was."""
    records = rollouts_of(run)
    trained = [record for record in records if record.fate == "trained"]
    assert [record.step for record in trained] == [step for step in range(1, steps + 1) for _ in range(BATCH)]
    state = load_checkpoint(run.checkpoint("last")).state["executor"]
    numbers = [record.group.number for record in records]
    open_ = [number for number, _ in state["unfinished"]]
    open_ += [one["number"] for one in [*state["ready"], *state["settled"]]]
    most = Counter([*numbers, *open_]).most_common(1)
    assert most[0][1] == 1, f"number {most[0][0]} is there twice"
    assert {*numbers, *open_} == set(range(state["next"]))
    spec = palestra.check(lab.spec(**changes)).spec
    assert isinstance(spec, PosttrainSpec)
    use = spec.tasks.train[0]
    prompts = Prompts(spec.tasks, {use.label: make_task(use.task, use.args, use.label)}, 0)
    ids = [prompts.sample(number).id for number in range(state["next"])]
    assert all(record.group.problem.id == ids[record.group.number] for record in records)
    rows = rows_of(run)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert rows[-1]["fate/trained"] == len(trained) == steps * BATCH
    assert rows[-1]["tokens"] == sum(one.sampled for record in records for one in record.group.trajectories)


ASYNCHRONOUS: dict[int, dict[str, Any]] = {
    1: {"rollout__staleness": 1, "rollout__max_new_tokens": 20},
    4: {"rollout__staleness": 4, "algorithm__filters": {"zero_variance": True}},
}


@pytest.mark.parametrize(
    ("staleness", "kills"),
    [(4, 2), *(pytest.param(staleness, 4, marks=pytest.mark.slow) for staleness in ASYNCHRONOUS)],
)
def test_asynchronous_run_killed_at_random_moments_trains_every_prompt_exactly_once(lab, staleness, kills):
    changes = {"name": "killed", "train__steps": 20, "tasks": letters(pause=0.02), **ASYNCHRONOUS[staleness]}
    changes |= {"every__checkpoint": "2 steps", "every__eval": "5 steps"}
    run = kill_at_random(lab, changes, random.Random(staleness), kills)
    assert_once_each(lab, run, changes, 20)
    assert all(row["staleness_max"] <= staleness for row in rows_of(run)[1:])


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_synchronous_run_killed_at_random_moments_equals_one_that_was_not(lab, kills):
    changes: dict[str, Any] = {"train__steps": 12, "tasks": letters(pause=0.02), "every__checkpoint": "3 steps"}
    changes |= {"algorithm__filters": {"zero_variance": True}, "train__minibatches": 2}
    reference = lab.run(name="reference", **changes)
    run = kill_at_random(lab, {"name": "killed", **changes}, random.Random(7), kills)
    assert_equal_runs(run, reference)
    assert_once_each(lab, run, changes, 12)


def test_run_killed_before_its_first_checkpoint_starts_its_files_anew(lab):
    changes: dict[str, Any] = {"hooks": ["lm_hooks:end"], "every__checkpoint": "4 steps"}
    reference = lab.run(name="reference", **changes)
    (lab.path / "kill").write_text("3")
    process = start(lab, {"name": "killed", **changes})
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    killed = open_run("killed", lab.root)
    assert metas(session_of(killed)) == []
    assert len(rollouts_of(killed)) >= 2 * BATCH  # a thread may still have had to write those of the last step
    lab.resume("killed")
    assert_equal_runs(killed, reference)


# At staleness 2 up to 48 answers come before the first step.
@pytest.mark.parametrize(("answers", "staleness"), fast_only([(20, 0), (70, 0), (60, 2), (90, 2)], (60, 2), (70, 0)))
def test_run_stopped_while_it_generates_saves_and_resumes(lab, staleness, answers):
    changes: dict[str, Any] = {"tasks": {"train": letters("Signalling")["train"]}, "rollout__staleness": staleness}
    changes |= {"every__checkpoint": "3 steps", "train__steps": 8}
    reference = lab.run(name="reference", **changes) if staleness == 0 else None
    Signalling.judged = 0
    (lab.path / "signal").write_text(f"{int(signal.SIGTERM)} {answers}")
    with pytest.raises(Interrupted, match="with everything saved; continue with: palestra train --resume"):
        lab.run(name="stopped", **changes)
    stopped = open_run("stopped", lab.root)
    assert stopped.state == "interrupted"
    rows = rows_of(stopped)
    assert metas(session_of(stopped))[-1].step == rows[-1]["step"] > 0
    lab.resume("stopped")
    assert_once_each(lab, stopped, changes, 8)
    if reference is not None:
        assert_equal_runs(stopped, reference)


@pytest.mark.parametrize("answers", [16 * 2 + 9, pytest.param(16 * 4 + 9 + 6, marks=pytest.mark.slow)])
def test_run_stopped_in_an_evaluation_begins_again_with_it(lab, answers):
    # 16 answers a step and 6 an evaluation, before the first step, after the second and after the last, the fourth.
    # Judging takes a while, so that the signal comes before the evaluation ends.
    changes: dict[str, Any] = {"tasks": letters("Signalling", pause=0.3), "train__steps": 4}
    reference = lab.run(name="reference", **changes)
    Signalling.judged = 0
    (lab.path / "signal").write_text(f"{int(signal.SIGTERM)} {answers}")
    with pytest.raises(Interrupted, match="with everything saved"):
        lab.run(name="stopped", **changes)
    stopped = open_run("stopped", lab.root)
    step = 2 if answers < 50 else 4
    assert stopped.state == "interrupted"
    assert metas(session_of(stopped))[-1].step == step
    assert rows_of(stopped)[-1]["step"] == step - 1
    lab.resume("stopped")
    assert stopped.state == "done"
    assert_equal_runs(stopped, reference)


VARIANTS: dict[str, dict[str, Any]] = {
    "critic": {"algorithm": {"preset": "ppo"}, "train__minibatches": 2, "train__epochs": 2},
    "lora": {"model__lora": {"rank": 4}, "algorithm__kl": {"where": "loss", "coefficient": 0.05, "estimator": "k3"}},
    "kl_in_reward": {"algorithm__kl": {"where": "reward", "coefficient": 0.05, "estimator": "k1"}},
    "muon": {"optim": {"name": "muon", "lr": 0.01, "adam_lr": 2e-3}, "train__minibatches": 2, "train__epochs": 2},
    "statuses": {"tasks": letters("Moody"), "algorithm__truncated": {"type": "penalize"}},
    "statuses_masked": {
        "tasks": letters("Moody"),
        "algorithm__truncated": {"type": "mask"},
        "rollout__max_new_tokens": 40,
    },
    "multi_turn": {"rollout__workflow": {"name": "multi_turn", "turns": 3, "feedback": "no", "discount": 0.5}},
    "tools": {"rollout__workflow": {"name": "tools", "tools": ["calculator"]}, "rollout__max_new_tokens": 40},
    "lessons_aside": {"sft": {"weight": 0.5, "batch": 3}},
    "pool": {"tasks": {**letters(), "pool": {"drop": None}}},
    "shuffled": {"control": "shuffled_rewards"},
    "narrow": {
        "algorithm": {"preset": "ppo"},
        "train__weights": "bf16",
        "optim": {"name": "adamw", "lr": 3e-3, "state": "8bit", "offload": True},
    },
    "qlora": {"model__lora": {"rank": 4, "quantize": "nf4", "dora": True, "modules_to_save": ["embed_tokens"]}},
}
QUICK = ("critic", "lora", "statuses", "multi_turn", "tools", "lessons_aside", "pool")


def calling_model(lab: Lab) -> Path:
    """A model that has learned to call the calculator, whatever it is asked."""
    asked = make_task(TASK, {}).problems("train")
    rows = [{"prompt": one.prompt, "completion": "<calculator>1+2</calculator>c"} for one in asked]
    (lab.path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "kind": "sft",
        "name": "calls",
        "model": {"init": str(lab.model)},
        "data": {"train": {"calls": {"path": str(lab.path / "calls.jsonl")}}, "context": 48, "format": "plain"},
        "train": {"steps": 40, "batch": 16, "precision": "fp32"},
        "optim": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},  # not too sure of itself: rewards must differ
        "every": {"eval": None, "log": "40 steps"},
        "threads": 1,
    }
    return palestra.run(spec, root=lab.root, quiet=True).path


def variant(lab: Lab, name: str) -> dict[str, Any]:
    """The changes of a variant, with the data that it reads."""
    changes = {**VARIANTS[name]}
    if name == "lessons_aside":
        rows = [{"prompt": "abc", "completion": "cba"}, {"prompt": "xy", "completion": "yx"}] * 8
        (lab.path / "lessons.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"train": {"lessons": {"path": str(lab.path / "lessons.jsonl")}}, "context": 24, "format": "plain"}
        changes["sft"] = {**changes["sft"], "data": data}
    if name == "tools":
        changes["model__init"] = str(calling_model(lab))
    return changes


@pytest.mark.parametrize("name", fast_only(VARIANTS, *QUICK))
def test_variant_that_stops_after_its_first_checkpoint_resumes_exactly(lab, name, monkeypatch, tmp_path):
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    changes = {"train__steps": 3, **variant(lab, name), "hooks": ["lm_hooks:end"]}
    reference = lab.run(name="reference", **changes)
    (lab.path / "stop").write_text("2")
    with pytest.raises(Interrupted):
        lab.run(name="stopped", **changes)
    assert_equal_runs(lab.resume("stopped"), reference)
    rows, records = rows_of(reference)[1:], rollouts_of(reference)
    answers = [one for record in records for one in record.group.trajectories]
    assert all(row["grad_norm"] > 0 for row in rows)
    if name == "critic":
        state = load_checkpoint(reference.checkpoint("last")).state["learner"]["critic"]
        assert state["model"]["value.weight"].abs().max() > 0
        assert rows[-1]["critic/loss"] > 0
    if name.startswith("statuses"):
        told = {str(one.verdict.status) for one in answers}
        assert told == {"correct", "wrong", "unparsable", "timeout"}  # nothing is learned from `error`
        assert any(len(record.group.trajectories) < record.group.asked for record in records)
        assert sum(row["groups/partial"] for row in rows) > 0
        assert any(one.stop_reason == "length" for one in answers)
    if name == "multi_turn":
        assert max(len(one.turns) for one in answers) == 3
        assert {one.reward for one in answers} >= {1.0, 0.5, 0.0}
    if name == "tools":
        called = [one for one in answers if "<calculator>1+2</calculator><result>3</result>" in one.completion]
        assert called
        for one in called:  # what the tool said is read and not trained
            begin = one.completion.index("<result>")
            masked = one.loss_mask[5 + begin : 5 + begin + len("<result>3</result>")]
            assert not any(masked)
            assert one.sampled < len(one.tokens) - 5
    if name == "lessons_aside":
        assert rows[-1]["sft/loss"] > 0
    if name == "kl_in_reward":
        assert rows[-1]["kl_reference"] > 0


# ---- the real command


def command(lab: Lab, scratch: Any, **changes: Any) -> str:
    return scratch.spec("command", lab.spec(**changes))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_command_killed_ten_times_trains_every_prompt_exactly_once(lab, scratch):
    changes: dict[str, Any] = {"train__steps": 45, "tasks": letters(pause=0.05), "rollout__staleness": 1}
    changes |= {"every__checkpoint": "2 steps", "every__eval": "9 steps", "rollout__max_new_tokens": 20}
    draws, process = random.Random(0), scratch.start("train", command(lab, scratch, **changes), "--quiet")
    for _ in range(10):
        before = moved(Lab(scratch.path), "command", -1) or 0
        goal = before + draws.randint(1, 3)
        wait_until(lambda goal=goal: moved(Lab(scratch.path), "command", goal - 1), process)
        time.sleep(draws.random() * 0.1)
        assert process.poll() is None, "it has ended too early: more steps are needed"
        process.kill()
        process.communicate()
        process = scratch.start("train", "--resume", "command", "--quiet")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    run = open_run("command", scratch.path / "runs")
    assert_once_each(lab, run, changes, 45)
    assert all(row["staleness_max"] <= 1 for row in rows_of(run)[1:])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_command_stopped_by_sigterm_while_it_generates_exits_with_its_code(lab, scratch):
    changes: dict[str, Any] = {"train__steps": 12, "tasks": letters(pause=1.0), "rollout__staleness": 1}
    process = scratch.start("train", command(lab, scratch, **changes), "--quiet")
    wait_until(lambda: moved(Lab(scratch.path), "command", 2), process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code
    assert "with everything saved" in err
    assert scratch.status("command")["state"] == "interrupted"
    result: subprocess.CompletedProcess = scratch("train", "--resume", "command", "--quiet")
    assert result.returncode == 0, result.stderr
    assert_once_each(lab, open_run("command", scratch.path / "runs"), changes, 12)


def test_run_whose_workflow_blocks_the_event_loop_ends_with_the_second_ctrl_c_and_resumes(lab):
    workflow = {"name": "custom", "function": "posttrain_tasks:blocking"}
    changes = {"name": "blocked", "rollout__workflow": workflow, "every__checkpoint": "1 steps", "train__steps": 3}
    block = lab.path / "block"
    block.touch()
    process = start(lab, changes)
    deadline = time.monotonic() + 120
    while not (lab.path / "blocked").exists():
        assert process.is_alive()
        assert time.monotonic() < deadline, "no workflow blocked for two minutes"
        time.sleep(0.05)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
    process.join(30)
    alive = process.is_alive()
    process.kill()
    assert not alive
    block.unlink()
    run = lab.resume("blocked")
    assert rows_of(run)[-1]["step"] == 3
