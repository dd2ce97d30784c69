"""The contract of `Generator` (palestra/generate/types.py): every implementation passes this suite unchanged.

A new implementation is one function that opens it over a tiny engine, and one line in `IMPLEMENTATIONS`.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cluster_things import Threads, hosted_tiny_engine
from conftest import fast_only
from engine_servers import remote, vllm_server
from small_lm import overflowing
from tiny_server import CONTEXT, KEY, TOKENIZER, serving, tiny_engine, tiny_model

from palestra.cluster.actor import Actor, Hub
from palestra.cluster.crew import Crew
from palestra.cluster.files import Files
from palestra.cluster.fleet import Fleet
from palestra.errors import PalestraError, UsageError
from palestra.generate.client import HttpGenerator
from palestra.generate.engine.engine import Engine, PromptTooLong, QueueFull
from palestra.generate.local import LocalGenerator
from palestra.generate.remote.dialects import Vllm
from palestra.generate.types import Chunk, Generator, Guide, Request, Sampling, StopReason
from palestra.lm.batch import Batch, forward
from palestra.lm.head import logits

PROMPT = tuple(TOKENIZER.encode("Once upon a time"))
ENDLESS = Sampling(max_new_tokens=170, ignore_eos=True)
Metrics = Callable[[], Mapping[str, float]]
"""What is running behind a generator: `requests`, `running` (samples) and `generated_tokens`."""
Opened = AbstractAsyncContextManager[tuple[Generator, Metrics]]
SECONDS = 10.0
"""How soon a generator that died has failed its requests, and what nobody waits for any more is gone."""


@asynccontextmanager
async def local(**settings: Any) -> AsyncIterator[tuple[Generator, Metrics]]:
    with LocalGenerator(tiny_engine(**settings), drive="thread") as generator:
        yield generator, generator.metrics


@asynccontextmanager
async def driven_by_its_caller(**settings: Any) -> AsyncIterator[tuple[Generator, Metrics]]:
    generator, closed = LocalGenerator(tiny_engine(**settings), drive="caller"), threading.Event()

    def drive() -> None:
        while not closed.is_set() and generator.engine.failure is None:
            with suppress(Exception):  # a burst that fails has failed its requests
                generator.work(0.01)

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield generator, generator.metrics
    finally:
        closed.set()
        thread.join()


@asynccontextmanager
async def over_http(**settings: Any) -> AsyncIterator[tuple[Generator, Metrics]]:
    with serving(engine=tiny_engine(**settings)) as (address, engine):
        async with HttpGenerator(address, KEY) as generator:
            yield generator, engine.metrics


@asynccontextmanager
async def fleet(**settings: Any) -> AsyncIterator[tuple[Generator, Metrics]]:
    with TemporaryDirectory() as folder:
        hub, channel = Hub(Threads()), Files(folder)
        generators = Fleet(hub, channel)

        def start(name: str) -> Actor:
            return hub.start(name, hosted_tiny_engine, channel.address, settings, log=None)

        generators.crew = Crew("generator", 1, start, generators.prepare, generators.prepared)
        try:
            await until(lambda: len(generators.crew.ready()) == 1)
            members = generators.crew.ready()

            def metrics() -> Mapping[str, float]:
                found = [actor.call("metrics").result(SECONDS) for actor in members]
                return {name: sum(one[name] for one in found) for name in found[0]}

            yield generators, metrics
        finally:
            generators.crew.close()
            hub.close()


@asynccontextmanager
async def over_vllm(memory: bool = False, **settings: Any) -> AsyncIterator[tuple[Generator, Metrics]]:
    engine = tiny_engine(**settings)
    with (
        vllm_server(engine, KEY) as (address, problems),
        remote(address, Vllm(memory=memory), api_key=KEY) as generator,
    ):
        async with generator:
            yield generator, engine.metrics
        assert not problems


IMPLEMENTATIONS = {
    "local": local,
    "caller": driven_by_its_caller,
    "http": over_http,
    "vllm": over_vllm,
    "vllm_memory": partial(over_vllm, memory=True),
    "fleet": fleet,
}


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def opened(request: pytest.FixtureRequest) -> Callable[..., Opened]:
    return request.param


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def idle(metrics: Metrics) -> bool:
    numbers = metrics()
    return numbers["requests"] == numbers["running"] == 0


async def joined(generator: Generator, request: Request) -> list[Chunk]:
    """The stream of a request, its chunks put together by index."""
    whole = [Chunk(index, (), (), ()) for index in range(request.n)]
    async for chunk in generator.stream(request):
        before = whole[chunk.index]
        assert before.stop_reason is None
        whole[chunk.index] = Chunk(
            chunk.index,
            before.tokens + chunk.tokens,
            before.logprobs + chunk.logprobs,
            before.versions + chunk.versions,
            before.text + chunk.text,
            chunk.stop_reason,
            before.top + chunk.top,
        )
    return whole


def test_generate_with_a_seed_gives_what_the_engine_gives_bit_for_bit(opened: Callable[..., Opened]) -> None:
    requests = [
        Request(PROMPT, Sampling(max_new_tokens=20, seed=1, logprobs=3), n=3),
        Request(PROMPT[:5], Sampling(max_new_tokens=20, seed=-5, temperature=0.5, top_k=7, top_p=0.9, min_p=0.01)),
        Request(PROMPT, Sampling(max_new_tokens=20, temperature=0.0)),
        Request(PROMPT, Sampling(max_new_tokens=20, seed=2, logit_bias={5: 3.0, 9: -1.5}, repetition_penalty=1.2)),
        Request(PROMPT, Sampling(max_new_tokens=20, seed=2, frequency_penalty=0.3, presence_penalty=-0.4)),
        Request(PROMPT, Sampling(max_new_tokens=60, seed=2, guide=Guide(regex="[a-z]{3,5}: [0-9]{2}!")), n=2),
        Request(PROMPT, Sampling(max_new_tokens=60, seed=2, guide=Guide(choice=("yes", "no")))),
    ]
    expected = tiny_engine().run(requests)

    async def check() -> None:
        async with opened() as (generator, _):
            results = await asyncio.gather(*map(generator.generate, requests))
            assert [one.generations for one in results] == [one.generations for one in expected]
            assert [one.prompt for one in results] == [one.prompt for one in expected]
            for request, result in zip(requests, expected, strict=True):
                for chunk, generation in zip(await joined(generator, request), result.generations, strict=True):
                    assert chunk.tokens == generation.tokens
                    assert chunk.logprobs == generation.logprobs
                    assert chunk.versions == generation.versions
                    assert chunk.top == generation.top
                    assert chunk.text == generation.text
                    assert chunk.stop_reason == generation.stop_reason

    asyncio.run(check())


def test_guide_that_is_invalid_is_refused_in_a_sentence(opened: Callable[..., Opened]) -> None:
    async def check() -> None:
        async with opened() as (generator, metrics):
            with pytest.raises(UsageError, match="the guide's regex is invalid: unclosed group"):
                await generator.generate(Request(PROMPT, Sampling(guide=Guide(regex="(a"))))
            assert metrics()["requests"] == 0

    asyncio.run(check())


def test_stop_string_and_stop_id_end_a_generation_and_are_named(opened: Callable[..., Opened]) -> None:
    sampling = Sampling(max_new_tokens=40, seed=3, ignore_eos=True)
    (plain,) = tiny_engine().run([Request(PROMPT, sampling)])[0].generations
    assert plain.text is not None
    stop = plain.text[12:14]
    assert stop not in plain.text[:12]
    at = next(place for place, token in enumerate(plain.tokens) if place > 4 and token not in plain.tokens[:place])

    async def check() -> None:
        async with opened() as (generator, _):
            (found,) = (await generator.generate(Request(PROMPT, replace(sampling, stop=(stop, "zzz"))))).generations
            assert (found.text, found.stop_reason, found.stop_match) == (plain.text[:12], StopReason.STOP, stop)
            assert found.tokens == plain.tokens[:14]
            assert found.logprobs == plain.logprobs[:14]
            ids = replace(sampling, stop_ids=(plain.tokens[at],))
            (found,) = (await generator.generate(Request(PROMPT, ids))).generations
            assert (found.stop_reason, found.stop_match) == (StopReason.STOP, plain.tokens[at])
            assert found.tokens == plain.tokens[: at + 1]

    asyncio.run(check())


def test_abort_gives_what_there_is_and_frees_the_slots(opened: Callable[..., Opened]) -> None:
    async def check() -> None:
        async with opened(burst=1) as (generator, metrics):
            whole = asyncio.create_task(generator.generate(Request(PROMPT, ENDLESS, n=2, id="a")))
            await until(lambda: metrics()["generated_tokens"] > 0)
            await generator.abort("a")
            result = await whole
            assert {one.stop_reason for one in result.generations} == {StopReason.ABORT}
            for one in result.generations:
                assert len(one.tokens) == len(one.logprobs) == len(one.versions) < ENDLESS.max_new_tokens
            assert result.id == "a"
            await generator.abort("unknown")
            reasons = []
            async for chunk in generator.stream(Request(PROMPT, ENDLESS, id="b")):
                reasons.append(chunk.stop_reason)
                if len(reasons) == 1:
                    await generator.abort("b")
            assert reasons[-1] == StopReason.ABORT
            assert idle(metrics)

    asyncio.run(check())


def test_caller_that_is_cancelled_ends_its_request(opened: Callable[..., Opened]) -> None:
    async def check() -> None:
        async with opened(burst=1) as (generator, metrics):
            task = asyncio.create_task(generator.generate(Request(PROMPT, ENDLESS, n=4)))
            await until(lambda: metrics()["running"] > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: idle(metrics))
            stream = generator.stream(Request(PROMPT, ENDLESS, n=4))
            await anext(stream)
            await stream.aclose()
            await until(lambda: idle(metrics))
            assert metrics()["generated_tokens"] < 8 * ENDLESS.max_new_tokens

    asyncio.run(check())


def test_pause_stops_drawing_and_resume_goes_on_to_the_same_tokens(opened: Callable[..., Opened]) -> None:
    request = Request(PROMPT, replace(ENDLESS, seed=4))
    expected = tiny_engine().run([request])[0].generations

    async def check() -> None:
        async with opened(burst=1) as (generator, metrics):
            task = asyncio.create_task(generator.generate(request))
            await until(lambda: metrics()["generated_tokens"] > 3)
            await generator.pause()
            drawn = metrics()["generated_tokens"]
            assert drawn < ENDLESS.max_new_tokens
            await asyncio.sleep(0.1)
            assert metrics()["generated_tokens"] == drawn
            await generator.resume()
            assert (await task).generations == expected

    asyncio.run(check())


@pytest.mark.parametrize("keep_cache", fast_only([True, False], False))
def test_publish_changes_tokens_and_their_versions(opened: Callable[..., Opened], keep_cache: bool) -> None:
    request, short = (Request(PROMPT, replace(ENDLESS, temperature=0.0, max_new_tokens=most)) for most in (170, 20))
    (before,) = tiny_engine().run([request])[0].generations
    other = tiny_model(1)
    (after,) = Engine(other, eos=frozenset(), tokenizer=TOKENIZER).run([short])[0].generations
    assert before.tokens[:20] != after.tokens

    async def check() -> None:
        async with opened(burst=1) as (generator, metrics):
            task = asyncio.create_task(generator.generate(request))
            await until(lambda: metrics()["generated_tokens"] > 3)
            await generator.publish(dict(other.named_parameters()), 7, keep_cache=keep_cache)
            (mixed,) = (await task).generations
            assert list(mixed.versions) == sorted(mixed.versions)
            assert set(mixed.versions) == {0, 7}
            old = mixed.versions.index(7)
            assert mixed.tokens[:old] == before.tokens[:old]
            (fresh,) = (await generator.generate(short)).generations
            assert fresh.tokens == after.tokens
            assert fresh.logprobs == after.logprobs
            assert set(fresh.versions) == {7}
            headless = {name: tensor for name, tensor in other.named_parameters() if name != "head"}
            with pytest.raises(UsageError, match="head"):
                await generator.publish(headless, 8)
            assert set((await generator.generate(short)).generations[0].versions) == {7}

    asyncio.run(check())


def test_publish_in_bfloat16_is_the_rounded_model(opened: Callable[..., Opened]) -> None:
    request = Request(PROMPT, Sampling(max_new_tokens=20, temperature=0.0))
    rounded = {name: tensor.bfloat16() for name, tensor in tiny_model(2).named_parameters()}
    model = tiny_model(2)
    model.load_state_dict({name: tensor.float() for name, tensor in rounded.items()})
    expected = Engine(model, eos=frozenset({TOKENIZER.eos or 0}), tokenizer=TOKENIZER).run([request])[0].generations

    async def check() -> None:
        async with opened() as (generator, _):
            await generator.publish(rounded, 1)
            (found,) = (await generator.generate(request)).generations
            assert (found.tokens, found.logprobs) == (expected[0].tokens, expected[0].logprobs)

    asyncio.run(check())


def test_request_that_cannot_be_done_raises_the_engines_error(opened: Callable[..., Opened]) -> None:
    async def check() -> None:
        async with opened(max_running=1, max_waiting=1) as (generator, metrics):
            with pytest.raises(PromptTooLong, match=f"context of {CONTEXT}"):
                await generator.generate(Request((1,) * CONTEXT))
            with pytest.raises(PromptTooLong):
                await joined(generator, Request((1,) * CONTEXT))
            with pytest.raises(UsageError, match="vocabulary"):
                await generator.generate(Request((TOKENIZER.vocab_size,)))
            with pytest.raises(UsageError, match="temperature"):
                await generator.generate(Request(PROMPT, Sampling(temperature=-1.0)))
            await generator.pause()
            waiting = asyncio.create_task(generator.generate(Request(PROMPT, Sampling(max_new_tokens=2))))
            await until(lambda: metrics()["requests"] == 1)
            with pytest.raises(QueueFull):
                await generator.generate(Request(PROMPT))
            await generator.resume()
            await waiting

    asyncio.run(check())


def test_generator_that_dies_fails_running_and_later_requests_with_its_own_error(
    opened: Callable[..., Opened],
) -> None:
    async def check() -> None:
        async with opened() as (generator, metrics):
            await generator.pause()
            tasks = [asyncio.create_task(generator.generate(Request(PROMPT, ENDLESS))) for _ in range(2)]
            tasks.append(asyncio.create_task(joined(generator, Request(PROMPT, ENDLESS))))
            await until(lambda: metrics()["requests"] == 3)
            await generator.publish(overflowing(tiny_model()), 1)
            await generator.resume()
            async with asyncio.timeout(SECONDS):
                for task in tasks:
                    with pytest.raises(PalestraError, match="version 1"):
                        await task
                for call in (generator.generate, lambda request: joined(generator, request)):
                    with pytest.raises(PalestraError, match="version 1"):
                        await call(Request(PROMPT))

    asyncio.run(check())


def test_logprobs_are_of_the_distribution_sampled_from(opened: Callable[..., Opened]) -> None:
    sampling = Sampling(max_new_tokens=12, seed=6, temperature=0.7, top_k=5, ignore_eos=True)

    async def check() -> None:
        async with opened() as (generator, _):
            (generation,) = (await generator.generate(Request(PROMPT, sampling))).generations
        whole = Batch.pack([[*PROMPT, *generation.tokens]])
        model = tiny_model()
        scores = logits(forward(model, whole).hidden, model.unembed).detach().double() / sampling.temperature
        for place, (token, logprob) in enumerate(zip(generation.tokens, generation.logprobs, strict=True), len(PROMPT)):
            top = scores[place - 1].topk(5)
            assert token in top.indices
            assert logprob == pytest.approx(float(scores[place - 1, token] - top.values.logsumexp(0)), abs=1e-5)

    asyncio.run(check())
