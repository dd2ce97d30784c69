"""The executor with real workflows on a real loop: coroutines that wait, answer, fail."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator

import pytest

from palestra.errors import PalestraError
from palestra.rollout.event_loop import LoopThread
from palestra.rollout.executor import Executor
from palestra.rollout.types import Group, Trajectory
from palestra.runs.tree import flatten, unflatten
from palestra.spec.kinds.posttrain import RolloutSpec
from palestra.spec.tasks import TasksSpec
from palestra.tasks.stream import Prompts
from palestra.tasks.task import Problem, Status, Verdict, make_task


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread() as thread:
        yield thread


def prompts(seed: int = 0) -> Prompts:
    spec = TasksSpec.model_validate({"train": [{"task": "arithmetic", "args": {"digits": 2}}]})
    return Prompts(spec, {"arithmetic": make_task("arithmetic", {"digits": 2})}, seed)


def answer(version: int, reward: float = 1.0, status: Status = Status.CORRECT) -> Trajectory:
    verdict = Verdict(reward, status, note="made here")
    return Trajectory((1, 2), (False, True), (0.0, -1.0), (-1, version), reward, verdict, "eos", "2", ((1, 2),))


class World:
    """Workflows whose end is decided here, and the executor they run under."""

    def __init__(self, loop: LoopThread, **settings: object):
        self.started: list[tuple[int, int]] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.open = True
        self.loop = loop
        self.prompts = prompts()
        self.delays = lambda number: 0.0
        self.answers = lambda number, attempt, version: [answer(version, 1.0), answer(version, 0.0)]
        given = {name: settings.pop(name) for name in ("batch", "total", "filter") if name in settings}
        spec = RolloutSpec.model_validate({"group": 2, "max_filtered_batches": None, **settings})
        self.executor = Executor(self.prompts, self.start, spec, loop=loop, **{"batch": 4, **given})

    def start(self, problem: Problem, number: int, attempt: int) -> object:
        self.started.append((number, attempt))
        version = self.executor.version

        async def workflow() -> list[Trajectory]:
            if not self.open:
                await self.gates.setdefault(number, asyncio.Event()).wait()
            await asyncio.sleep(self.delays(number))
            return self.answers(number, attempt, version)

        return workflow()

    def release(self, *numbers: int) -> None:
        for number in numbers:
            self.loop.loop.call_soon_threadsafe(self.gates[number].set)

    def take(self) -> list[Group]:
        return self.executor.take(_rest)[0]

    def numbers(self) -> list[int]:
        return [number for number, _ in self.started]


def _rest(seconds: float) -> bool:
    time.sleep(0.001)
    return False


def settle(world: World, seconds: float = 0.05) -> None:
    """Let released workflows end and be taken in."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        world.executor.collect()
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("staleness", "version", "batch", "room"), [(2, 0, 4, 12), (0, 0, 4, 4), (2, 5, 4, 32), (4, 1, 3, 18)]
)
def test_admit_when_nothing_is_taken_follows_the_staleness_formula(loop, staleness, version, batch, room):
    world = World(loop, staleness=staleness, batch=batch)
    world.open = False
    world.executor.publish(version)
    world.executor.admit()
    assert world.numbers() == list(range(room))
    world.executor.admit()
    assert len(world.started) == room


def test_admit_with_a_limit_on_running_starts_no_more(loop):
    world = World(loop, staleness=3, running=5)
    world.open = False
    world.executor.admit()
    assert len(world.started) == 5
    world.release(2)
    settle(world)
    world.executor.admit()
    assert len(world.started) == 6


def test_take_gives_groups_by_number_whatever_ends_first(loop):
    world = World(loop)
    world.delays = lambda number: 0.03 if number % 2 == 0 else 0.0
    assert [group.number for group in world.take()] == [0, 1, 2, 3]
    world.executor.publish(1)
    assert [group.number for group in world.take()] == [4, 5, 6, 7]


def test_take_with_filtered_groups_refills_and_is_always_full(loop):
    world = World(loop, filter=lambda group: "odd" if group.number % 2 else None)
    taken, filtered = world.executor.take(_rest)
    assert [group.number for group in taken] == [0, 2, 4, 6]
    assert [group.number for group in filtered] == [1, 3, 5]
    assert world.executor.reasons == {"odd": 3}
    assert world.executor.metrics()["fate/filtered"] == 3
    assert world.executor.metrics()["fate/trained"] == 4


