"""Judging on an event loop: on the spot, in processes that hang, crash and are replaced, by rewards of the user."""

import asyncio
import logging
import os

import psutil
import pytest
from conftest import fast_only

from palestra.errors import PalestraError, UsageError
from palestra.spec.tasks import RewardSpec, TaskUse
from palestra.tasks.task import Completion, Problem, Status, Verdict
from palestra.tasks.verify.workers import Verifiers

HERE = "test_tasks_judging_tasks:Trouble"
ELSEWHERE = "test_tasks_judging_tasks:TroubleElsewhere"


def use(task: str, name: str = "trouble", **args) -> TaskUse:
    return TaskUse(task=task, name=name, args=args)


def judged(judges: Verifiers, *texts: str, task: str = "trouble") -> list[Verdict]:
    """Verdicts on answers that come all at once."""
    problem = Problem(f"{task}/test/0", "say good")

    async def all_at_once() -> list[Verdict]:
        return await asyncio.gather(*(judges.verify(problem, Completion(text)) for text in texts))

    return asyncio.run(all_at_once())


def test_judge_without_isolation_runs_in_this_process():
    with Verifiers([use(HERE)]) as judges:
        good, bad, pid = judged(judges, "good", "bad", "pid")
        assert (good.status, bad.status) == (Status.CORRECT, Status.WRONG)
        assert int(pid.note) == os.getpid()
        assert good.seconds > 0
        assert judges._pool is None


def test_judge_isolated_runs_elsewhere_under_the_name_of_the_run():
    with Verifiers([use(ELSEWHERE, "mine")]) as judges:
        (verdict,) = judged(judges, "good", task="mine")
        name, pid = verdict.note.split()
        assert verdict.status == Status.CORRECT
        assert verdict.seconds > 0
        assert name == "mine"
        assert int(pid) != os.getpid()


@pytest.mark.parametrize("how", fast_only(["sleep 1e4", "spin", "stuck"], "sleep 1e4", "stuck"))
def test_judge_that_hangs_is_killed_and_the_next_is_served(how):
    with Verifiers([use(ELSEWHERE)], workers=1, timeout=1.0) as judges:
        (before,) = judged(judges, "pid")
        hung, after = judged(judges, how, "pid")
        assert (hung.score, hung.status, hung.seconds) == (0.0, Status.TIMEOUT, 1.0)
        assert "1 s" in hung.note
        assert after.status == Status.CORRECT
        assert after.note != before.note
        assert not psutil.pid_exists(int(before.note))


def test_judge_with_more_hanging_than_workers_among_good_loses_none(tmp_path):
    texts = ["sleep 1e4" if number % 11 == 0 else "good" for number in range(44)]
    with Verifiers([use(ELSEWHERE)], workers=2, timeout=1.0) as judges:
        verdicts = judged(judges, *texts)
        assert [v.status for v in verdicts] == [Status.TIMEOUT if t == "sleep 1e4" else Status.CORRECT for t in texts]
        # Both workers are still there, and at work at the same time.
        met = (judged(judges, f"meet {tmp_path}", f"meet {tmp_path}") for _ in range(20))
        assert any(v.status == Status.CORRECT for pair in met for v in pair)


@pytest.mark.parametrize("how", ["die", "exit"])
def test_judge_that_crashes_is_an_error_and_the_next_is_served(how):
    with Verifiers([use(ELSEWHERE)], workers=1) as judges:
        crashed, after = judged(judges, how, "good")
        assert (crashed.score, crashed.status) == (0.0, Status.ERROR)
        assert "worker" in crashed.note
        assert after.status == Status.CORRECT


@pytest.mark.parametrize("task", [HERE, ELSEWHERE])
def test_judge_that_raises_is_an_error_with_its_message_told_once(task, caplog):
    with Verifiers([use(task)], workers=1) as judges, caplog.at_level(logging.ERROR, "palestra.tasks"):
        verdicts = judged(judges, "raise", "raise", "good")
    assert [v.status for v in verdicts] == [Status.ERROR, Status.ERROR, Status.CORRECT]
    assert verdicts[0].note == "ValueError: a judge with a mistake"
    (told,) = caplog.messages
    assert "Traceback" in told


