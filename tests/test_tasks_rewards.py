"""Rewards of the user: what they are passed, what they may give, where they run."""

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import UsageError
from palestra.spec.tasks import RewardSpec, TaskUse
from palestra.tasks.rewards.rewards import FunctionReward, make_reward, reward
from palestra.tasks.task import Completion, Problem, Status, Verdict
from palestra.tasks.verify.workers import Verifiers

ROW = {"answer": "4", "level": 2, "prompt": "a column of the same name", "tags": ["sum"]}
PROBLEM = Problem("sums/train/0", "2+2=", ROW)
ANSWER = Completion("4", prompt_text="<s>2+2=", prompt_ids=(1, 2), completion_ids=(3,))
CHAT = Problem("sums/train/1", ({"role": "user", "content": "2+2="},), ROW)
LONG = Problem("sums/train/2", ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}), ROW)

FILE = """
import asyncio, math, os, time
from fractions import Fraction

import numpy as np

from palestra.tasks.rewards.rewards import reward
from palestra.tasks.task import Status, Verdict

seen = []

def everything(prompt, completion, *, prompt_ids, completion_ids, **row):
    seen.append((prompt, completion, prompt_ids, completion_ids, row))
    return 1.0

def completion_alone(completion):
    return completion == "4"

def fields(completion, answer, level=7, missing=None, *rest):
    seen.append((completion, answer, level, missing, rest))
    return float(completion == answer)

def row_alone(**row):
    seen.append(row)
    return 1

def wants_more(completion, target):
    return 1.0

def by_place(completion, /):
    return 1.0

async def later(completion, answer):
    await asyncio.sleep(0)
    return Verdict(0.25, Status.WRONG, {"later": 1.0}, note=f"pid {os.getpid()}")

def where(completion):
    return Verdict(1.0, Status.CORRECT, note=str(os.getpid()))

@reward(isolated=False)
def here(completion):
    return Verdict(1.0, Status.CORRECT, note=str(os.getpid()))

@reward
def elsewhere(completion):
    return where(completion)

def hangs(completion):
    if completion == "hang":
        time.sleep(600)
    return 1.0

def fails(completion):
    raise KeyError("no such thing")

not_a_function = 3
giving = {
    "true": True, "false": False, "one": 1, "half": 0.5, "minus": -2.5, "numpy": np.float32(0.5),
    "integer": np.int64(2), "fraction": Fraction(1, 4), "nan": math.nan, "inf": math.inf, "none": None,
    "text": "1.0", "list": [1.0],
    "array": np.array([1.0]), "verdict": Verdict(0.5, Status.CORRECT), "nan verdict": Verdict(math.nan, Status.CORRECT),
    "complex": 1j,
}

def gives(completion):
    return giving[completion]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the folder where the run was started."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    yield name
    sys.modules.pop(name, None)


def made(mine: str, function: str) -> FunctionReward:
    found = make_reward(RewardSpec(function=f"{mine}:{function}"), Path("runs"))
    assert isinstance(found, FunctionReward)
    return found


def last_seen(mine: str) -> Any:
    return sys.modules[mine].seen[-1]


def verdict_of(given: Any) -> Verdict:
    assert isinstance(given, Verdict)
    return given


def test_reward_with_the_whole_signature_gets_text_tokens_and_the_row(mine: str):
    assert verdict_of(made(mine, "everything").verify(PROBLEM, ANSWER)).score == 1.0
    rest = {"answer": "4", "level": 2, "tags": ["sum"]}
    assert last_seen(mine) == ("2+2=", "4", [1, 2], [3], rest)


@pytest.mark.parametrize(("problem", "prompt"), [(CHAT, "2+2="), (LONG, "system: Add.\n\nuser: 2+2=")])
def test_reward_on_a_conversation_gets_it_as_text(mine: str, problem: Problem, prompt: str):
    made(mine, "everything").verify(problem, ANSWER)
    assert last_seen(mine)[0] == prompt


def test_reward_is_passed_only_what_it_asks_for(mine: str):
    assert verdict_of(made(mine, "completion_alone").verify(PROBLEM, ANSWER)).score == 1.0
    assert verdict_of(made(mine, "fields").verify(PROBLEM, ANSWER)).score == 1.0
    assert last_seen(mine) == ("4", "4", 2, None, ())
    made(mine, "row_alone").verify(PROBLEM, ANSWER)
    assert last_seen(mine) == ROW


def test_reward_that_asks_for_what_the_row_has_not_is_told_what_there_is(mine: str):
    with pytest.raises(
        UsageError, match=r"asks for 'target', which sums/train/0 does not have: there is answer, level"
    ):
        made(mine, "wants_more").verify(PROBLEM, ANSWER)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("by_place", "cannot be passed by name"),
        ("nothing", "has no function 'nothing'"),
        ("not_a_function", "has no function 'not_a_function'"),
    ],
)
def test_reward_that_cannot_be_called_is_refused_before_the_run(mine: str, function: str, reason: str):
    with pytest.raises(UsageError, match=reason):
        made(mine, function)


def test_reward_of_a_module_that_is_not_there_is_refused(mine: str):
    with pytest.raises(UsageError, match=r"reward\.function: nowhere_at_all cannot be imported"):
        make_reward(RewardSpec(function="nowhere_at_all:f"), Path("runs"))


def test_reward_without_any_is_refused():
    with pytest.raises(UsageError, match="expected one of function, judge and model"):
        make_reward(RewardSpec(), Path("runs"))


@pytest.mark.parametrize(
    ("given", "score", "status"),
    [
        ("true", 1.0, Status.CORRECT),
        ("false", 0.0, Status.WRONG),
        ("one", 1.0, Status.CORRECT),
        ("half", 0.5, Status.WRONG),
        ("minus", -2.5, Status.WRONG),
        ("numpy", 0.5, Status.WRONG),
        ("integer", 2.0, Status.CORRECT),
        ("fraction", 0.25, Status.WRONG),
        ("verdict", 0.5, Status.CORRECT),
    ],
)
def test_reward_gives_a_number_or_a_verdict(mine: str, given: str, score: float, status: Status):
    verdict = verdict_of(made(mine, "gives").verify(PROBLEM, Completion(given)))
    assert (verdict.score, verdict.status) == (score, status)
    assert type(verdict.score) is float


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nan", "nan"), ("inf", "inf"), ("none", "None"), ("text", "'1.0'"), ("list", "[1.0]"),
        ("array", "array([1.])"), ("nan verdict", "a Verdict with the score nan"), ("complex", "1j"),
    ],
)  # fmt: skip
def test_reward_that_gives_anything_else_is_an_error_not_a_zero(mine: str, given: str, said: str):
    verdict = verdict_of(made(mine, "gives").verify(PROBLEM, Completion(given)))
    assert verdict.status == Status.ERROR
    assert f"gives returned {said}: expected a finite number" in verdict.note


def test_reward_decorator_marks_and_leaves_the_function_as_it_is(mine: str):
    assert [made(mine, name).isolated for name in ("where", "elsewhere", "here")] == [True, True, False]

    def plain(completion: str) -> float:
        return 1.0

    assert reward(plain) is plain
    assert reward(isolated=False)(plain) is plain


def uses(mine: str, *functions: str) -> list[TaskUse]:
    return [TaskUse(task="arithmetic", name=name, reward=RewardSpec(function=f"{mine}:{name}")) for name in functions]


def judged(judges: Verifiers, name: str, *texts: str) -> list[Verdict]:
    problem = Problem(f"{name}/train/0", "2+2=", ROW)

    async def all_at_once() -> list[Verdict]:
        return await asyncio.gather(*(judges.verify(problem, Completion(text)) for text in texts))

    return asyncio.run(all_at_once())


def test_rewards_run_in_processes_of_their_own_from_the_folder_of_the_run(mine: str):
    names = ("where", "here", "later", "hangs", "fails", "gives")
    with Verifiers(uses(mine, *names), workers=2, timeout=5.0) as judges:
        assert int(judged(judges, "where", "4")[0].note) != os.getpid()
        assert int(judged(judges, "here", "4")[0].note) == os.getpid()
        (later,) = judged(judges, "later", "4")
        assert (later.score, later.parts) == (0.25, {"later": 1.0})
        assert later.note != f"pid {os.getpid()}"
        hung, fine = judged(judges, "hangs", "hang", "4")
        assert (hung.status, fine.status) == (Status.TIMEOUT, Status.CORRECT)
        (failed,) = judged(judges, "fails", "4")
        assert failed.status == Status.ERROR
        assert "KeyError: 'no such thing'" in failed.note
        assert [one.status for one in judged(judges, "gives", "nan", "true")] == [Status.ERROR, Status.CORRECT]


def test_reward_here_may_be_async(mine: str, tmp_path: Path):
    with (tmp_path / f"{mine}.py").open("a") as file:
        file.write("\nlater = reward(isolated=False)(later)\n")
    with Verifiers(uses(mine, "later")) as judges:
        assert judged(judges, "later", "4")[0].note == f"pid {os.getpid()}"
