"""The watch over rollouts: a loop that is really blocked, coroutines that really hang, and what a stall waits for."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator

import pytest

from palestra.rollout.event_loop import LoopLag, LoopThread, RolloutWatchdog, stacks


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread() as made:
        yield made


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """The messages so far that begin so."""
    caplog.set_level(logging.WARNING, "palestra.rollout")
    return lambda beginning: [one for one in caplog.messages if one.startswith(beginning)]


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


async def block_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def wait_for_nobody() -> None:
    await asyncio.Event().wait()


async def ask_somebody() -> None:
    await wait_for_nobody()


# ---- lag


def test_lag_of_a_loop_that_is_blocked_is_how_long_it_was_blocked(loop: LoopThread) -> None:
    lag = LoopLag(every=0.02)
    loop.start(lag.run())
    time.sleep(0.2)
    loop.start(block_the_loop(0.6)).result()
    loop.start(asyncio.sleep(0.1)).result()
    found = lag.take()
    assert 0.5 < found["time/loop_lag_max"] < 30
    assert 0 <= found["time/loop_lag_mean"] < found["time/loop_lag_max"]


def test_lag_of_a_loop_that_is_free_is_far_below_one_that_is_blocked(loop: LoopThread) -> None:
    lag = LoopLag(every=0.02)
    loop.start(lag.run())
    means = []
    for _ in range(5):  # a machine may stall for a moment: the best of several
        time.sleep(0.2)
        means.append(lag.take()["time/loop_lag_mean"])
    assert min(means) < 0.1


def test_lag_is_told_while_the_loop_is_still_blocked(loop: LoopThread) -> None:
    lag = LoopLag(every=0.02)
    loop.start(lag.run())
    time.sleep(0.1)
    lag.take()
    blocked = loop.start(block_the_loop(2.0))
    time.sleep(0.5)
    assert lag.take()["time/loop_lag_max"] > 0.3
    assert not blocked.done()


def test_lag_is_of_the_time_since_it_was_last_taken(loop: LoopThread) -> None:
    lag = LoopLag(every=0.02)
    assert lag.take() == {"time/loop_lag_mean": 0.0, "time/loop_lag_max": 0.0}
    running = loop.start(lag.run())
    loop.start(block_the_loop(0.5)).result()
    loop.start(asyncio.sleep(0.1)).result()
    first = lag.take()
    running.cancel()
    loop.start(asyncio.sleep(0)).result()
    time.sleep(0.1)
    assert first["time/loop_lag_max"] > 0.3
    assert lag.take() == {"time/loop_lag_mean": 0.0, "time/loop_lag_max": 0.0}, "nothing is due any more"


# ---- stalls


def test_stall_of_a_hung_coroutine_tells_every_frame_that_waits_and_who_waits_for_whom(
    loop: LoopThread, told: Callable[[str], list[str]]
) -> None:
    hung = loop.start(ask_somebody())
    with RolloutWatchdog(0.2, lambda: "the batch lacks prompt 7", loop.loop):
        until(lambda: told("groups in flight"))
        time.sleep(0.6)
    (report,) = told("no progress for")
    assert "in ask_somebody\n    await wait_for_nobody()" in report
    assert "in wait_for_nobody\n    await asyncio.Event().wait()" in report
    assert "in wait\n    await fut" in report
    assert "thread MainThread" in report
    assert "thread rollout" in report
    assert "thread watchdog\n" not in report
    assert told("groups in flight") == ["groups in flight: the batch lacks prompt 7"]
    assert not hung.done(), "it ends nothing"


def test_stall_of_a_blocked_loop_shows_the_line_that_blocks_it(
    loop: LoopThread, told: Callable[[str], list[str]]
) -> None:
    loop.start(block_the_loop(2.0))
    with RolloutWatchdog(0.2, lambda: "", loop.loop):
        until(lambda: told("no progress for"))
    assert "in block_the_loop\n    time.sleep(seconds)" in told("no progress for")[0]


def test_stall_shows_where_other_threads_are(loop: LoopThread, told: Callable[[str], list[str]]) -> None:
    free = threading.Event()

    def hold_on() -> None:
        free.wait()

    thread = threading.Thread(target=hold_on, name="a verifier")
    thread.start()
    try:
        with RolloutWatchdog(0.1, lambda: "", loop.loop):
            until(lambda: told("no progress for"))
    finally:
        free.set()
        thread.join()
    report = told("no progress for")[0]
    assert "thread a verifier" in report
    assert "in hold_on\n    free.wait()" in report


def test_stall_is_told_once_and_the_next_one_again(loop: LoopThread, told: Callable[[str], list[str]]) -> None:
    with RolloutWatchdog(0.15, lambda: "", loop.loop) as watchdog:
        for count in (1, 2, 3):
            until(lambda count=count: len(told("no progress for")) == count)
            time.sleep(0.5)
            assert len(told("no progress for")) == count
            watchdog.progress()


def test_progress_now_and_then_is_no_stall(loop: LoopThread, told: Callable[[str], list[str]]) -> None:
    with RolloutWatchdog(20.0, lambda: "", loop.loop) as watchdog:
        for _ in range(10):
            time.sleep(0.05)
            watchdog.progress()
    assert told("") == []


def test_description_that_fails_is_told_and_the_watch_goes_on(
    loop: LoopThread, told: Callable[[str], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    def describe() -> str:
        raise RuntimeError("dictionary changed size during iteration")

    with RolloutWatchdog(0.1, describe, loop.loop) as watchdog:
        until(lambda: told("the groups in flight could not be described"))
        watchdog.progress()
        until(lambda: len(told("no progress for")) == 2)
    assert "dictionary changed size" in caplog.text
    assert len(told("no progress for")) == 2, "the stacks are told whatever becomes of the description"


def test_watch_that_is_left_has_ended_its_thread(loop: LoopThread) -> None:
    start = time.monotonic()
    with RolloutWatchdog(600.0, lambda: "", loop.loop):
        assert any(thread.name == "watchdog" for thread in threading.enumerate())
    assert time.monotonic() - start < 20
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_stacks_follow_generators_and_groups_of_tasks(loop: LoopThread) -> None:
    async def numbers() -> AsyncGenerator[int, None]:
        yield 1
        await wait_for_nobody()
        yield 2

    async def reads() -> None:
        async for _ in numbers():
            pass

    async def gathers() -> None:
        await asyncio.gather(reads(), ask_somebody())

    loop.start(gathers())
    loop.start(asyncio.sleep(0.1)).result()
    text = stacks(loop.loop)
    for line in ("in gathers", "in reads", "in ask_somebody", "in wait_for_nobody"):
        assert line in text
    assert "wait_for=<_GatheringFuture pending" in text


def test_stacks_of_a_loop_without_tasks_are_those_of_the_threads(loop: LoopThread) -> None:
    assert "thread rollout" in stacks(loop.loop)
    assert "<Task" not in stacks(loop.loop)