def test_take_at_staleness_zero_does_not_depend_on_timing(loop):
    def run(seed: int) -> list[list[int]]:
        world, draws = World(loop, filter=lambda group: "third" if group.number % 3 == 0 else None), random.Random(seed)
        delays = [draws.random() * 0.01 for _ in range(100)]
        world.delays = lambda number: delays[number]
        found = []
        for version in range(4):
            found.append([group.number for group in world.take()])
            world.executor.publish(version + 1)
        return found

    assert run(0) == run(1) == run(2)


@pytest.mark.parametrize("staleness", [1, 3])
def test_take_when_asynchronous_never_gives_answers_older_than_the_bound(loop, staleness):
    world, draws = World(loop, staleness=staleness), random.Random(staleness)
    delays = [draws.choice([0.0, 0.0, 0.02, 0.05]) for _ in range(400)]
    world.delays = lambda number: delays[number]
    trained: list[int] = []
    for version in range(12):
        groups = world.take()
        assert len(groups) == 4
        assert all(version - t.oldest <= staleness for group in groups for t in group.trajectories)
        trained += [group.number for group in groups]
        world.executor.publish(version + 1)
    assert len(set(trained)) == len(trained) == 48
    assert world.executor.metrics()["fate/stale"] == 0  # it waits instead
    assert max(group.version for group in groups) > 0


def test_take_with_a_group_about_to_be_too_old_waits_for_it(loop):
    world = World(loop, staleness=1, batch=2)
    world.open = False
    world.executor.admit()
    assert world.numbers() == [0, 1, 2, 3]
    world.release(1, 2, 3)
    settle(world)
    assert [group.number for group in world.take()] == [1, 2]  # 0 may still be one version behind
    world.executor.publish(1)
    world.executor.admit()
    world.release(4, 5)
    settle(world)
    released = threading.Event()
    threading.Timer(0.2, lambda: (released.set(), world.release(0))).start()
    assert [group.number for group in world.take()] == [0, 3]
    assert released.is_set()


def test_take_with_on_stale_drop_asks_the_prompt_again_with_its_number(loop):
    world = World(loop, staleness=1, batch=2, on_stale="drop")
    world.open = False
    world.executor.admit()
    world.release(1, 2, 3)
    settle(world)
    assert [group.number for group in world.take()] == [1, 2]
    world.executor.publish(1)
    world.executor.admit()
    world.release(4, 5)
    settle(world)
    assert [group.number for group in world.take()] == [3, 4]
    world.executor.publish(2)
    world.open = True
    world.release(0)
    settle(world)
    taken = world.take()
    assert world.executor.metrics()["fate/stale"] == 1
    assert (0, 1) in world.started  # the same number, another attempt
    world.executor.publish(3)
    assert 0 in [group.number for group in [*taken, *world.take()]]


def test_settle_with_an_answer_that_could_not_be_judged_leaves_a_partial_group(loop):
    world = World(loop)
    world.answers = lambda number, attempt, version: [answer(version), answer(version, 0.0, Status.ERROR)]
    groups = world.take()
    assert [len(group.trajectories) for group in groups] == [1] * 4
    assert [group.asked for group in groups] == [2] * 4


def test_take_when_a_workflow_fails_raises_with_its_own_error(loop):
    world = World(loop)

    def broken(number: int, attempt: int, version: int) -> list[Trajectory]:
        raise ZeroDivisionError("in the workflow")

    world.answers = broken
    with pytest.raises(PalestraError, match="ZeroDivisionError: in the workflow") as raised:
        world.take()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_take_with_failures_allowed_counts_and_replaces_them(loop):
    world = World(loop, failures=2)

    def sometimes(number: int, attempt: int, version: int) -> list[Trajectory]:
        if number in (1, 2):
            raise ValueError("no")
        return [answer(version)]

    world.answers = sometimes
    assert [group.number for group in world.take()] == [0, 3, 4, 5]
    assert world.executor.metrics()["fate/failed"] == 2


def test_admit_with_prompts_that_are_too_long_counts_and_goes_on(loop):
    world = World(loop)
    start = world.start
    world.executor._start = lambda problem, number, attempt: None if number < 3 else start(problem, number, attempt)
    assert [group.number for group in world.take()] == [3, 4, 5, 6]
    assert world.executor.metrics()["fate/too_long"] == 3


