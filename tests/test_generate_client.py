"""One set of behaviors for the engine in this process and the engine behind HTTP; and what only HTTP can get wrong."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import fast_only
from small_lm import overflowing
from tiny_server import ALPHABET, CONTEXT, KEY, TOKENIZER, running, serving, tiny_engine, tiny_model

from palestra.data.tokenizers import character_tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.generate.client import HttpGenerator
from palestra.generate.engine.engine import Engine, PromptTooLong, QueueFull
from palestra.generate.local import LocalGenerator
from palestra.generate.serve.server import create_app
from palestra.generate.types import Chunk, Generator, Request, Sampling, StopReason

PROMPT = tuple(TOKENIZER.encode("Once upon a time"))
ENDLESS = Sampling(max_new_tokens=170, ignore_eos=True)
Open = Callable[..., AbstractAsyncContextManager[tuple[Generator, Engine]]]


@asynccontextmanager
async def local(**settings: Any) -> AsyncIterator[tuple[Generator, Engine]]:
    engine = tiny_engine(**settings)
    with LocalGenerator(engine, drive="thread") as generator:
        yield generator, engine


@asynccontextmanager
async def over_http(**settings: Any) -> AsyncIterator[tuple[Generator, Engine]]:
    engine = tiny_engine(**settings)
    with serving(engine=engine) as (address, _):
        async with HttpGenerator(address, KEY) as generator:
            yield generator, engine


@pytest.fixture(params=[local, over_http], ids=["local", "http"])
def opened(request: pytest.FixtureRequest) -> Open:
    return request.param


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def idle(engine: Engine) -> bool:
    numbers = engine.metrics()
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


def test_generate_with_a_seed_gives_what_the_engine_gives_bit_for_bit(opened: Open) -> None:
    requests = [
        Request(PROMPT, Sampling(max_new_tokens=20, seed=1, logprobs=3), n=3),
        Request(PROMPT[:5], Sampling(max_new_tokens=20, seed=-5, temperature=0.5, top_k=7, top_p=0.9, min_p=0.01)),
        Request(PROMPT, Sampling(max_new_tokens=20, temperature=0.0)),
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


def test_stop_string_and_stop_id_end_a_generation_and_are_named(opened: Open) -> None:
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


def test_abort_gives_what_there_is_and_frees_the_slots(opened: Open) -> None:
    async def check() -> None:
        async with opened(burst=1) as (generator, engine):
            whole = asyncio.create_task(generator.generate(Request(PROMPT, ENDLESS, n=2, id="a")))
            await until(lambda: engine.metrics()["generated_tokens"] > 0)
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
            assert idle(engine)

    asyncio.run(check())


def test_caller_that_is_cancelled_ends_its_request(opened: Open) -> None:
    async def check() -> None:
        async with opened(burst=1) as (generator, engine):
            task = asyncio.create_task(generator.generate(Request(PROMPT, ENDLESS, n=4)))
            await until(lambda: engine.metrics()["running"] > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: idle(engine))
            stream = generator.stream(Request(PROMPT, ENDLESS, n=4))
            await anext(stream)
            await stream.aclose()
            await until(lambda: idle(engine))
            assert engine.metrics()["generated_tokens"] < 8 * ENDLESS.max_new_tokens

    asyncio.run(check())


def test_pause_stops_drawing_and_resume_goes_on_to_the_same_tokens(opened: Open) -> None:
    request = Request(PROMPT, replace(ENDLESS, seed=4))
    expected = tiny_engine().run([request])[0].generations

    async def check() -> None:
        async with opened(burst=1) as (generator, engine):
            task = asyncio.create_task(generator.generate(request))
            await until(lambda: engine.metrics()["generated_tokens"] > 3)
            await generator.pause()
            drawn = engine.metrics()["generated_tokens"]
            assert drawn < ENDLESS.max_new_tokens
            await asyncio.sleep(0.1)
            assert engine.metrics()["generated_tokens"] == drawn
            await generator.resume()
            assert (await task).generations == expected

    asyncio.run(check())


@pytest.mark.parametrize("keep_cache", fast_only([True, False], False))
def test_publish_changes_tokens_and_their_versions(opened: Open, keep_cache: bool) -> None:
    request = Request(PROMPT, replace(ENDLESS, temperature=0.0))
    (before,) = tiny_engine().run([request])[0].generations
    other = tiny_model(1)
    (after,) = Engine(other, eos=frozenset(), tokenizer=TOKENIZER).run([request])[0].generations
    assert before.tokens != after.tokens

    async def check() -> None:
        async with opened(burst=1) as (generator, engine):
            task = asyncio.create_task(generator.generate(request))
            await until(lambda: engine.metrics()["generated_tokens"] > 3)
            await generator.publish(dict(other.named_parameters()), 7, keep_cache=keep_cache)
            (mixed,) = (await task).generations
            assert list(mixed.versions) == sorted(mixed.versions)
            assert set(mixed.versions) == {0, 7}
            old = mixed.versions.index(7)
            assert mixed.tokens[:old] == before.tokens[:old]
            (fresh,) = (await generator.generate(request)).generations
            assert fresh.tokens == after.tokens
            assert fresh.logprobs == after.logprobs
            assert set(fresh.versions) == {7}
            headless = {name: tensor for name, tensor in other.named_parameters() if name != "head"}
            with pytest.raises(UsageError, match="head"):
                await generator.publish(headless, 8)
            assert set((await generator.generate(request)).generations[0].versions) == {7}

    asyncio.run(check())


def test_publish_in_bfloat16_is_the_rounded_model(opened: Open) -> None:
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


def test_request_that_cannot_be_done_raises_the_engines_error(opened: Open) -> None:
    async def check() -> None:
        async with opened(max_running=1, max_waiting=1) as (generator, engine):
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
            await until(lambda: engine.metrics()["requests"] == 1)
            with pytest.raises(QueueFull):
                await generator.generate(Request(PROMPT))
            await generator.resume()
            await waiting

    asyncio.run(check())


def test_engine_that_fails_fails_every_request_with_its_reason(opened: Open) -> None:
    async def check() -> None:
        async with opened() as (generator, _):
            await generator.publish(overflowing(tiny_model()), 1)
            for call in (generator.generate, lambda request: joined(generator, request)):
                with pytest.raises(PalestraError, match="version 1"):
                    await call(Request(PROMPT))

    asyncio.run(check())


# What only HTTP can get wrong


def test_server_that_is_not_there_yet_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    request = Request(PROMPT, Sampling(max_new_tokens=3, seed=1))

    async def ask() -> tuple[int, ...]:
        async with HttpGenerator(f"http://127.0.0.1:{port}", waits=(0.2,) * 50) as generator:
            return (await generator.generate(request)).generations[0].tokens

    found: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(ask())))
    thread.start()
    time.sleep(0.5)
    with (
        LocalGenerator(tiny_engine(), drive="thread") as generator,
        running(create_app(generator, TOKENIZER, model_name="tiny"), port=port),
    ):
        thread.join(20)
    assert found == [tiny_engine().run([request])[0].generations[0].tokens]


def test_server_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def check() -> None:
        async with HttpGenerator(address, waits=(0.01, 0.01)) as generator:
            with pytest.raises(PalestraError, match=address):
                await generator.generate(Request(PROMPT))
            with pytest.raises(PalestraError, match=address):
                await generator.pause()

    asyncio.run(check())


def test_key_that_is_wrong_is_told() -> None:
    async def check(address: str) -> None:
        for key in (None, "wrong"):
            async with HttpGenerator(address, key) as generator:
                with pytest.raises(UsageError, match="API key"):
                    await generator.generate(Request(PROMPT))
                with pytest.raises(UsageError, match="API key"):
                    await generator.publish(dict(tiny_model().named_parameters()), 1)

    with serving() as (address, _):
        asyncio.run(check(address))


def test_key_of_any_characters_opens_the_server() -> None:
    async def check(address: str) -> None:
        async with HttpGenerator(address, "schlüssel-鍵") as generator:
            assert (await generator.generate(Request(PROMPT, Sampling(max_new_tokens=2)))).generations
        for key in ("schlussel-鍵", "schlüssel-鍵".encode().decode("latin-1")):
            async with HttpGenerator(address, key) as generator:
                with pytest.raises(UsageError, match="API key"):
                    await generator.generate(Request(PROMPT))

    with serving(api_key="schlüssel-鍵") as (address, _):
        asyncio.run(check(address))


def test_stream_of_text_with_every_kind_of_line_break_arrives_whole() -> None:
    breaks = "\u2028\u2029\x85\x0b\x0c\x1c\r"
    odd = character_tokenizer(breaks + ALPHABET[len(breaks) :])
    request = Request(PROMPT, Sampling(max_new_tokens=170, seed=2, temperature=3.0, ignore_eos=True))
    (expected,) = tiny_engine(tokenizer=odd).run([request])[0].generations
    assert expected.text is not None
    assert set(breaks) <= set(expected.text)

    async def check() -> None:
        async with over_http(tokenizer=odd) as (generator, _):
            assert [chunk.text for chunk in await joined(generator, request)] == [expected.text]

    asyncio.run(check())


@pytest.mark.parametrize("said", [b"{", b"[1]", b"{}", b'{"index": 0, "tokens": 1}', b"\xff", b"null"])
def test_answer_that_is_malformed_is_an_error_that_names_the_server(said: bytes) -> None:
    event = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: " + said + b"\n\n"
    assert "http://127.0.0.1" in raises_once(lambda g: joined(g, Request(PROMPT)), event, times=1)
    whole = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + said
    assert "http://127.0.0.1" in raises_once(lambda g: g.generate(Request(PROMPT)), whole, times=1)


def answering(*, times: int, with_bytes: bytes) -> tuple[str, list[bytes], Callable[[], None]]:
    """A server that reads a request, answers with these bytes, and closes; what it read, and how to end it."""
    listening = socket.create_server(("127.0.0.1", 0))
    read: list[bytes] = []

    def work() -> None:
        for _ in range(times):
            connection, _address = listening.accept()
            with connection:
                data = connection.recv(1 << 16)
                while b"\r\n\r\n" not in data or (b"prompt" not in data and b"POST /generate" in data):
                    data += connection.recv(1 << 16)
                read.append(data)
                connection.sendall(with_bytes)

    thread = threading.Thread(target=work)
    thread.start()

    def end() -> None:
        thread.join()
        listening.close()

    return f"http://127.0.0.1:{listening.getsockname()[1]}", read, end


def raises_once(work: Callable[[HttpGenerator], Coroutine[Any, Any, Any]], answer: bytes, times: int) -> str:
    address, read, end = answering(times=times, with_bytes=answer)

    async def check() -> str:
        async with HttpGenerator(address, waits=(0.01, 0.01)) as generator:
            with pytest.raises(PalestraError) as caught:
                await work(generator)
            return str(caught.value)

    said = asyncio.run(check())
    end()
    assert len(read) == times
    return said


def test_generation_that_broke_off_is_not_asked_for_again() -> None:
    assert "does not answer" in raises_once(lambda g: g.generate(Request(PROMPT)), b"", times=1)
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"
    assert "broke off" in raises_once(lambda g: g.generate(Request(PROMPT)), half, times=1)


def test_stream_without_its_end_is_an_error() -> None:
    closed = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {"index": 0, "tokens": [1], "logprobs": [0.0], '
    closed += b'"versions": [0], "text": "a", "stop_reason": null, "top": []}\n\n'
    assert "before its end" in raises_once(lambda g: joined(g, Request(PROMPT)), closed, times=1)


def test_error_inside_a_stream_is_raised() -> None:
    failed = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    failed += b'data: {"error": {"message": "the engine broke", "code": null}}\n\n'
    assert raises_once(lambda g: joined(g, Request(PROMPT)), failed, times=1) == "the engine broke"


def test_command_that_broke_off_is_tried_again() -> None:
    raises_once(lambda g: g.pause(), b"", times=3)
    raises_once(lambda g: g.publish({"a": torch.zeros(2)}, 1), b"", times=3)


def test_answer_of_another_kind_of_server_is_told() -> None:
    page = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>"
    assert "502" in raises_once(lambda g: g.generate(Request(PROMPT)), page, times=1)