@pytest.mark.parametrize("task", [HERE, ELSEWHERE])
def test_judge_with_numbers_of_numpy_gives_plain_ones_and_without_a_finite_score_is_an_error(task):
    with Verifiers([use(task)], workers=1) as judges:
        good, *failed = judged(judges, "score 1", "score nan", "score inf")
    assert (good.score, good.status, good.parts) == (1.0, Status.CORRECT, {"half": 0.5})
    assert {type(number) for number in (good.score, *good.parts.values())} == {float}
    assert [(v.score, v.status) for v in failed] == [(0.0, Status.ERROR)] * 2
    assert failed[0].note == "the verifier gave the score nan"


@pytest.mark.parametrize("task", [HERE, ELSEWHERE])
def test_judge_that_could_never_work_ends_the_run(task):
    with Verifiers([use(task)], workers=1) as judges, pytest.raises(UsageError, match=r"palestra\[some\]"):
        judged(judges, "unusable")


def test_judge_that_is_slow_to_start_has_all_its_time_and_starts_once(tmp_path):
    started = tmp_path / "started"
    with Verifiers([use(ELSEWHERE, slow_start=1.5, started=str(started))], workers=1, timeout=1.0) as judges:
        verdicts = judged(judges, *["good"] * 20)
    assert {v.status for v in verdicts} == {Status.CORRECT}
    assert len(started.read_text().split()) == 1


def test_judges_that_are_closed_leave_no_process_and_cancel_what_waits():
    judges = Verifiers([use(ELSEWHERE)], workers=2, timeout=60)
    pids = {int(v.note) for v in judged(judges, "pid", "pid")}
    problem = Problem("trouble/test/0", "")

    async def close_in_the_middle() -> list[Verdict | BaseException]:
        waiting = [asyncio.ensure_future(judges.verify(problem, Completion(text))) for text in ("spin", "spin", "good")]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(judges.close)
        return await asyncio.gather(*waiting, return_exceptions=True)

    outcomes = asyncio.run(close_in_the_middle())
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(PalestraError, match="closed"):  # and no new processes for those that are late
        judged(judges, "good")


def test_judge_of_an_unknown_task_is_a_usage_error():
    with Verifiers([use(HERE)]) as judges, pytest.raises(UsageError, match="other/test/0"):
        judged(judges, "good", task="other")


def test_judges_with_one_name_twice_need_the_same_task():
    with Verifiers([use(HERE), use(HERE)]) as judges:
        assert list(judges.tasks) == ["trouble"]
    with pytest.raises(UsageError, match="another `name`"):
        Verifiers([use(HERE), use(HERE, slow_start=1.0)])


# Rewards of the user in place of the task.


def rewarded(function: str) -> TaskUse:
    return TaskUse(task=HERE, name="trouble", reward=RewardSpec(function=f"test_tasks_judging_tasks:{function}"))


def test_judge_by_a_reward_takes_the_place_of_the_task_and_is_killed_where_it_hangs():
    with Verifiers([rewarded("longer")], workers=1, timeout=1.0) as judges:
        verdicts = judged(judges, "bad", "spin", "a", "raise")
    assert [v.status for v in verdicts] == [Status.CORRECT, Status.TIMEOUT, Status.WRONG, Status.CORRECT]


@pytest.mark.parametrize(("function", "here"), [("awaited", False), ("awaited_here", True)])
def test_judge_by_a_reward_that_awaits_is_awaited(function, here):
    with Verifiers([rewarded(function)], workers=1) as judges:
        (verdict,) = judged(judges, "word")
    word, pid = verdict.note.split()
    assert (word, verdict.score, int(pid) == os.getpid()) == ("word", 0.5, here)
    assert verdict.seconds > 0


def test_judges_of_a_reward_that_is_not_there_say_so_at_once():
    with pytest.raises(UsageError, match="no function 'gone'"):
        Verifiers([rewarded("gone")])