def test_admit_when_every_prompt_is_too_long_says_so(loop):
    world = World(loop)
    world.executor._start = lambda problem, number, attempt: None
    with pytest.raises(PalestraError, match="1000 prompts in a row are too long"):
        world.take()


def _saved(executor: Executor) -> dict:
    """The state as a checkpoint keeps it."""
    tree, leaves = flatten(executor.state())
    return unflatten(json.loads(json.dumps(tree)), {leaf.key: leaf.carrier for leaf in leaves})


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_state_after_kills_at_random_moments_trains_each_prompt_exactly_once(loop, staleness, seed):
    draws = random.Random(seed)
    world = World(loop, staleness=staleness)
    delays = [draws.choice([0.0, 0.005, 0.02]) for _ in range(2000)]
    world.delays = lambda number: delays[number]
    kept, chain, version = None, [], 0
    durable: list[tuple[int, str]] = []
    while version < 16:
        groups = world.take()
        chain += [(group.number, group.problem.id) for group in groups]
        version += 1
        world.executor.publish(version)
        world.executor.admit()
        if draws.random() < 0.5:
            kept, durable = (_saved(world.executor), version), list(chain)
        if draws.random() < 0.3:  # killed: another process goes on from the last checkpoint
            world = World(loop, staleness=staleness)
            world.delays = lambda number: delays[number]
            chain, version = list(durable), 0
            if kept is not None:
                world.executor.load_state(kept[0])
                version = kept[1]
    numbers = [number for number, _ in chain]
    assert len(numbers) == len(set(numbers)) == 16 * 4
    reference = prompts()
    ids = {number: reference.sample(number).id for number in range(max(numbers) + 1)}
    assert all(ids[number] == id for number, id in chain)
    if staleness == 0:
        assert numbers == list(range(64))
    else:  # none is lost: all numbers below the oldest one at work are trained
        state = world.executor.state()
        open_ = [number for number, _ in state["unfinished"]] + [one["number"] for one in state["ready"]]
        assert set(range(state["next"])) == set(numbers) | set(open_)


def test_describe_names_what_has_run_longest(loop):
    world = World(loop)
    world.open = False
    world.executor.admit()
    text = world.executor.describe()
    assert "0 of 4 groups are ready, 4 in flight" in text
    assert "number 0 (arithmetic/train/" in text


def test_admit_near_the_end_of_the_run_starts_no_prompt_that_it_has_no_use_for(loop):
    world = World(loop, staleness=4, batch=4, total=8)
    trained = []
    for version in range(2):
        trained += [group.number for group in world.take()]
        world.executor.publish(version + 1)
        world.executor.admit()
    assert trained == list(range(8))
    assert world.numbers() == list(range(8))


def test_take_when_resumed_with_a_smaller_staleness_asks_what_is_too_old_again(loop):
    world = World(loop, staleness=4)
    world.take()
    world.executor.publish(1)
    world.executor.admit()
    settle(world)
    saved = _saved(world.executor)
    again = World(loop, staleness=1)
    again.executor.load_state(saved)
    trained = []
    for version in range(1, 6):
        groups = again.take()
        assert all(version - group.oldest <= 1 for group in groups)
        trained += [group.number for group in groups]
        again.executor.publish(version + 1)
    assert len(set(trained)) == len(trained) == 20
    assert again.executor.metrics()["fate/stale"] > 0


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_settle_with_a_reward_that_is_no_number_leaves_the_answer_out(loop, reward):
    world = World(loop)
    world.answers = lambda number, attempt, version: [answer(version), answer(version, reward)]
    assert [len(group.trajectories) for group in world.take()] == [1] * 4


def test_take_with_an_answer_of_no_tokens_is_not_asked_again(loop):
    world = World(loop)
    empty = Trajectory((1,), (False,), (0.0,), (-1,), 0.0, Verdict(0.0, Status.WRONG), "eos", "")
    world.answers = lambda number, attempt, version: [empty, empty]
    for version in range(3):
        assert len(world.take()) == 4
        world.executor.publish(version + 1)
    assert world.executor.metrics()["fate/stale"] == 0


