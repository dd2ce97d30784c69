"""Generation with images: transformers' tokens, prefixes of other pictures not shared, weights, refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from vision_models import reference, save_tiny, sequence, theirs

from palestra.data.media import Image
from palestra.errors import UsageError
from palestra.generate.client import GenerateBody, request_json
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.lm.batch import Batch, score
from palestra.lm.hf import load_pretrained
from palestra.lm.model import Transformer

GREEDY = Sampling(temperature=0, max_new_tokens=10, ignore_eos=True)
SIZES = [[(112, 140)], [(56, 56), (308, 84)], [], [(140, 168), (84, 56)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return load_pretrained(folder).model


def requests(seed: int, sampling: Sampling = GREEDY) -> list[Request]:
    random = np.random.default_rng(seed)
    rows = [sequence(random, sizes) for sizes in SIZES]
    return [Request(tuple(tokens), sampling, media=images) for tokens, images in rows]


def test_greedy_tokens_equal_transformers(folder: Path, model: Transformer) -> None:
    asked = requests(0)
    # The same tokens with another picture, which must not find the first one's pages.
    first = asked[0].media[0]
    other = Image(np.random.default_rng(9).integers(0, 256, first.pixels.shape, np.uint8), first.start)
    asked.append(Request(asked[0].prompt, GREEDY, media=(other,)))
    results, expected = Engine(model, eos=frozenset(), max_running=3).run(asked + asked), reference(folder)
    settings = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
    for request, result in zip(asked + asked, results, strict=True):
        tokens = list(request.prompt)
        made = expected.generate(**theirs(tokens, request.media), **settings)[0, len(tokens) :].tolist()
        assert list(result.generations[0].tokens) == made


def test_log_probabilities_are_those_of_the_trainer(model: Transformer) -> None:
    sampling = Sampling(max_new_tokens=12, seed=5, ignore_eos=True)
    for request in requests(1, sampling):
        (result,) = Engine(model, eos=frozenset()).run([request])
        made = result.generations[0]
        with torch.no_grad():
            batch = Batch.pack([[*request.prompt, *made.tokens]], images=[request.media])
            expected = score(model, batch).logprobs[-len(made.tokens) :]
        assert torch.tensor(made.logprobs).sub(expected).abs().max() < 1e-4


def test_same_picture_is_shared_and_another_is_not(model: Transformer) -> None:
    tokens, images = sequence(np.random.default_rng(2), [(168, 280)])  # 60 tokens: more than a page
    other = (Image(np.random.default_rng(3).integers(0, 256, images[0].pixels.shape, np.uint8), images[0].start),)
    engine = Engine(model, eos=frozenset())
    asked = [Request(tuple(tokens), GREEDY, media=media) for media in (images, images, other)]
    results = []
    shared = []
    for request in asked:
        results.append(engine.run([request])[0].generations[0])
        shared.append(engine.metrics()["shared_tokens"])
    assert results[0] == results[1]
    assert results[0].logprobs != results[2].logprobs
    assert shared[0] == 0 < shared[1] == shared[2]


def test_batch_does_not_change_a_bit(model: Transformer) -> None:
    sampling = Sampling(max_new_tokens=8, seed=3, ignore_eos=True)
    asked = requests(4, sampling)
    together = Engine(model, eos=frozenset()).run(asked)
    alone = [Engine(model, eos=frozenset()).run([request])[0] for request in asked]
    assert [one.generations for one in together] == [one.generations for one in alone]


def test_new_weights_of_the_tower_are_seen(model: Transformer) -> None:
    request = requests(5)[0]
    engine = Engine(model, eos=frozenset())
    before = engine.run([request])[0].generations[0]
    changed = {name: t * 1.5 if name == "vision.out.weight" else t for name, t in model.state_dict().items()}
    engine.publish(changed, 1)
    after = engine.run([request])[0].generations[0]
    assert before.logprobs != after.logprobs
    engine.publish(model.state_dict(), 2)
    assert engine.run([request])[0].generations[0].logprobs == before.logprobs


def test_prompts_that_do_not_fit_their_images_are_refused(model: Transformer) -> None:
    engine, request = Engine(model, eos=frozenset()), requests(6)[0]
    for media in ((), (request.media[0].at(2),), (Image(np.zeros((56, 56, 3), np.uint8), request.media[0].start),)):
        with pytest.raises(UsageError, match="images"):
            engine.run([Request(request.prompt, GREEDY, media=media)])


def test_image_to_a_text_only_engine_is_refused() -> None:
    from palestra.spec.shape import Shape

    shape = Shape(layers=1, width=16, heads=2, mlp=16, context=64, vocab=320)
    text = Transformer(shape)
    text.initialize(torch.Generator())
    with pytest.raises(UsageError, match="reads text only"):
        Engine(text, eos=frozenset()).run(requests(7)[:1])


def test_request_as_json_keeps_its_images() -> None:
    request = requests(8)[1]
    body = GenerateBody.model_validate_json(json.dumps(request_json(request, stream=False)))
    assert body.request().media == request.media
