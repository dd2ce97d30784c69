"""The contract of the fan-out, the same for every backend: values, tracebacks, retries, resources, stop, leases.

The backends are `fanout_tasks.BACKENDS`.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import fanout_tasks
import pytest
from conftest import fast_only
from test_work_pool import LINUX, gone
from test_work_tasks import pids_from

from palestra.errors import LeaseLost, PalestraError, RunBusy
from palestra.runs.lease import Lease
from palestra.runs.store import LocalStore
from palestra.work import fanout
from palestra.work.fanout import Backend, Resources, Stop, WorkItem, WorkOutcome, run

# Ray takes a while to start: only the slow tests do.
ANY = fast_only(fanout_tasks.BACKENDS, "inline", "processes")
PARALLEL = fast_only(fanout_tasks.PARALLEL, "processes")


@pytest.fixture(params=ANY)
def backend(request: pytest.FixtureRequest) -> Backend:
    return made(request.param, request)


@pytest.fixture(params=PARALLEL)
def parallel(request: pytest.FixtureRequest) -> Backend:
    return made(request.param, request)


def made(name: str, request: pytest.FixtureRequest) -> Backend:
    if name == "ray":
        request.getfixturevalue("one_ray")
    return fanout_tasks.BACKENDS[name]()


class Held:
    """A lease in memory, which another may hold or take."""

    def __init__(self, others: bool = False) -> None:
        self.others, self.ours, self.calls = others, False, []

    def acquire(self) -> None:
        self.calls.append("acquire")
        if self.others:
            raise RunBusy("another has it")
        self.ours = True

    def renew(self) -> None:
        self.calls.append("renew")
        if self.others:
            raise LeaseLost("another took it")

    def release(self) -> None:
        self.calls.append("release")
        self.ours = False


def of(name: str, function: Callable[..., Any], *args: Any, **how: Any) -> WorkItem:
    return WorkItem(name, function, args, **how)


def by_name(outcomes: Iterator[WorkOutcome]) -> dict[str, WorkOutcome]:
    return {outcome.item.name: outcome for outcome in outcomes}


def test_values_of_a_list_come_as_they_end(backend):
    outcomes = by_name(run([of(str(x), fanout_tasks.value, x) for x in range(5)], Resources(2), backend))
    assert {name: outcome.value for name, outcome in outcomes.items()} == {str(x): 2 * x for x in range(5)}
    assert {(outcome.error, outcome.attempts) for outcome in outcomes.values()} == {(None, 1)}
    assert all(outcome.seconds > 0 for outcome in outcomes.values())


def test_outcomes_are_in_the_order_of_their_end(parallel, tmp_path):
    source = iter([of("late", fanout_tasks.wait_for, tmp_path / "go"), of("early", fanout_tasks.value, 1)])
    names = []
    for outcome in run(source, Resources(2), parallel):
        names.append(outcome.item.name)
        (tmp_path / "go").touch()
    assert names == ["early", "late"]


def test_failing_item_has_its_own_traceback_and_the_others_go_on(backend):
    items = [of("bad", fanout_tasks.fail, "no good"), of("good", fanout_tasks.value, 1)]
    outcomes = by_name(run(items, Resources(1), backend))
    error = outcomes["bad"].error
    cause = error.__cause__ if isinstance(error, PalestraError) else error
    assert isinstance(cause, ValueError)
    assert str(cause) == "no good"
    told = str(error) if isinstance(error, PalestraError) else "".join(frames(error))
    assert "in fail" in told
    assert outcomes["good"].value == 2


def frames(error: BaseException | None) -> Iterator[str]:
    trace = None if error is None else error.__traceback__
    while trace is not None:
        yield f"in {trace.tb_frame.f_code.co_name}\n"
        trace = trace.tb_next


def test_item_that_fails_is_tried_again_and_its_attempts_are_counted(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(fanout, "RETRY_SECONDS", 0.01)
    items = [
        of("third", fanout_tasks.nth_time, tmp_path / "third", 3, retries=2),
        of("never", fanout_tasks.nth_time, tmp_path / "never", 9, retries=1),
    ]
    outcomes = by_name(run(items, Resources(1), backend))
    assert (outcomes["third"].value, outcomes["third"].attempts, outcomes["third"].error) == ("at last", 3, None)
    assert outcomes["never"].attempts == 2
    assert "attempt 2" in str(outcomes["never"].error)


def test_no_more_cores_are_used_than_there_are(backend, tmp_path):
    items = [of(str(i), fanout_tasks.overlap, tmp_path, cores, i, cores=cores) for i, cores in enumerate([1, 2, 1, 3])]
    outcomes = list(run(items, Resources(2), backend))
    most = {outcome.item.name: max(outcome.value) for outcome in outcomes}
    assert len(most) == 4
    assert all(most[name] <= 2 for name in ("0", "1", "2"))
    assert most["3"] == 3  # more than there is: alone


def test_no_more_memory_is_used_than_there_is(backend, tmp_path):
    items = [
        of(str(i), fanout_tasks.overlap, tmp_path, size, i, memory=size * 2**30) for i, size in enumerate([1, 2, 1, 3])
    ]
    outcomes = list(run(items, Resources(4, memory=2 * 2**30), backend))
    most = {outcome.item.name: max(outcome.value) for outcome in outcomes}
    assert len(most) == 4
    assert all(most[name] <= 2 for name in ("0", "1", "2"))
    assert most["3"] == 3  # more than there is: alone


def test_shares_of_gpus_are_given_out_and_seen_by_the_worker(parallel, tmp_path):
    items = [of(str(index), fanout_tasks.visible, tmp_path / "go", gpu=0.5) for index in range(6)]
    most = 0

    def progress(states: Any) -> None:
        nonlocal most
        most = max(most, list(states.values()).count("running"))
        if most == 4:
            (tmp_path / "go").touch()

    outcomes = by_name(run(items, Resources(6, ["3", "7"]), parallel, progress=progress))
    assert sorted(outcomes[str(index)].value for index in range(4)) == ["3", "3", "7", "7"]
    assert {outcomes[name].value for name in ("4", "5")} <= {"3", "7"}
    assert most == 4  # two halves of each


def test_stop_begins_no_more(backend):
    stop, ended = Stop(), []
    for outcome in run([of(str(x), fanout_tasks.value, x) for x in range(9)], Resources(1), backend, stop=stop):
        ended.append(outcome.value)
        stop()
    assert ended == [0]


def test_stop_asks_then_kills(parallel, tmp_path):
    stop = Stop()
    items = [
        of("saves", fanout_tasks.save_when_asked, tmp_path / "saves"),
        of("stays", fanout_tasks.never_end, tmp_path / "stays"),
        of("waits", fanout_tasks.value, 1),
    ]

    def progress(states: object) -> None:
        if (tmp_path / "saves").exists() and (tmp_path / "stays").exists():
            stop()

    outcomes = by_name(run(items, Resources(2), parallel, stop=stop, grace=0.3, progress=progress))
    assert list(outcomes) == ["saves", "stays"]
    assert (tmp_path / "saves.saved").exists()
    assert "SystemExit: asked" in str(outcomes["saves"].error)
    assert fanout_tasks.killed(outcomes["stays"].error)
    assert gone(pids_from(tmp_path / "stays", 1)[0])


def test_iterator_closed_in_the_middle_asks_what_runs_to_end(parallel, tmp_path):
    items = [of("saves", fanout_tasks.save_when_asked, tmp_path / "saves"), of("go", fanout_tasks.value, 1)]
    lease = Held()
    items.append(of("third", fanout_tasks.save_when_asked, tmp_path / "third", lease=lease))
    with suppress(KeyError), closing(run(items, Resources(3), parallel)) as outcomes:
        next(outcomes)
        pids = [*pids_from(tmp_path / "saves", 1), *pids_from(tmp_path / "third", 1)]
        raise KeyError
    assert (tmp_path / "saves.saved").exists()
    assert all(gone(pid) for pid in pids)
    assert not lease.ours


def test_failure_of_one_that_the_others_must_follow_ends_them(parallel, tmp_path):
    items = [of("rank 0", fanout_tasks.never_end, tmp_path / "pid"), of("rank 1", fanout_tasks.fail, "first")]
    outcomes = list(run(items, Resources(2), parallel, follow=0.1))
    assert [outcome.item.name for outcome in outcomes] == ["rank 1", "rank 0"]
    assert fanout_tasks.killed(outcomes[1].error)


def test_lease_is_held_around_the_item_until_the_outcome_was_taken(backend):
    lease = Held()
    held = []
    item = of("a", fanout_tasks.value, 1, lease=lease, complete=lambda outcome: held.append(lease.ours))
    for outcome in run([item], Resources(1), backend):
        held.append((outcome.value, lease.ours))
    assert held == [True, (2, True)]
    assert (lease.calls[0], lease.calls[-1], lease.ours) == ("acquire", "release", False)


def test_arguments_are_made_with_the_lease_held_for_every_attempt(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(fanout, "RETRY_SECONDS", 0.01)
    lease, made = Held(), []

    def arguments() -> tuple[Path, int]:
        made.append(lease.ours)
        return tmp_path / "calls", 2

    (outcome,) = run([WorkItem("a", fanout_tasks.nth_time, arguments, lease=lease, retries=1)], Resources(1), backend)
    assert (outcome.value, outcome.attempts, made) == ("at last", 2, [True, True])


def test_item_that_is_done_takes_no_lease(backend):
    lease = Held()
    (outcome,) = run([of("a", fanout_tasks.fail, "ran", lease=lease, done=lambda held: True)], Resources(1), backend)
    assert (outcome.error, outcome.attempts, lease.calls) == (None, 0, [])


@pytest.mark.parametrize("name", ANY)
def test_two_fanouts_that_share_leases_run_each_item_once(name, tmp_path, request):
    def items() -> list[WorkItem]:
        paths = [tmp_path / str(index) for index in range(4)]
        leases = [Lease(LocalStore(tmp_path / f"leases/{index}")) for index in range(4)]
        return [
            WorkItem(path.name, fanout_tasks.note, (path,), lease=lease, done=lambda held, path=path: path.exists())
            for path, lease in zip(paths, leases, strict=True)
        ]

    def work() -> None:
        outcomes.extend(run(items(), Resources(2), made(name, request), look=0.01))

    outcomes: list[WorkOutcome] = []
    others = threading.Thread(target=work)
    others.start()
    work()
    others.join()
    assert [outcome.error for outcome in outcomes] == [None] * 8
    assert sum(outcome.attempts for outcome in outcomes) == 4
    assert [(tmp_path / str(index)).read_text() for index in range(4)] == ["ran\n"] * 4


def test_item_that_another_holds_is_waited_for_and_not_run_again(backend):
    lease, ran = Held(others=True), []
    looks = []

    def progress(states: Any) -> None:
        looks.append(states.get("a"))
        if looks.count("elsewhere") == 3:
            lease.others = False

    item = WorkItem(
        "a", ran.append, lambda: ran.append(1) or (), lease=lease, done=lambda held: held and not lease.others
    )
    items = [item, of("b", fanout_tasks.value, 1)]
    outcomes = by_name(run(items, Resources(1), backend, look=0.01, progress=progress))
    assert list(outcomes) == ["b", "a"]  # the other goes on meanwhile
    assert (outcomes["a"].attempts, ran) == (0, [])
    assert not lease.ours


def test_item_that_another_gives_up_is_taken_over(backend):
    lease = Held(others=True)

    def progress(states: Any) -> None:
        lease.others = lease.others and states.get("a") != "elsewhere"

    (outcome,) = run([of("a", fanout_tasks.value, 4, lease=lease)], Resources(1), backend, look=0.01, progress=progress)
    assert (outcome.value, outcome.attempts) == (8, 1)


def test_item_whose_lease_is_lost_is_killed_and_the_loss_is_its_outcome(parallel, tmp_path):
    lease = Held()

    def progress(states: object) -> None:
        lease.others = (tmp_path / "pid").exists()

    item = of("a", fanout_tasks.never_end, tmp_path / "pid", lease=lease, retries=3)
    (outcome,) = run([item], Resources(1), parallel, renew=0.01, progress=progress)
    assert isinstance(outcome.error, LeaseLost)
    assert gone(pids_from(tmp_path / "pid", 1)[0])


def test_source_gives_more_as_outcomes_come_and_ends_when_none_is_to_come(backend):
    results: list[int] = []

    def source() -> Iterator[WorkItem | None]:
        while True:
            last = results[-1] if results else 1
            is_free = len(results) == asked[0]
            asked[0] += is_free and last < 100
            yield of(f"{last}", fanout_tasks.value, last) if is_free and last < 100 else None

    asked = [0]
    for outcome in run(source(), Resources(2), backend):
        results.append(outcome.value)
    assert results == [2, 4, 8, 16, 32, 64, 128]


def test_error_of_completing_fails_the_attempt_and_what_cannot_be_sent_is_an_outcome(parallel):
    def complete(outcome: WorkOutcome) -> None:
        raise OSError("no room")

    items = [of("a", fanout_tasks.value, 1, complete=complete), of("b", fanout_tasks.value, threading.Lock())]
    outcomes = by_name(run(items, Resources(1), parallel))
    assert str(outcomes["a"].error) == "no room"
    assert outcomes["a"].value is None
    assert "Cannot send" in str(outcomes["b"].error)
    assert outcomes["b"].attempts == 0


def test_log_of_an_item_takes_what_it_prints(backend, tmp_path):
    list(run([of("a", fanout_tasks.talk, log=tmp_path / "log.txt")], Resources(1), backend))
    assert (tmp_path / "log.txt").read_text() == "said\n"


def test_timeout_kills_the_item(parallel, tmp_path):
    (outcome,) = run([of("a", fanout_tasks.never_end, tmp_path / "pid", timeout=0.1)], Resources(1), parallel)
    assert "killed after 0.1 s" in str(outcome.error)


def test_progress_tells_the_state_of_each_until_all_have_ended(backend):
    told = []
    list(run([of(str(x), fanout_tasks.value, x) for x in range(2)], Resources(1), backend, progress=told.append))
    assert {"0": "running"} in told
    assert {"1": "running"} in told
    assert told[-1] == {}


@LINUX
@pytest.mark.parametrize("name", PARALLEL)
def test_parent_that_is_killed_leaves_no_orphan(name, tmp_path):
    code = f"import fanout_tasks; fanout_tasks.main({str(tmp_path / 'pids')!r}, {name!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
    pids = pids_from(tmp_path / "pids", 2, within=120)  # Ray is started for it
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert all(gone(pid) for pid in pids)