def test_take_when_filters_leave_nothing_says_so_in_the_log(loop, caplog):
    world = World(loop, filter=lambda group: "zero_variance")
    ends = time.monotonic() + 20

    def work(seconds: float) -> bool:
        if caplog.records or time.monotonic() > ends:
            raise InterruptedError
        return _rest(seconds)

    with pytest.raises(InterruptedError):
        world.executor.take(work)
    assert "32 groups in a row were filtered out (zero_variance 32), and 0 of 4 are ready" in caplog.text


def test_take_when_filters_leave_nothing_ends_with_how_many_and_why(loop):
    world = World(
        loop, filter=lambda group: "zero_variance" if group.number % 4 else "too_short", max_filtered_batches=3
    )
    told = r"12 groups since the last batch .*zero_variance 9, too_short 3.*rewards: 0, 1"
    with pytest.raises(PalestraError, match=told):
        world.take()


def test_take_that_trains_now_and_then_is_not_ended_by_what_filters_took_out(loop):
    world = World(loop, filter=lambda group: "zero_variance" if group.number % 3 else None, max_filtered_batches=3)
    for version in range(4):
        assert len(world.take()) == 4
        world.executor.publish(version + 1)
    assert world.executor.totals["filtered"] > 3 * 4


def test_max_filtered_counts_on_after_a_resume(loop):
    world = World(loop, filter=lambda group: "zero_variance", max_filtered_batches=3)
    world.executor.admit()
    settle(world)
    again = World(loop, filter=lambda group: "zero_variance", max_filtered_batches=3)
    again.executor.load_state(world.executor.state())
    with pytest.raises(PalestraError, match="12 groups since the last batch"):
        again.take()
    assert again.executor.totals["filtered"] == 12


def test_take_a_rollout_beyond_its_time_is_cancelled_and_another_prompt_takes_its_place(loop, caplog):
    world = World(loop, timeout_seconds=0.2)
    world.delays = lambda number: 60.0 if number == 1 else 0.0
    assert [group.number for group in world.take()] == [0, 2, 3, 4]
    assert world.executor.metrics()["fate/timeout"] == 1
    assert world.executor.metrics()["fate/failed"] == 0
    assert "took longer than 0.2 s and was cancelled" in caplog.text


def test_take_when_every_rollout_takes_too_long_ends_the_run(loop):
    world = World(loop, timeout_seconds=0.02, max_filtered_batches=2)
    world.delays = lambda number: 60.0
    with pytest.raises(PalestraError, match=r"8 groups since the last batch are not trained on \(timeout 8\)"):
        world.take()


def test_take_a_timeout_that_the_workflow_raises_itself_is_a_failure(loop):
    world = World(loop, timeout_seconds=60.0)

    def own(number, attempt, version):
        raise TimeoutError("a tool of the workflow")

    world.answers = own
    with pytest.raises(PalestraError, match="failed: TimeoutError: a tool of the workflow"):
        world.take()


@pytest.mark.parametrize(("on_timeout", "left"), [("zero", 2), ("exclude", 1)])
def test_take_a_completion_the_verifier_had_no_time_for_counts_as_zero_or_not_at_all(loop, on_timeout, left, caplog):
    world = World(loop, on_timeout=on_timeout)
    world.answers = lambda number, attempt, version: [answer(version), answer(version, 0.0, Status.TIMEOUT)]
    assert [len(group.trajectories) for group in world.take()] == [left] * 4
    assert ("1 of 2 completions not verified" in caplog.text) == (on_timeout == "exclude")


def test_take_a_group_without_one_completion_that_was_judged_in_time_is_replaced(loop):
    world = World(loop, on_timeout="exclude")
    late = [answer(0, 0.0, Status.TIMEOUT)] * 2
    world.answers = lambda number, attempt, version: late if number == 0 else [answer(version)]
    assert [group.number for group in world.take()] == [1, 2, 3, 4]
    assert world.executor.metrics()["fate/timeout"] == 1


def test_loop_that_a_workflow_blocks_is_left_behind(caplog):
    free = threading.Event()

    async def blocking() -> None:
        free.wait()

    loop = LoopThread()
    loop.start(blocking())
    started = time.monotonic()
    loop.close(0.1)
    assert time.monotonic() - started < 30
    assert "blocks the event loop" in caplog.text
    free.set()
    loop.close()
