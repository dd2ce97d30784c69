"""The workflow `agent` in real runs: functions and commands, rewards, ends of every kind, kills, exact resume."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_lab import until
from posttrain_lab import Lab, assert_equal_runs, letters, rollouts_of, rows_of
from test_posttrain_kill import assert_once_each, kill_at_random, start

import palestra
from palestra.errors import PalestraError, UsageError
from palestra.rollout.types import Trajectory
from palestra.tasks.sandbox import confined
from palestra.tasks.task import Status

ALONE: dict[str, Any] = {"tasks": {"train": letters()["train"]}, "rollout__group": 2, "train__steps": 1}
"""Without an evaluation."""
HERE = Path(__file__).parent


def can_confine() -> bool:
    with contextlib.suppress(UsageError):
        confined.possible()
        return True
    return False


CONFINED = pytest.mark.skipif(not can_confine(), reason="this machine has neither root nor user namespaces")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("PALESTRA_LAB", str(tmp_path))
    return Lab(tmp_path)


def agent(name: str, **settings: Any) -> dict[str, Any]:
    """The fields of a spec with an agent of `gateway_agents`."""
    workflow = {"name": "agent", "function": f"gateway_agents:{name}", **settings}
    return {"rollout__workflow": workflow, "tasks": letters(), "train__steps": 2, "eval__problems": 2}


def completions(run: Any) -> list[Trajectory]:
    return [one for record in rollouts_of(run) for one in record.group.trajectories]


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_function_of_two_turns_is_trained_token_for_token_and_leaves_no_process(lab):
    before = children()
    run = lab.run(**agent("twice"))
    rows, made = rows_of(run), completions(run)
    assert len(made) == 2 * 4 * 4
    assert all(len(one.turns) == 2 and one.row == 0 for one in made)
    assert rows[-1]["part/requests"] == 2
    assert rows[-1]["part/retokenized"] == rows[-1]["part/forks"] == 0
    assert max(row.get("mismatch", 0.0) for row in rows) < 1e-6  # what was captured is what the trainer computes
    until(lambda: not children() - before)


def test_function_that_returns_an_answer_is_verified_on_it(lab):
    run = lab.run(**agent("returning"))
    assert {one.verdict.status for one in completions(run)} == {Status.CORRECT}
    assert rows_of(run)[-1]["eval/accuracy"] == 1.0


def test_program_that_posts_a_reward_and_ends_its_session_is_not_waited_for(lab):
    run = lab.run(**agent("rewarding", reward="sum", processes=2))
    for one in completions(run):
        assert one.reward == one.verdict.score + 0.25
        assert one.verdict.parts["program"] == 0.25
    run = lab.run(**agent("rewarding", reward="program"))
    assert {one.reward for one in completions(run)} == {0.25}


def test_conversations_that_fork_are_rows_of_one_episode(lab):
    run = lab.run(**agent("forking"))
    made = completions(run)
    assert [one.row for one in made] == [0, 1] * (len(made) // 2)
    assert all(first.reward == second.reward for first, second in zip(made[::2], made[1::2], strict=True))
    assert rows_of(run)[-1]["part/forks"] == 1
    assert rows_of(run)[-1]["groups/partial"] == 0


def test_program_beyond_a_limit_is_truncated_and_not_failed(lab):
    run = lab.run(**agent("talking", turns=3))
    assert {(len(one.turns), one.stop_reason) for one in completions(run)} == {(3, "length")}
    assert Status.ERROR not in {one.verdict.status for one in completions(run)}


@pytest.mark.parametrize("limit", [{"seconds": 4.0}, {"idle_seconds": 1.0}])
def test_program_that_does_not_end_has_status_timeout(lab, limit):
    run = lab.run(**{**agent("sleeping", **limit), **ALONE})
    assert {one.verdict.status for one in completions(run)} == {Status.TIMEOUT}
    assert all(one.sampled for one in completions(run))


def test_agent_that_never_asks_is_an_error_that_says_so(lab):
    with pytest.raises(PalestraError, match="ended without a turn of the model"):
        lab.run(**{**agent("silent"), **ALONE})


def test_worker_killed_in_the_middle_costs_its_agents_alone_as_errors(lab):
    changes = agent("dying", running=3)
    run = lab.run(**{**changes, "tasks": {"train": changes["tasks"]["train"]}, "rollout__failures": 3})
    assert (lab.path / "died").exists()
    assert rows_of(run)[-1]["step"] == 2
    assert rows_of(run)[-1]["fate/trained"] == 8
    assert 29 <= len(completions(run)) < 32 or rows_of(run)[-1]["fate/failed"] > 0  # three were running
    assert all(one.verdict.status != Status.ERROR for one in completions(run))


AT_EXIT = """
import atexit, gc, time
from palestra.rollout.agents.programs import Functions
from palestra.rollout.event_loop import LoopThread
from palestra.spec.kinds.posttrain import AgentSpec

thread, held = LoopThread(), []

async def begin():
    held.append(Functions(AgentSpec(name="agent", function="gateway_agents:twice")))
    await held[0].ready()

