"""Hosted objects: calls, streams, cancellation, and every way in which one can be lost."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client

import psutil
import pytest
from cluster_things import Counter, Odd, broken

from palestra.cluster.actor import Actor, ActorLost, Hub
from palestra.cluster.crew import Crew
from palestra.cluster.versions import versions
from palestra.errors import PalestraError
from palestra.work.fanout import Processes


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    opened = Hub(Processes("test", heartbeat_timeout=None), silence=2.0)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def counter(hub: Hub) -> Actor:
    actor = hub.start("counter/0", Counter, 5, log=None)
    actor.ready.result(30)
    return actor


def waited(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_methods_and_coroutines_are_called_in_another_process_and_may_overlap(counter: Actor) -> None:
    assert counter.call("add", 3).result(10) == 8
    assert counter.call("pid").result(10) == counter.pid != os.getpid()
    slow = counter.call("sleep", 0.2)
    assert counter.call("add", 1).result(10) == 6
    assert slow.result(10) == "slept"
    waited(lambda: counter.status == {"value": 5})


def test_errors_are_those_that_were_raised_and_leave_it_alive(hub: Hub, counter: Actor) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        counter.call("fail").result(10)
    with pytest.raises(AttributeError, match="absent"):
        counter.call("absent").result(10)
    assert counter.call("add", 1).result(10) == 6
    odd = hub.start("odd/0", Odd, log=None)
    with pytest.raises(PalestraError, match="Unpicklable: 1 2"):
        odd.call("fail").result(30)


def test_stream_gives_its_items_and_ends_there_when_it_is_closed_here(counter: Actor) -> None:
    async def first(items: int) -> list[int]:
        found = []
        stream = counter.stream("count", 10 if items == 10 else 10**6)
        async for item in stream:
            found.append(item)
            if len(found) == items:
                break
        await stream.aclose()
        return found

    assert asyncio.run(first(10)) == list(range(10))
    assert asyncio.run(first(3)) == [0, 1, 2]
    assert counter.call("add", 0).result(10) == 5


def test_cancelled_call_is_cancelled_there(counter: Actor) -> None:
    slow = counter.call("sleep", 60)
    assert counter.call("add", 1).result(10) == 6
    assert slow.cancel()
    assert counter.call("sleep", 0).result(10) == "slept"


def test_killed_actor_fails_its_calls_at_once_and_says_how_it_died(hub: Hub) -> None:
    actor = hub.start("counter/1", Counter, 1, log=None)
    pid = actor.call("pid").result(30)
    pending = actor.call("sleep", 60)
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ActorLost, match=r"counter/1 ended: .*SIGKILL"):
        pending.result(10)
    assert time.monotonic() - began < 5
    with pytest.raises(ActorLost):
        actor.call("add", 1).result(1)


def test_stopped_actor_is_noticed_and_its_process_killed(hub: Hub) -> None:
    actor = hub.start("counter/2", Counter, 1, log=None)
    pid = actor.call("pid").result(30)
    pending = actor.call("sleep", 60)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(ActorLost, match=r"counter/2 \(process \d+ on .*\) has not answered for 2 s"):
        pending.result(20)
    assert time.monotonic() - began < 8
    waited(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_object_that_cannot_be_made_says_why(hub: Hub) -> None:
    with pytest.raises(ActorLost, match="it cannot be made"):
        hub.start("broken/0", broken, log=None).ready.result(30)


def test_answer_of_one_that_was_given_up_is_refused_and_counted(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = hub.start("counter/3", Counter, 1, log=None)
    actor.ready.result(30)
    late = hub.late
    # Its process is on a machine that was cut off: it cannot be killed, and speaks again later.
    monkeypatch.setattr(actor.handle, "cancel", lambda: True)
    monkeypatch.setattr(actor._wire, "close", lambda seconds=0.0: None)
    pending = actor.call("sleep", 0.5)
    actor.lose("was cut off")
    with pytest.raises(ActorLost, match="cut off"):
        pending.result(1)
    waited(lambda: hub.late > late)


def test_other_versions_are_refused_and_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_versions", {**versions(), "palestra": "0.2"})
    with pytest.raises(ActorLost, match=r"the worker on .* has palestra .*, the driver 0.2: install the same on both"):
        hub.start("counter/4", Counter, 1, log=None).ready.result(30)


def test_strangers_cannot_connect(hub: Hub, counter: Actor) -> None:
    with pytest.raises((OSError, EOFError, Exception)) as refused:
        Client(hub._listener.address, authkey=b"guess")
    assert "digest" in str(refused.value) or isinstance(refused.value, (OSError, EOFError))
    with socket.create_connection(hub._listener.address) as line:  # one that says nothing blocks nobody
        line.send(b"x")
        assert counter.call("add", 2).result(10) == 7


def crew_of(hub: Hub, size: int, name: str) -> Crew:
    return Crew(name, size, lambda member: hub.start(member, Counter, 1, log=None))


def test_crew_shares_calls_replaces_the_dead_and_asks_again(hub: Hub) -> None:
    crew = crew_of(hub, 2, "sharing")

    async def many() -> list[int]:
        return await asyncio.gather(*(crew.call("busy", 0.3) for _ in range(6)))

    waited(lambda: len(crew.ready()) == 2)
    assert len(set(asyncio.run(many()))) == 2
    victim = crew.ready()[0].pid

    async def killed() -> list[int]:
        calls = [asyncio.ensure_future(crew.call("busy", 0.5)) for _ in range(4)]
        await asyncio.sleep(0.2)
        os.kill(victim, signal.SIGKILL)
        return await asyncio.gather(*calls)

    pids = asyncio.run(killed())
    assert len(pids) == 4
    assert victim not in pids
    assert (crew.lost, crew.asked_again) == (1, 2)
    waited(lambda: len(crew.ready()) == 2)
    assert victim not in [member["pid"] for member in crew.members()]
    crew.close()


def test_crew_keeps_calls_with_one_key_on_one_member(hub: Hub) -> None:
    crew = crew_of(hub, 2, "keyed")
    waited(lambda: len(crew.ready()) == 2)

    async def turns() -> list[set[int]]:
        async def one(key: int) -> set[int]:
            return {await crew.call("busy", 0.02, key=key) for _ in range(4)}

        return await asyncio.gather(*(one(key) for key in range(4)))

    groups = asyncio.run(turns())
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == 2
    crew.close()


def test_members_join_and_leave_after_their_calls(hub: Hub) -> None:
    crew = crew_of(hub, 1, "changing")
    waited(lambda: len(crew.ready()) == 1)
    with pytest.raises(PalestraError, match="only one left"):
        crew.remove()
    assert crew.add() == ["changing/1"]
    waited(lambda: len(crew.ready()) == 2)

    async def leave() -> int:
        call = asyncio.ensure_future(crew.call("busy", 0.5))
        await asyncio.sleep(0.1)
        assert crew.remove("changing/0") == "changing/0"
        return await call

    assert asyncio.run(leave())
    waited(lambda: [member["name"] for member in crew.members()] == ["changing/1"])
    assert (crew.lost, crew.asked_again) == (0, 0)
    with pytest.raises(PalestraError, match="there is no changing/9; there are changing/1"):
        crew.remove("changing/9")
    crew.close()


def test_crew_whose_members_cannot_start_fails_with_their_error(hub: Hub) -> None:
    crew = Crew("hopeless", 1, lambda name: hub.start(name, broken, log=None))
    with pytest.raises(PalestraError, match=r"3 times in a row a hopeless could not start.*"):
        asyncio.run(asyncio.wait_for(crew.call("add", 1), 30))


def test_member_that_cannot_start_is_given_up_while_others_work(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    makers = iter([Counter])
    crew = Crew("partly", 1, lambda name: hub.start(name, *next(((make, 1) for make in makers), (broken,)), log=None))
    waited(lambda: len(crew.ready()) == 1)
    crew.add()
    waited(lambda: "partly/1 is given up, and the others go on" in caplog.text, 60)
    assert asyncio.run(crew.call("add", 1)) == 2
    assert [member["name"] for member in crew.members()] == ["partly/0"]
    crew.close()
