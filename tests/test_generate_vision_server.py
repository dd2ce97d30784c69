"""Images over HTTP: OpenAI's image_url as data URLs, addresses refused unless allowed, tokens with images."""

import asyncio
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import Response
from PIL import Image as Pillow
from tiny_server import running, serving

from palestra.data.chat import encode_chat
from palestra.data.media import VISION_TOKENS, PixelLimits, data_url
from palestra.data.tokenizers import SPECIAL_TOKENS, character_tokenizer
from palestra.generate.client import HttpGenerator
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

TOKENIZER = character_tokenizer("system\nuser\nassistant\nHow many?", (*SPECIAL_TOKENS, *VISION_TOKENS)).with_images(
    PixelLimits()
)
PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
GREEDY = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}


def engine(seed: int = 0) -> Engine:
    tower = {"layers": 1, "width": 16, "heads": 2, "mlp": 24, "sections": [2, 1, 1], "tokens": TOKENIZER.vision_ids}
    sizes = {"layers": 1, "width": 16, "heads": 2, "mlp": 24, "context": 96, "vocab": TOKENIZER.vocab_size}
    model = Transformer(Shape.model_validate({**sizes, "vision": tower}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return Engine(model, eos=frozenset(), tokenizer=TOKENIZER)


def asked(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "How many?"}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(None, engine()) as (url, _):
        yield url


def test_chat_with_an_image_equals_the_engine(server: str) -> None:
    messages = asked(data_url(PIXELS))
    answer = httpx.post(f"{server}/v1/chat/completions", json={"messages": messages, **GREEDY}, timeout=60)
    assert answer.status_code == 200, answer.text
    encoded = encode_chat(TOKENIZER, messages, add_generation_prompt=True)
    request = Request(tuple(encoded.tokens), Sampling(temperature=0, max_new_tokens=6), media=encoded.images)
    (expected,) = engine().run([request])
    assert answer.json()["choices"][0]["token_ids"] == list(expected.generations[0].tokens)
    assert answer.json()["prompt_token_ids"] == encoded.tokens


def test_tokens_with_images_by_the_client_equal_the_engine(server: str) -> None:
    encoded = encode_chat(TOKENIZER, asked(data_url(PIXELS)), add_generation_prompt=True)
    request = Request(tuple(encoded.tokens), Sampling(seed=1, max_new_tokens=6), media=encoded.images)

    async def ask() -> Any:
        async with HttpGenerator(server) as generator:
            return await generator.generate(request)

    (expected,) = engine().run([request])
    assert asyncio.run(ask()).generations[0].tokens == expected.generations[0].tokens


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1/cat.png", "--image-urls"),
        ("data:image/png;base64,@@", "base64"),
        ("file:///etc/passwd", "not a data URL"),
        ("data:image/png;base64,aGVsbG8=", "cannot be read"),
    ],
)
def test_bad_image_is_a_400_that_says_why(server: str, url: str, why: str) -> None:
    answer = httpx.post(f"{server}/v1/chat/completions", json={"messages": asked(url), **GREEDY}, timeout=60)
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_image_that_needs_more_than_the_context_is_a_400(server: str) -> None:
    large = np.zeros((560, 560, 3), np.uint8)
    body = {"messages": asked(data_url(large)), **GREEDY}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_image_to_a_text_model_is_a_400() -> None:
    with serving(None) as (url, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": asked(data_url(PIXELS))}, timeout=60)
    assert answer.status_code == 400
    assert "text only" in answer.json()["error"]["message"]


def test_address_is_fetched_where_the_server_allows_it() -> None:
    app, file = FastAPI(), io.BytesIO()
    Pillow.fromarray(PIXELS).save(file, "PNG")

    @app.get("/cat.png")
    async def cat() -> Response:
        return Response(file.getvalue(), media_type="image/png")

    with running(app) as elsewhere, serving(None, engine(), image_urls=True) as (url, _):
        answers = [
            httpx.post(f"{url}/v1/chat/completions", json={"messages": asked(where), **GREEDY}, timeout=60)
            for where in (f"{elsewhere}/cat.png", data_url(PIXELS), f"{elsewhere}/dog.png")
        ]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]
    assert answers[2].status_code == 400
    assert "status 404" in answers[2].json()["error"]["message"]