def end():
    worker = held[0]._workers[0]
    held[0].close()
    while not worker._calls._reading.done():
        time.sleep(0.01)
    held.clear()
    del worker
    gc.collect()
    thread.close()

atexit.register(end)
thread.start(begin()).result()
"""


def test_worker_that_ends_with_the_interpreter_leaves_no_complaint():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], cwd=HERE, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def command(what: str) -> dict[str, Any]:
    workflow = {"name": "agent", "command": [sys.executable, str(HERE / "gateway_agents.py"), what], "answer": "output"}
    changes = {"rollout__workflow": workflow, "rollout__group": 2, "train__steps": 1, "train__prompts_per_step": 2}
    return {**changes, "tasks": {"train": letters(size=10)["train"]}}


def test_command_gets_addresses_and_problem_and_its_output_is_verified(lab):
    run = lab.run(**command("print"))
    assert {one.verdict.status for one in completions(run)} == {Status.CORRECT}


def test_command_that_is_killed_is_a_failure_and_no_score(lab):
    run = lab.run(**command("die"), rollout__failures=10)
    assert rows_of(run)[-1]["fate/failed"] > 0
    assert {one.verdict.status for one in completions(run)} == {Status.CORRECT}
    log = next(lab.root.glob("*/*/sessions/0/log.txt")).read_text()
    assert "the agent was killed by SIGKILL" in log


def sandboxed(what: str) -> dict[str, Any]:
    changes = command(what)
    return {**changes, "rollout__workflow": {**changes["rollout__workflow"], "sandbox": True}}


@CONFINED
def test_command_in_the_sandbox_reaches_the_gateway_and_nothing_else(lab, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hush")
    before = children()
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("LANG", f"{other.getsockname()[1]} {lab.path}")  # one of the variables that it gets
        run = lab.run(**sandboxed("confined"))
    assert {one.verdict.status for one in completions(run)} == {Status.CORRECT}
    assert rows_of(run)[-1]["part/retokenized"] == 0
    until(lambda: not children() - before)


@CONFINED
def test_command_in_the_sandbox_that_is_killed_is_a_failure(lab):
    run = lab.run(**sandboxed("die"), rollout__failures=10)
    assert rows_of(run)[-1]["fate/failed"] > 0
    assert {one.verdict.status for one in completions(run)} == {Status.CORRECT}


@CONFINED
def test_command_in_the_sandbox_beyond_its_limits_is_a_failure_that_says_so(lab):
    changes = sandboxed("hog")
    changes["rollout__workflow"] |= {"limits": {"memory": 150}}
    run = lab.run(**changes, rollout__failures=10)
    assert rows_of(run)[-1]["fate/failed"] > 0
    assert {one.verdict.status for one in completions(run)} == {Status.CORRECT}
    assert "MiB of memory, and limits.memory is 150" in next(lab.root.glob("*/*/sessions/0/log.txt")).read_text()


def test_machine_that_cannot_confine_is_refused_before_anything_is_trained(lab, monkeypatch):
    monkeypatch.setattr(confined, "ways", lambda *_: [])
    confined.possible.cache_clear()
    with pytest.raises(UsageError, match=r"rollout\.workflow\.sandbox: this machine cannot confine a command"):
        lab.run(**sandboxed("print"))
    assert not os.path.exists(lab.root / "letters")


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_run_killed_at_random_moments_equals_one_that_was_not(lab, kills):
    changes = {**agent("twice"), "train__steps": 8, "every__checkpoint": "2 steps"}
    reference = lab.run(name="reference", **changes)
    run = kill_at_random(lab, {"name": "killed", **changes}, random.Random(3), kills)
    assert_equal_runs(run, reference)
    assert_once_each(lab, run, changes, 8)


def test_run_that_is_killed_takes_its_agents_with_it(lab):
    process = start(lab, {"name": "killed", **agent("sleeping")})
    family: list[psutil.Process] = []

    def working() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            family[:] = psutil.Process(process.pid).children(recursive=True)
            return any("gateway_agents" in " ".join(one.cmdline()) for one in family)
        return False

    until(working)
    process.kill()
    process.join(60)
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "either `command` or `function`"),
        ({"command": ["x"], "function": "a:b"}, "either `command` or `function`"),
        ({"function": "gateway_agents:twice", "answer": "output"}, "returns its answer"),
        ({"function": "gateway_agents:twice", "sandbox": True}, "shares its worker process"),
        ({"command": ["x"], "limits": {"tasks": 9}}, "expected with `sandbox: true`"),
        ({"function": "gateway_agents:twice", "port": 0}, "port"),
        ({"function": "gateway_agents:twice", "calls": "xml"}, "calls"),
    ],
)
def test_spec_of_an_agent_that_cannot_run_is_refused(lab, settings, words):
    with pytest.raises(UsageError, match=words):
        palestra.check(lab.spec(rollout__workflow={"name": "agent", **settings}))


def test_function_that_does_not_exist_is_named_before_anything_is_trained(lab):
    with pytest.raises(PalestraError, match="has no function 'nobody'"):
        lab.run(**agent("nobody"))
    assert not os.path.exists(lab.root / "letters")
