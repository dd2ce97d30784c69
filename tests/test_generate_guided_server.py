"""Penalties and guides over HTTP: OpenAI's own client, vLLM's fields, refusals."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from test_generate_guided import PERSON, PROMPT, TOKENIZER, engine_of
from tiny_server import KEY, NAME, serving

from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling

QUESTION: Any = [{"role": "user", "content": "Who is it?"}]
CLOSING = {str(TOKENIZER.encode(sign)[0]): 60 for sign in '"}'}
"""A bias with which an object of a random model ends."""
HOT = {"model": NAME, "temperature": 1.5, "max_tokens": 300}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Engine]]:
    with serving(engine=engine_of(max_running=8)) as found:
        yield found


@pytest.fixture
def client(server: tuple[str, Engine]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key=KEY, max_retries=0) as found:
        yield found


@pytest.fixture
def http(server: tuple[str, Engine]) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server[0], headers=headers, timeout=60) as found:
        yield found


def test_json_schema_of_openai_is_followed_whole_and_streamed(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    options: dict[str, Any] = {**HOT, "messages": QUESTION, "response_format": wanted, "seed": 3}
    answer = client.chat.completions.create(**options, n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
    events = client.chat.completions.create(**options, stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == answer.choices[0].message.content


def test_openais_parse_gives_the_model_of_pydantic(client: openai.OpenAI) -> None:
    class Animal(BaseModel):
        kind: Literal["fox", "dog"]
        legs: Literal[2, 4]

    answer = client.chat.completions.parse(**HOT, messages=QUESTION, response_format=Animal)
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_json_object_is_an_object(http: httpx.Client) -> None:
    body = {**HOT, "messages": QUESTION, "response_format": {"type": "json_object"}, "logit_bias": CLOSING}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)
    free = http.post("/v1/chat/completions", json={**body, "response_format": {"type": "text"}, "max_tokens": 5})
    assert free.status_code == 200


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[a-z]{3}-[0-9]{2}"}, "[a-z]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" | "b" "c"'}, "a|bc"),
        ({"json": {"enum": [12, None]}}, "12|null"),
        ({"json": '{"const": 7}', "regex": None, "disable_any_whitespace": False}, "7"),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_structured_outputs_of_vllm_are_followed(
    http: httpx.Client, path: str, outputs: dict[str, Any], pattern: str
) -> None:
    params = {"temperature": 1.5, "max_tokens": 400, "structured_outputs": outputs, "logit_bias": CLOSING}
    if path == "/v1/completions":
        text = http.post(path, json={"prompt": list(PROMPT), **params}).json()["choices"][0]["text"]
    else:
        response = http.post(path, json={"token_ids": list(PROMPT), "sampling_params": params}).json()
        text = TOKENIZER.decode(response["choices"][0]["token_ids"], continues=True)
    assert re.fullmatch(pattern, text)


def test_penalties_of_openai_and_vllm_reach_the_engine(http: httpx.Client, client: openai.OpenAI) -> None:
    asked = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"70": 4, "71": -100.0}}
    sampling = Sampling(
        max_new_tokens=30, seed=9, frequency_penalty=1.5, presence_penalty=0.5, logit_bias={70: 4.0, 71: -100.0}
    )
    (expected,) = engine_of().run([Request(PROMPT, sampling)])[0].generations
    options: dict[str, Any] = {"model": NAME, "prompt": list(PROMPT), "max_tokens": 30, "seed": 9}
    assert client.completions.create(**options, **asked).choices[0].text == expected.text
    repeated = {**options, "repetition_penalty": 1.8, "return_token_ids": True}
    tokens = http.post("/v1/completions", json=repeated).json()["choices"][0]["token_ids"]
    (expected,) = (
        engine_of().run([Request(PROMPT, Sampling(max_new_tokens=30, seed=9, repetition_penalty=1.8))])[0].generations
    )
    assert tuple(tokens) == expected.tokens


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"frequency_penalty": 2.5}, "frequency_penalty: Input should be less than or equal to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty: Input should be greater than or equal to 0.01"),
        ({"logit_bias": {"70": 101}}, "logit_bias.*less than or equal to 100"),
        ({"logit_bias": {"many": 1}}, "logit_bias.*valid integer"),
        ({"logit_bias": {"99999": 1}}, "token 99999 is not in the model's vocabulary"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type: Input should be 'text'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}, "json is invalid"),
        ({"structured_outputs": {"regex": "("}}, "regex is invalid: unclosed group"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp: Extra inputs"),
        ({"structured_outputs": {}}, "exactly one of json, regex, choice, grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.*Expecting property name"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "give one of them"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 4}, "min_new_tokens: a guide says where"),
        ({"guided_json": {}}, "Unrecognized request argument supplied: guided_json"),
    ],
)
def test_what_is_wrong_is_refused_with_status_400(http: httpx.Client, body: dict[str, Any], message: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "the", **body})
    assert response.status_code == 400
    assert re.search(message, response.json()["error"]["message"])
    assert http.get("/health").status_code == 200


def test_schema_that_is_nested_far_too_deeply_is_refused(http: httpx.Client) -> None:
    schema = '{"items":' * 900 + "{}" + "}" * 900
    body = f'{{"prompt": "the", "structured_outputs": {{"json": {schema}}}}}'
    response = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "recursion limit" in response.json()["error"]["message"]
