"""Calls by lines of JSON: answers out of order, cancelled calls, a process that dies or never starts."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from palestra.rollout.agents.lines import LineCalls

Other = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def talk(script: Callable[[LineCalls, Other], Awaitable[None]]) -> None:
    """Run a script with calls over one end of a socket pair, and the other end."""

    async def main() -> None:
        ours, theirs = socket.socketpair()

        async def gone() -> Exception:
            return RuntimeError("it is gone")

        calls = LineCalls(asyncio.open_connection(sock=ours), gone)
        await script(calls, await asyncio.open_connection(sock=theirs))

    asyncio.run(main())


async def received(other: Other) -> dict[str, Any]:
    return json.loads(await other[0].readline())


def answer(other: Other, **message: Any) -> None:
    other[1].write(json.dumps(message).encode() + b"\n")


def test_answers_in_any_order_reach_their_calls() -> None:
    async def script(calls: LineCalls, other: Other) -> None:
        asked = [asyncio.create_task(calls({"job": number})) for number in range(20)]
        jobs = [await received(other) for _ in asked]
        answer(other, id=None)  # such as a greeting
        answer(other, id=999, job=0)  # of no call
        for job in reversed(jobs):
            answer(other, id=job["id"], job=job["job"])
        assert [made["job"] for made in await asyncio.gather(*asked)] == list(range(20))
        assert not calls.waiting
        assert calls.open.is_set()

    talk(script)


def test_cancelled_call_is_told_and_its_late_answer_is_dropped() -> None:
    async def script(calls: LineCalls, other: Other) -> None:
        asked = asyncio.create_task(calls({"job": 1}))
        job = await received(other)
        asked.cancel()
        assert await received(other) == {"cancel": job["id"]}
        answer(other, id=job["id"])
        again = asyncio.create_task(calls({"job": 2}))
        answer(other, id=(await received(other))["id"], made=2)
        assert (await again)["made"] == 2
        assert asked.cancelled()

    talk(script)


@pytest.mark.parametrize("last", [b"", b'{"id": 0, "ma'])
def test_end_of_the_other_process_fails_what_waits(last: bytes) -> None:
    async def script(calls: LineCalls, other: Other) -> None:
        asked = [asyncio.create_task(calls({})) for _ in range(3)]
        for _ in asked:
            await received(other)
        other[1].write(last)
        other[1].close()
        for one in asked:
            with pytest.raises(RuntimeError, match="it is gone"):
                await one
        assert calls.ended
        assert calls.open.is_set()

    talk(script)


def test_process_that_cannot_start_fails_every_call() -> None:
    async def opening() -> Other:
        raise FileNotFoundError("no such program")

    async def gone() -> Exception:
        raise AssertionError("it never was")

    async def main() -> None:
        calls = LineCalls(opening(), gone)
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                await calls({})
        await calls.open.wait()
        assert calls.ended

    asyncio.run(main())
