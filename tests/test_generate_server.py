"""The server over a real engine: OpenAI's own client, refusals, clients that go away, new weights, and load."""

import asyncio
import contextlib
import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import safetensors.torch
import torch
from small_lm import overflowing
from tiny_server import ALPHABET, CONTEXT, KEY, NAME, TOKENIZER, serving, tiny_engine, tiny_model

from palestra.data.chat import encode_chat
from palestra.generate.client import SamplingBody
from palestra.generate.engine.engine import Engine, PromptTooLong
from palestra.generate.serve import listen
from palestra.generate.serve.gate import Counter, Gate, Histogram
from palestra.generate.serve.openai import HARMLESS, UNSUPPORTED, token_text
from palestra.generate.types import Generation, Request, Sampling
from palestra.lm.batch import Batch, score
from palestra.lm.hf import save_pretrained
from palestra.lm.lora import add_lora, save_peft
from palestra.spec.lm import LoraSpec

QUESTION = [{"role": "user", "content": "Who goes there?"}]
LONG = {"max_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Engine]]:
    with serving() as found:
        yield found


@pytest.fixture
def client(server: tuple[str, Engine]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key=KEY, max_retries=0) as found:
        yield found


@pytest.fixture
def http(server: tuple[str, Engine]) -> Iterator[httpx.Client]:
    with connected(server[0]) as found:
        yield found


def connected(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


def alone(prompt: list[int], n: int = 1, **sampling: Any) -> tuple[Generation, ...]:
    """What an engine gives for a request that has it to itself."""
    return tiny_engine().run([Request(tuple(prompt), Sampling(**sampling), n)])[0].generations


def chat_prompt(messages: list[dict[str, Any]]) -> list[int]:
    return encode_chat(TOKENIZER, messages, add_generation_prompt=True).tokens


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def idle(engine: Engine) -> bool:
    numbers = engine.metrics()
    return (
        numbers["running"] == numbers["waiting"] == numbers["requests"] == 0 and numbers["free_slots"] == engine.slots
    )


# OpenAI's client


def test_chat_with_a_seed_gives_the_engines_own_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=QUESTION, seed=3, max_tokens=24)
    (expected,) = alone(chat_prompt(QUESTION), seed=3, max_new_tokens=24)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == ("length" if expected.stop_reason == "length" else "stop")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat_prompt(QUESTION))
    assert answer.usage.completion_tokens == len(expected.tokens)


def test_chat_message_of_an_earlier_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=NAME, messages=QUESTION, seed=3, max_tokens=8).choices[0].message
    messages = [*QUESTION, first.model_dump(), {"role": "user", "content": [{"type": "text", "text": "And you?"}]}]
    again = client.chat.completions.create(model=NAME, messages=messages, seed=4, max_tokens=8, temperature=0)
    plain = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And you?"}]
    (expected,) = alone(chat_prompt(plain), temperature=0.0, max_new_tokens=8)
    assert again.choices[0].message.content == expected.text


