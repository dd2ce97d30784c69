"""What only a generator behind HTTP can get wrong; test_contract_generator.py has what all generators share."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from test_contract_generator import PROMPT, joined, over_http
from tiny_server import ALPHABET, TOKENIZER, running, serving, tiny_engine, tiny_model

from palestra.data.tokenizers import character_tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.generate.client import HttpGenerator
from palestra.generate.local import LocalGenerator
from palestra.generate.serve.server import create_app
from palestra.generate.types import Request, Sampling


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
    assert "does not respond" in raises_once(lambda g: g.generate(Request(PROMPT)), b"", times=1)
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
