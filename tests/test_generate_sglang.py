"""SGLang's dialect against a server whose every route is checked against recorded signatures."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_servers import remote, sglang_server
from test_contract_generator import ENDLESS, PROMPT, until
from tiny_server import TOKENIZER, tiny_engine, tiny_model

from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.engine import Engine
from palestra.generate.remote.dialects import Sglang
from palestra.generate.remote.generator import RemoteGenerator
from palestra.generate.types import Request, Sampling, StopReason

Work = Callable[[RemoteGenerator, Engine], Coroutine[Any, Any, None]]


def run(work: Work) -> None:
    async def opened(address: str, engine: Engine) -> None:
        with remote(address, Sglang()) as generator:
            async with generator:
                await work(generator, engine)

    with sglang_server() as (address, engine, problems):
        asyncio.run(opened(address, engine))
    assert not problems


def test_greedy_tokens_and_their_logprobs_are_the_engines() -> None:
    request = Request(PROMPT, Sampling(max_new_tokens=20, temperature=0.0, logprobs=2), n=2)
    expected = tiny_engine().run([request])[0].generations

    async def check(generator: RemoteGenerator, _: Engine) -> None:
        assert (await generator.generate(request)).generations == expected
        chunks = [chunk async for chunk in generator.stream(request)]
        assert [chunk.tokens for chunk in chunks] == [one.tokens for one in expected]

    run(check)


def test_stop_string_ends_with_the_tokens_up_to_it() -> None:
    sampling = Sampling(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    (plain,) = tiny_engine().run([Request(PROMPT, sampling)])[0].generations
    assert plain.text is not None
    stop = plain.text[7:9]
    at = plain.text.index(stop)

    async def check(generator: RemoteGenerator, _: Engine) -> None:
        (found,) = (await generator.generate(Request(PROMPT, replace(sampling, stop=(stop,))))).generations
        assert (found.text, found.stop_reason, found.stop_match) == (plain.text[:at], StopReason.STOP, stop)
        assert found.tokens == plain.tokens[: at + 2]

    run(check)


def test_update_in_flight_continues_by_the_new_weights_with_a_version_for_every_token() -> None:
    request = Request(PROMPT, replace(ENDLESS, temperature=0.0), n=2)
    (before, _) = tiny_engine().run([request])[0].generations
    other = tiny_model(1)

    async def check(generator: RemoteGenerator, engine: Engine) -> None:
        task = asyncio.create_task(generator.generate(request))
        await until(lambda: engine.metrics()["generated_tokens"] > 6)
        await generator.publish(dict(other.named_parameters()), 7)
        for mixed in (await task).generations:
            old = mixed.versions.index(7)
            assert 0 < old < len(mixed.tokens) == ENDLESS.max_new_tokens
            assert mixed.versions == (0,) * old + (7,) * (len(mixed.tokens) - old)
            assert mixed.tokens[:old] == before.tokens[:old]
            rest = Request((*PROMPT, *mixed.tokens[:old]), replace(ENDLESS, temperature=0.0, max_new_tokens=20))
            (after,) = Engine(other, eos=frozenset(), tokenizer=TOKENIZER).run([rest])[0].generations
            assert mixed.tokens[old : old + 20] == after.tokens
            assert mixed.logprobs[old : old + 20] == pytest.approx(after.logprobs, abs=1e-5)

    run(check)


def test_abort_pause_and_cancel_end_and_stop_requests() -> None:
    async def check(generator: RemoteGenerator, engine: Engine) -> None:
        whole = asyncio.create_task(generator.generate(Request(PROMPT, ENDLESS, n=2, id="a")))
        await until(lambda: engine.metrics()["generated_tokens"] > 0)
        await generator.pause()
        drawn = engine.metrics()["generated_tokens"]
        await asyncio.sleep(0.05)
        assert engine.metrics()["generated_tokens"] == drawn
        await generator.resume()
        await generator.abort("a")
        assert {one.stop_reason for one in (await whole).generations} == {StopReason.ABORT}
        gone = asyncio.create_task(generator.generate(Request(PROMPT, ENDLESS, n=2)))
        await until(lambda: engine.metrics()["running"] > 0)
        gone.cancel()
        await until(lambda: engine.metrics()["requests"] == 0)
        assert not generator.busy

    run(check)


def test_what_sglang_cannot_do_is_refused_by_name() -> None:
    async def check(generator: RemoteGenerator, _: Engine) -> None:
        with pytest.raises(UsageError, match="top_p"):
            await generator.generate(Request(PROMPT, Sampling(top_p=0.9)))
        with pytest.raises(PalestraError, match="no such model"):
            await generator.dialect.load(generator, Path("nowhere"), 3, keep_cache=True)

    run(check)


def test_signatures_catch_wrong_routes_fields_and_types() -> None:
    with sglang_server() as (address, _, problems), httpx.Client(base_url=address) as client:
        assert client.get("/weight_version").status_code == 404
        client.post("/pause_generation", json={"mode": "in_place", "why": "?"})
        client.post("/continue_generation")
        client.post("/continue_generation", json={"torch_empty_cache": 1})
        client.get("/health", params={"deep": "true"})
    assert problems == [
        "GET /weight_version",
        "POST /pause_generation why: '?'",
        "POST /continue_generation without a body",
        "POST /continue_generation torch_empty_cache: 1",
        "GET /health?deep=true",
    ]