def test_chat_stream_joined_equals_the_whole_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": QUESTION, "seed": 5, "max_tokens": 40, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons, roles, usage = ["", ""], [None, None], [None, None], None
    for event in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        if not event.choices:
            usage = event.usage
            continue
        (choice,) = event.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        roles[choice.index] = choice.delta.role or roles[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant", "assistant"]
    assert usage == whole.usage
    assert texts[0] != texts[1]


def test_chat_logprobs_are_the_engines_with_bytes_and_alternatives(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": QUESTION, "seed": 6, "max_tokens": 12, "logprobs": True}
    answer = client.chat.completions.create(**options, top_logprobs=3)
    (expected,) = alone(chat_prompt(QUESTION), seed=6, max_new_tokens=12, logprobs=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [one.logprob for one in content] == list(expected.logprobs)
    assert [bytes(one.bytes or []) for one in content] == [TOKENIZER.piece(token) for token in expected.tokens]
    for one, alternatives in zip(content, expected.top, strict=True):
        pairs = [(TOKENIZER.piece(token).decode(), logprob) for token, logprob in alternatives]
        assert [(other.token, other.logprob) for other in one.top_logprobs] == pairs
    streamed = list(client.chat.completions.create(**options, top_logprobs=3, stream=True))
    parts = [event.choices[0].logprobs.content for event in streamed if event.choices[0].logprobs is not None]
    assert [one for part in parts for one in part or []] == content


def test_completion_logprobs_and_token_ids_are_aligned_with_the_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": "To be, or not", "seed": 7, "max_tokens": 10, "logprobs": 2}
    answer = client.completions.create(**options, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    prompt = TOKENIZER.encode("To be, or not")
    (expected,) = alone(prompt, seed=7, max_new_tokens=10, logprobs=2)
    assert choice.token_ids == list(expected.tokens)
    assert choice.prompt_token_ids == prompt
    assert choice.versions == [0] * len(expected.tokens)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == list(expected.logprobs)
    for place, token in enumerate(logprobs.tokens or []):
        start = (logprobs.text_offset or [])[place]
        assert choice.text[start : start + len(token)] in (token, "")  # the end token is no part of the text
        alternatives = (logprobs.top_logprobs or [])[place]
        assert alternatives[token] == expected.logprobs[place]
        assert len(alternatives) in (2, 3)


def test_completion_of_several_prompts_keeps_their_order(client: openai.OpenAI) -> None:
    prompts = [TOKENIZER.encode(text) for text in ("One", "Two", "Three")]
    as_text = client.completions.create(model=NAME, prompt=["One", "Two", "Three"], n=2, seed=1, max_tokens=6)
    as_ids = client.completions.create(model=NAME, prompt=prompts, n=2, seed=1, max_tokens=6)
    expected = [generation.text for prompt in prompts for generation in alone(prompt, 2, seed=1, max_new_tokens=6)]
    assert [choice.text for choice in as_text.choices] == expected
    assert [choice.text for choice in as_ids.choices] == expected
    assert [choice.index for choice in as_text.choices] == list(range(6))
    streamed = [""] * 6
    for event in client.completions.create(model=NAME, prompt=prompts, n=2, seed=1, max_tokens=6, stream=True):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == expected


def test_completion_of_an_empty_prompt_begins_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="", seed=2, max_tokens=8)
    assert TOKENIZER.bos is not None
    assert answer.choices[0].text == alone([TOKENIZER.bos], seed=2, max_new_tokens=8)[0].text


def test_completion_with_a_stop_string_ends_before_it(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": "Now", "seed": 2, "max_tokens": 40}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[10:12]
    assert stop not in whole[:10]
    for one in (stop, ["not there", stop]):
        answer = client.completions.create(**options, stop=one).choices[0]
        assert (answer.text, answer.finish_reason) == (whole[:10], "stop")
    events = list(client.completions.create(**options, stop=stop, stream=True))
    assert "".join(event.choices[0].text for event in events) == whole[:10]
    assert events[-1].choices[0].finish_reason == "stop"


def test_completion_stop_token_and_top_k_are_obeyed(client: openai.OpenAI) -> None:
    greedy = client.completions.create(model=NAME, prompt="Now", temperature=0, max_tokens=12)
    one = client.completions.create(model=NAME, prompt="Now", max_tokens=12, extra_body={"top_k": 1})
    assert one.choices[0].text == greedy.choices[0].text
    stop = TOKENIZER.encode(greedy.choices[0].text)[3]
    stopped = client.completions.create(
        model=NAME, prompt="Now", temperature=0, max_tokens=12, extra_body={"stop_token_ids": [stop]}
    )
    assert greedy.choices[0].text.startswith(stopped.choices[0].text)
    assert stopped.choices[0].finish_reason == "stop"
    assert len(stopped.choices[0].text) <= 4


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-5")


def test_openai_client_gets_its_own_errors(server: tuple[str, Engine], client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.completions.create(model=NAME, prompt="a" * CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=NAME, prompt="a" * CONTEXT, stream=True)
    with (
        openai.OpenAI(base_url=f"{server[0]}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


# Refusals


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/v1/completions", b"{not json", 400, "not valid JSON"),
        ("/v1/completions", b"", 400, "body"),
        ("/v1/completions", b"\xff\xfe", 400, "body"),
        ("/v1/completions", b"[" * 100_000, 400, "body"),
        ("/v1/completions", b'{"prompt": ' + b"9" * 5000 + b"}", 400, "body"),
        ("/v1/completions", [1, 2], 400, "body"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, 400, "empty"),
        ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [True]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [10**30]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [TOKENIZER.vocab_size]}, 400, "vocabulary"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "Unicode"),
        ("/v1/completions", {"prompt": "漢"}, 400, "漢"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        ("/v1/completions", b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": 1e300}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": 1e-39}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "temperature": 1e-46, "stream": True}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "top_p": 1e-60}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "top_p": 1.5}, 400, "top_p"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "seed": 2**70}, 400, "seed"),
        ("/v1/completions", {"prompt": "a", "n": 10**6}, 400, "n"),
        ("/v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": 3}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": ["b"] * 17}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": "b" * 1001}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": ["b" * 1001]}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": list(range(40))}, 400, "end tokens"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1000}, 400, "logprobs"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-5"}, 404, "gpt-5"),
        ("/v1/completions", {"prompt": "a" * 400}, 400, "context"),
        ("/v1/completions", {"prompt": "a" * 400, "stream": True}, 400, "context"),
        ("/v1/completions", {"prompt": "a" * 1_000_000}, 400, "1,000,000 characters"),
        ("/v1/completions", {"prompt": [99999], "echo": True, "logprobs": 1}, 400, "token 99999"),
        ("/v1/completions", {"prompt": [[]], "echo": True, "logprobs": 1}, 400, "empty"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1_000_000}]}, 400, "characters"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}, 400, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
        ("/v1/chat/completions", {"messages": QUESTION, "top_logprobs": 2}, 400, "logprobs"),
        ("/v1/chat/completions", {"messages": QUESTION, "tools": [{"type": "function"}]}, 400, "tools"),
        ("/v1/chat/completions", {"messages": QUESTION, "temprature": 1}, 400, "temprature"),
        ("/generate", {"prompt": []}, 400, "empty"),
        ("/generate", {"prompt": [1], "sampling": {"heat": 1}}, 400, "heat"),
        ("/generate", {"prompt": [1] * CONTEXT}, 400, "context"),
        ("/generate", {"prompt": [1], "stop": "a"}, 400, "stop"),
        ("/generate", {"prompt": [1], "sampling": {"temperature": 1e300}}, 400, "temperature"),
        ("/generate", {"prompt": [1], "sampling": {"top_p": 1e-60}}, 400, "top_p"),
        ("/generate", {"prompt": [1], "sampling": {"min_new_tokens": 2**70}}, 400, "min_new_tokens"),
        ("/generate", {"prompt": [1], "sampling": {"stop": ["b"] * 17}}, 400, "stop"),
        ("/generate", {"prompt": [1], "sampling": {"stop": ["b" * 1001]}}, 400, "stop"),
        ("/abort", {}, 400, "id"),
        ("/update_weights", {"path": "/nowhere", "version": 1}, 400, "/nowhere"),
        ("/update_weights", {"path": "/nowhere"}, 400, "version"),
        ("/nowhere", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method"),
    ],
)
def test_request_that_is_wrong_is_refused_by_name(
    http: httpx.Client, path: str, body: Any, status: int, named: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert named in error["message"]


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_parameter_without_support_is_refused_unless_it_changes_nothing(http: httpx.Client, name: str) -> None:
    body = {"messages": QUESTION, "max_tokens": 1}
    assert http.post("/v1/chat/completions", json={**body, name: UNSUPPORTED[name]}).status_code == 200
    assert http.post("/v1/chat/completions", json={**body, name: None}).status_code == 200
    answer = http.post("/v1/chat/completions", json={**body, name: {"other": 0.5}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_echo_gives_the_prompt_and_its_logprobs_as_the_trainer_has_them(http: httpx.Client, server: Any) -> None:
    engine, text = server[1], "Who goes there? Nobody."
    body = {"prompt": [text, "Stand"], "max_tokens": 3, "temperature": 0, "echo": True}
    plain = http.post("/v1/completions", json={**body, "echo": False}).json()["choices"]
    echoed = http.post("/v1/completions", json={**body, "logprobs": 2}).json()["choices"]
    assert [one["text"] for one in echoed] == [text + plain[0]["text"], "Stand" + plain[1]["text"]]
    told = echoed[0]["logprobs"]
    tokens = TOKENIZER.encode_prompt(text)
    batch = Batch.pack([tokens], [[0.0] + [1.0] * (len(tokens) - 1)])
    expected = score(tiny_model(), batch).logprobs[1:].tolist()
    assert told["token_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(tokens)] == pytest.approx(expected, abs=1e-4)
    assert len(told["tokens"]) == len(told["top_logprobs"]) == len(told["text_offset"]) == len(tokens) + 3
    assert all(len(top) in (2, 3) for top in told["top_logprobs"][1:])
    assert "".join(told["tokens"]).endswith(text + plain[0]["text"])
    assert http.post("/v1/completions", json={**body, "stream": True}).json()["error"]["param"] == "echo"
    with pytest.raises(PromptTooLong):
        engine.score([1] * (CONTEXT + 1))


def test_variables_of_the_chat_template_are_the_requests() -> None:
    template = "{{ messages[0].content }}{% if thinking %}Hm.{% endif %}"
    tokenizer = TOKENIZER.with_chat_template(template)
    with serving(engine=tiny_engine(tokenizer=tokenizer)) as (address, _), connected(address) as http:
        body = {"messages": QUESTION, "max_tokens": 1, "return_token_ids": True}
        for extra, text in (({}, ""), ({"thinking": False}, ""), ({"thinking": True}, "Hm.")):
            answer = http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": extra})
            assert answer.json()["prompt_token_ids"] == TOKENIZER.encode(QUESTION[0]["content"] + text)
        for name in ("messages", "add_generation_prompt", "_generation_marks", "bos_token"):
            answer = http.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {name: 1}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
            assert name in answer.json()["error"]["message"]


def test_parameter_without_effect_is_ignored(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 4, "seed": 1}
    plain = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert http.post("/v1/chat/completions", json={**body, **dict.fromkeys(HARMLESS, "x")}).json()["choices"] == plain


def test_key_that_is_wrong_or_missing_is_refused_everywhere_but_at_health(server: tuple[str, Engine]) -> None:
    paths = ["/v1/models", "/metrics", "/generate", "/v1/completions", "/pause", "/update_weights", "/nowhere"]
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer é"}):
        with httpx.Client(base_url=server[0], headers={k: v.encode() for k, v in headers.items()}) as stranger:
            for path in paths:
                answer = stranger.post(path, json={})
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert stranger.get("/health").status_code == 200


def test_page_of_another_site_cannot_reach_the_server(http: httpx.Client) -> None:
    assert http.post("/resume", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert http.post("/resume", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_body_that_is_too_long_is_refused_and_the_server_goes_on(http: httpx.Client, chunked: bool) -> None:
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    content = (body[at : at + 65536] for at in range(0, len(body), 65536)) if chunked else body
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert http.get("/v1/models").status_code == 200


def test_body_that_is_too_long_is_not_read_beyond_the_limit() -> None:
    received: list[int] = []

    async def receive() -> dict[str, Any]:
        received.append(1000)
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    async def reads_all(scope: Any, receive: Any, send: Any) -> None:
        while True:
            await receive()

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError("the application answers")

    gate = Gate(
        reads_all,
        api_key=None,
        max_body_bytes=10_000,
        max_body_bytes_of={},
        allowed_hosts=(),
        requests=Counter("a", "A.", ("path", "status")),
        seconds=Histogram("b", "B.", ("path",)),
    )
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with pytest.raises(Exception, match="10,000 bytes"):
        asyncio.run(gate(scope, receive, send))
    assert sum(received) == 11_000


def test_prompts_times_samples_over_the_limit_are_refused_before_any_work(http: httpx.Client) -> None:
    for prompts, n in ((2048, 1000), (2, 513)):
        answer = http.post("/v1/completions", json={"prompt": ["a"] * prompts, "n": n, "max_tokens": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert "1,024 samples of one request" in answer.json()["error"]["message"]
    answer = http.post("/v1/completions", json={"prompt": ["a"] * 2, "n": 3, "max_tokens": 1})
    assert len(answer.json()["choices"]) == 6


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": "evil.example"}, 403),  # a name that its owner has mean this machine
        ({"Host": "[oops"}, 403),
        ({"Host": "127.0.0.1:80", "Origin": "http://127.0.0.1:80"}, 200),
        ({"Host": "127.0.0.1:80", "Origin": "http://127.0.0.1:81"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_host_and_origin_that_are_not_this_server_are_refused(
    http: httpx.Client, headers: dict[str, str], status: int
) -> None:
    assert http.get("/v1/models", headers=headers).status_code == status


def test_allowed_hosts_are_those_that_are_given() -> None:
    with serving(allowed_hosts=("model.example",)) as (address, _), connected(address) as http:
        assert http.get("/v1/models", headers={"Host": "model.example:8000"}).status_code == 200
        answer = http.get("/v1/models")
        assert answer.status_code == 403
        assert "'127.0.0.1' is not one of those allowed" in answer.json()["error"]["message"]


def test_control_without_a_key_is_for_this_machine_by_its_own_name() -> None:
    with serving(api_key=None, allowed_hosts=()) as (address, _), connected(address) as http:
        assert http.post("/pause").json() == {"paused": True}
        assert http.post("/resume").json() == {"paused": False}
        for path in ("/pause", "/resume", "/update_weights"):
            answer = http.post(path, headers={"Host": "model.example"})
            assert answer.status_code == 403
            assert f"{path} needs a key" in answer.json()["error"]["message"]
        assert http.get("/v1/models", headers={"Host": "model.example"}).status_code == 200


def test_control_without_a_key_from_another_machine_is_refused() -> None:
    sent: list[dict[str, Any]] = []

    async def app(*_: Any) -> None:
        sent.append({"status": "let through"})

    async def send(message: Any) -> None:
        sent.append(message)

    def asked(client: str, key: str | None) -> Any:
        books = {"requests": Counter("a", "A.", ("path", "status")), "seconds": Histogram("b", "B.", ("path",))}
        gate = Gate(app, api_key=key, max_body_bytes=1, max_body_bytes_of={}, allowed_hosts=(), **books)
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer k")]
        scope = {"type": "http", "method": "POST", "path": "/pause", "headers": headers, "client": (client, 1)}
        asyncio.run(gate(scope, app, send))
        first, *_ = sent
        sent.clear()
        return first["status"]

    assert asked("192.0.2.1", None) == 403
    assert asked("192.0.2.1", "k") == asked("127.0.0.1", None) == asked("::ffff:127.0.0.1", None) == "let through"


def test_headers_that_do_not_come_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEADER_SECONDS", 0.2)
    whole = f"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with serving() as (address, _):
        port = int(address.rpartition(":")[2])
        for before in (b"", whole):  # also on a connection that was used
            with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
                if before:
                    slow.sendall(before)
                    answer = b""
                    while not answer.endswith(b"}"):
                        answer += slow.recv(10_000)
                slow.sendall(b"GET /health HTTP/1.1\r\nHost: local")
                assert slow.recv(10_000) == b""
        with connected(address) as http:  # others are served
            assert http.get("/health").status_code == 200


def test_requests_over_the_limit_are_told_to_come_later() -> None:
    with serving(max_concurrent=2) as (address, engine), connected(address) as http:
        http.post("/pause")
        with sent(address, "/v1/completions", {"prompt": "a"}), sent(address, "/generate", {"prompt": [1]}):
            wait_until(lambda: engine.metrics()["requests"] == 2)
            for stream in (False, True):
                answer = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
                assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        wait_until(lambda: engine.metrics()["requests"] == 0)
        http.post("/resume")
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_queue_that_is_full_is_told_to_come_later() -> None:
    with serving(engine=tiny_engine(max_running=1, max_waiting=1)) as (address, engine), connected(address) as http:
        http.post("/pause")
        with sent(address, "/v1/completions", {"prompt": "a"}):
            wait_until(lambda: engine.metrics()["requests"] == 1)
            answer = http.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            # Several prompts of which the queue takes only some: all or none.
            http.post("/resume")
            many = http.post("/v1/completions", json={"prompt": ["a"] * 20, **LONG})
            assert many.status_code == 429
        wait_until(lambda: idle(engine))


# Clients that go away


@contextlib.contextmanager
def sent(address: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a connection of its own, which is closed at the end of the block."""
    host, port = address.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: [::1]\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        yield connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 3, **LONG}),
        ("/v1/chat/completions", {"messages": QUESTION, **LONG}),
        ("/generate", {"prompt": [1], "sampling": {"max_new_tokens": 150, "ignore_eos": True}, "n": 2}),
    ],
)
def test_client_that_disconnects_frees_its_slots(path: str, body: dict[str, Any], stream: bool) -> None:
    engine = tiny_engine(burst=1)
    with serving(engine=engine) as (address, _):
        with sent(address, path, {**body, "stream": stream}) as connection:
            wait_until(lambda: engine.metrics()["running"] > 0)
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        before = engine.metrics()["generated_tokens"]
        wait_until(lambda: idle(engine))
        assert engine.metrics()["generated_tokens"] < before + 6 * 100, "it went on to the end"


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_disconnects_while_the_engine_is_paused_frees_its_place(stream: bool) -> None:
    with serving() as (address, engine), connected(address) as http:
        http.post("/pause")
        with sent(address, "/v1/completions", {"prompt": "a", "stream": stream}):
            wait_until(lambda: engine.metrics()["requests"] == 1)
        wait_until(lambda: idle(engine))
        counted = 'palestra_requests_total{path="/v1/completions",status="499"} 1'
        wait_until(lambda: counted in http.get("/metrics").text)
        assert "palestra_prompt_tokens_total 0" in http.get("/metrics").text
        http.post("/resume")
        assert http.post("/v1/completions", json={"prompt": ["a", "bcd"], "stream": stream}).is_success
        assert "palestra_prompt_tokens_total 4" in http.get("/metrics").text


# Weights, pause, abort, failure


def test_generate_streamed_and_whole_are_the_engines_result(http: httpx.Client) -> None:
    sampling = {"max_new_tokens": 9, "seed": 8, "temperature": 0.7, "top_p": 0.9, "logprobs": 1}
    prompt = TOKENIZER.encode("Hark")
    whole = http.post("/generate", json={"prompt": prompt, "sampling": sampling, "n": 2, "id": "mine"}).json()
    expected = alone(prompt, 2, **sampling)
    assert whole["id"] == "mine"
    assert [(one["tokens"], one["logprobs"], one["versions"]) for one in whole["generations"]] == [
        (list(one.tokens), list(one.logprobs), list(one.versions)) for one in expected
    ]
    tokens: list[list[int]] = [[], []]
    body = {"prompt": prompt, "sampling": sampling, "n": 2, "stream": True}
    with http.stream("POST", "/generate", json=body) as events:
        assert events.headers["Content-Type"].startswith("text/event-stream")
        lines = [line for line in events.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        tokens[chunk["index"]] += chunk["tokens"]
    assert tokens == [list(one.tokens) for one in expected]


def test_update_weights_from_a_folder_and_by_upload_change_text_and_version(tmp_path: Path) -> None:
    assert TOKENIZER.eos is not None
    save_pretrained(tmp_path / "hf", tiny_model(1), tokenizer=TOKENIZER, eos=(TOKENIZER.eos,))
    save_pretrained(tmp_path / "step/model", tiny_model(2), tokenizer=TOKENIZER, eos=(TOKENIZER.eos,))
    body = {"prompt": TOKENIZER.encode("Hark"), "sampling": {"max_new_tokens": 12, "temperature": 0}}
    with serving() as (address, engine), connected(address) as http:

        def told() -> tuple[str, set[int]]:
            (generation,) = http.post("/generate", json=body).json()["generations"]
            return generation["text"], set(generation["versions"])

        texts = [told()]
        for version, folder in ((1, "hf"), (2, "step")):
            update = {"path": str(tmp_path / folder), "version": version, "keep_cache": False}
            assert http.post("/update_weights", json=update).json() == {"version": version}
            texts.append(told())
        original = safetensors.torch.save(dict(tiny_model(0).named_parameters()))
        assert http.put("/update_weights", params={"version": 3}, content=original).json() == {"version": 3}
        texts.append(told())
        assert [versions for _, versions in texts] == [{0}, {1}, {2}, {3}]
        assert len({text for text, _ in texts[:3]}) == 3
        assert texts[3][0] == texts[0][0]
        # What does not fit changes nothing.
        some = dict(list(tiny_model(1).named_parameters())[:-1])
        nan = {name: torch.full_like(tensor, math.nan) for name, tensor in tiny_model(1).named_parameters()}
        for content in (b"no tensors", safetensors.torch.save(some), safetensors.torch.save(nan)):
            assert http.put("/update_weights", params={"version": 4}, content=content).status_code == 400
        too_long = http.put("/update_weights", params={"version": 4}, content=bytes(4_000_000))
        assert too_long.status_code == 413
        assert told() == texts[3]
        assert engine.failure is None


def test_update_weights_from_adapters_alone_says_what_to_send(http: httpx.Client, tmp_path: Path) -> None:
    model = tiny_model(1)
    add_lora(model, LoraSpec(rank=2), torch.Generator().manual_seed(0))
    save_peft(tmp_path / "model", model, "base")
    for path in (tmp_path, tmp_path / "model", tmp_path / "model/adapter_model.safetensors"):
        answer = http.post("/update_weights", json={"path": str(path), "version": 1})
        assert answer.status_code == 400
        said = answer.json()["error"]["message"]
        assert "adapters alone" in said
        assert "merged" in said


def test_abort_answers_with_what_there_is() -> None:
    with serving(engine=tiny_engine(burst=1)) as (address, engine), connected(address) as http:
        body = {"prompt": [1], "id": "x", "sampling": {"max_new_tokens": 150, "ignore_eos": True}, "stream": True}
        with connected(address) as other, http.stream("POST", "/generate", json=body) as events:
            lines = events.iter_lines()
            next(lines)
            other.post("/abort", json={"id": "x"})
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert rest[-1]["stop_reason"] == "abort"
        assert idle(engine)


def test_engine_that_fails_makes_the_server_unhealthy() -> None:
    with serving() as (address, _), connected(address) as http:
        assert http.get("/health").json()["status"] == "ok"
        broken = overflowing(tiny_model())
        assert http.put("/update_weights", params={"version": 1}, content=safetensors.torch.save(broken)).is_success
        for path in ("/v1/completions", "/v1/completions"):
            answer = http.post(path, json={"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        health = http.get("/health")
        assert health.status_code == 503
        assert "failed" in health.json()["error"]["message"]
        assert http.get("/metrics").status_code == 200


# Numbers


def test_metrics_are_prometheus_text_with_cumulative_buckets(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    answer = http.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    sample = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')
    kinds: dict[str, str] = {}
    values: dict[tuple[str, str], float] = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split()
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = sample.fullmatch(line)
            assert match is not None, line
            assert any(match[1] in (name, f"{name}_bucket", f"{name}_sum", f"{name}_count") for name in kinds)
            values[match[1], match[2] or ""] = float(match[3])
    assert values["palestra_requests_total", 'path="/v1/completions",status="200"'] >= 1
    assert values["palestra_engine_free_slots", ""] == values["palestra_engine_slots", ""]
    buckets = [
        value
        for (name, labels), value in values.items()
        if name == "palestra_request_seconds_bucket" and 'path="/v1/completions"' in labels
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == values["palestra_request_seconds_count", 'path="/v1/completions"']


def test_counter_escapes_the_values_of_labels() -> None:
    counter = Counter("x_total", "X.", ("of",))
    counter.add('a"b\\c\nd')
    assert list(counter.lines())[-1] == r'x_total{of="a\"b\\c\nd"} 1'


def test_histogram_counts_an_observation_at_its_bound() -> None:
    histogram = Histogram("x", "X.", bounds=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert [line.split()[-1] for line in histogram.lines()][-5:] == ["2", "3", "4", "12", "4"]


def test_token_text_of_half_a_character_spells_its_bytes() -> None:
    assert token_text("€".encode()) == "€"
    assert token_text("€".encode()[:2]) == r"bytes:\xe2\x82"


def test_sampling_over_the_wire_has_the_fields_and_defaults_of_sampling() -> None:
    assert Sampling(**dict(SamplingBody())) == Sampling()
    assert set(SamplingBody.model_fields) == set(vars(Sampling()))
    assert all(character in ALPHABET for character in QUESTION[0]["content"])
