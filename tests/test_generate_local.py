import asyncio
import threading
import time

import pytest
from small_lm import overflowing, small_model
from test_generate_engine import engine_of, prompt_of

from palestra.errors import PalestraError
from palestra.generate.engine.engine import PromptTooLong
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Request, Sampling, StopReason

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


def test_stream_read_to_the_end_gives_the_chunks_of_the_result():
    request = Request(prompt_of(5), Sampling(seed=1, max_new_tokens=20), n=2)

    async def read(generator):
        return [chunk async for chunk in generator.stream(request)]

    with LocalGenerator(engine_of(burst=3)) as generator:
        chunks = asyncio.run(read(generator))
    (expected,) = engine_of().run([request])
    for index, generation in enumerate(expected.generations):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert len(mine) > 3
        assert tuple(token for chunk in mine for token in chunk.tokens) == generation.tokens
        assert mine[-1].stop_reason == generation.stop_reason


def test_cancelled_await_frees_the_slot():
    async def cancel(generator):
        task = asyncio.create_task(generator.generate(Request(prompt_of(5), LONG, n=4)))
        await until(lambda: generator.metrics()["running"] == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: idle(generator))

    with LocalGenerator(engine_of(small_model(context=4000), burst=1)) as generator:
        asyncio.run(cancel(generator))


def test_stream_left_early_frees_the_slot():
    async def leave(generator):
        stream = generator.stream(Request(prompt_of(5), Sampling(max_new_tokens=3000), n=2))
        async for chunk in stream:
            assert chunk.tokens
            break
        await stream.aclose()
        await until(lambda: idle(generator))

    with LocalGenerator(engine_of(small_model(context=4000), burst=1)) as generator:
        asyncio.run(leave(generator))


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


def test_abort_returns_what_there_is():
    async def abort(generator):
        request = Request(prompt_of(5), Sampling(seed=1, max_new_tokens=3000), id="mine")
        task = asyncio.create_task(generator.generate(request))
        await until(lambda: generator.metrics()["generated_tokens"] > 3)
        await generator.abort("mine")
        return await task

    with LocalGenerator(engine_of(small_model(context=4000), burst=1)) as generator:
        generation = asyncio.run(abort(generator)).generations[0]
    assert generation.stop_reason == StopReason.ABORT
    assert 0 < len(generation.tokens) == len(generation.logprobs) < 3000


def test_pause_publish_resume_changes_version_and_weights_between_tokens():
    new = small_model(1, context=1000)

    async def follow(generator):
        request = Request(prompt_of(5), Sampling(seed=1, max_new_tokens=500))
        task = asyncio.create_task(generator.generate(request))
        await until(lambda: generator.metrics()["generated_tokens"] > 3)
        await generator.pause()
        count = generator.metrics()["generated_tokens"]
        await asyncio.sleep(0.05)
        assert generator.metrics()["generated_tokens"] == count
        await generator.publish(new.state_dict(), 5, keep_cache=False)
        await generator.resume()
        result = await task
        assert result.generations[0].versions == (0,) * int(count) + (5,) * int(500 - count)

    with LocalGenerator(engine_of(small_model(0, context=1000), burst=2)) as generator:
        asyncio.run(follow(generator))


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


def test_refused_request_raises_and_leaves_nothing():
    async def ask(generator):
        with pytest.raises(PromptTooLong):
            await generator.generate(Request(prompt_of(96)))
        with pytest.raises(PromptTooLong):
            async for _ in generator.stream(Request(prompt_of(96))):
                pass

    with LocalGenerator(engine_of()) as generator:
        asyncio.run(ask(generator))
        assert idle(generator)


def test_failure_in_a_burst_reaches_every_waiting_and_later_call():
    bad = overflowing(small_model())

    async def fail(generator):
        await generator.pause()
        tasks = [asyncio.create_task(generator.generate(Request(prompt_of(5), LONG))) for _ in range(3)]
        stream = generator.stream(Request(prompt_of(4), LONG))
        first = asyncio.create_task(anext(stream))
        await until(lambda: generator.metrics()["requests"] == 4)
        await generator.publish(bad, 1)
        await generator.resume()
        for task in [*tasks, first]:
            with pytest.raises(PalestraError, match="no numbers"):
                await task
        with pytest.raises(PalestraError, match="no numbers"):
            await generator.generate(Request(prompt_of(5)))

    with LocalGenerator(engine_of()) as generator:
        asyncio.run(fail(generator))


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
