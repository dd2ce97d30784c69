import asyncio
import threading
import time

import pytest
from small_lm import small_model
from test_generate_engine import engine_of, prompt_of

from palestra.errors import PalestraError
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Request, Sampling

LONG = Sampling(seed=1, max_new_tokens=90)


def idle(generator):
    metrics = generator.metrics()
    return (metrics["running"], metrics["waiting"], metrics["requests"]) == (0, 0, 0)


async def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def test_generate_many_at_once_gives_what_each_gets_alone():
    requests = [Request(prompt_of(2 + i, i), Sampling(seed=i, max_new_tokens=5 + i), n=1 + i % 3) for i in range(12)]
    alone = [engine_of().run([request])[0].generations for request in requests]

    async def all_together(generator):
        return await asyncio.gather(*(generator.generate(request) for request in requests))

    with LocalGenerator(engine_of()) as generator:
        results = asyncio.run(all_together(generator))
        assert [result.generations for result in results] == alone
        # Another loop, after the first one was closed.
        assert [r.generations for r in asyncio.run(all_together(generator))] == alone


def test_stream_read_to_its_end_leaves_another_request_of_its_id_alone():
    sampling = Sampling(seed=1, max_new_tokens=4)

    async def follow(generator):
        stream = generator.stream(Request(prompt_of(5), sampling, id="mine"))
        while (await anext(stream)).stop_reason is None:
            pass
        await until(lambda: idle(generator))
        other = asyncio.create_task(generator.generate(Request(prompt_of(5), LONG, id="mine")))
        await until(lambda: not idle(generator))
        assert [chunk async for chunk in stream] == []
        return await other

    with LocalGenerator(engine_of(burst=1)) as generator:
        assert len(asyncio.run(follow(generator)).generations[0].tokens) == 90


def test_publish_is_not_kept_waiting_by_a_busy_engine():
    async def measure(generator):
        task = asyncio.create_task(generator.generate(Request(prompt_of(5), Sampling(max_new_tokens=3000))))
        await until(lambda: generator.metrics()["generated_tokens"] > 3)
        before = generator.metrics()["generated_tokens"]
        for version in range(1, 6):
            await generator.publish(generator.engine.model.state_dict(), version)
        between = generator.metrics()["generated_tokens"] - before
        task.cancel()
        return between

    with LocalGenerator(engine_of(small_model(context=4000), burst=1)) as generator:
        assert asyncio.run(measure(generator)) < 500


def test_close_fails_what_is_at_work_and_ends_the_thread():
    async def close(generator):
        task = asyncio.create_task(generator.generate(Request(prompt_of(5), Sampling(max_new_tokens=3000))))
        await until(lambda: generator.metrics()["running"] == 1)
        await asyncio.to_thread(generator.close)
        with pytest.raises(PalestraError, match="closed"):
            await task

    before = threading.active_count()
    generator = LocalGenerator(engine_of(small_model(context=4000), burst=1))
    asyncio.run(close(generator))
    assert threading.active_count() == before


def test_driven_by_the_caller_nothing_happens_between_bursts():
    engine = engine_of(burst=1)
    generator = LocalGenerator(engine, drive="caller")

    async def drive():
        task = asyncio.create_task(generator.generate(Request(prompt_of(5), Sampling(seed=1, max_new_tokens=6))))
        await asyncio.sleep(0.02)
        assert generator.metrics()["generated_tokens"] == 0
        bursts = 0
        while not task.done():
            bursts += engine.burst()
            await asyncio.sleep(0)
        return bursts, await task

    bursts, result = asyncio.run(drive())
    assert bursts == 6
    assert (
        result.generations
        == engine_of().run([Request(prompt_of(5), Sampling(seed=1, max_new_tokens=6))])[0].generations
    )
