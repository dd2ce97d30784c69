"""A model with eyes on a GPU: the logits, gradients and tokens of the CPU, and the trainer's log-probabilities."""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from vision_models import END, PAD, START, VOCAB, sequence

from palestra.data.media import Image
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.lm.batch import Batch, forward, score
from palestra.lm.engine import compile_for_training
from palestra.lm.head import logits
from palestra.lm.model import Transformer
from palestra.rl.kl import k3
from palestra.spec.lm import ComputeSpec
from palestra.spec.shape import Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

DEVICE = "cuda"
SIZES = [[(112, 140)], [(56, 56), (308, 84)], [], [(140, 168), (84, 56)], [(28, 28)], [(252, 252)]]
"""Of the images of each sequence: smaller than a window, cut by windows, more tokens than a page, none."""


@pytest.fixture(autouse=True)
def whole_products() -> Iterator[None]:
    """Without TF32, which rounds factors to 10 bits."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = False
    yield
    for flag, value in zip(flags, before, strict=True):
        flag.allow_tf32 = value


def make(dtype: torch.dtype = torch.float32) -> Transformer:
    """Heads of Qwen2.5-VL's sizes (80 and 128), two of each; windows of two tokens."""
    tower = {"layers": 3, "width": 160, "heads": 2, "mlp": 100, "window": 56, "full_layers": [1]}
    tower |= {"sections": [16, 24, 24], "tokens": [START, PAD, END]}
    sizes = {"layers": 3, "width": 192, "heads": 4, "kv_heads": 2, "head_dim": 128, "mlp": 256, "context": 256}
    shape = Shape.model_validate({**sizes, "vocab": VOCAB, "attention_bias": True, "tied": False, "vision": tower})
    model, draws = Transformer(shape, dtype), torch.Generator().manual_seed(0)
    model.initialize(draws)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # scores that differ
            else:
                parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)
    return model


def rows(seed: int) -> list[tuple[list[int], tuple[Image, ...]]]:
    random = np.random.default_rng(seed)
    return [sequence(random, sizes) for sizes in SIZES]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return ((found - expected).norm() / expected.norm()).item()


def test_packed_logits_equal_those_of_the_cpu():
    made = rows(0)
    batch = Batch.pack([tokens for tokens, _ in made], images=[images for _, images in made])
    found = []
    for device in (DEVICE, "cpu"):
        model = make().to(device)
        with torch.no_grad():
            found.append(logits(forward(model, batch.to(device)).hidden, model.unembed).cpu())
    assert found[1].std() > 0.5
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)


def test_sequences_packed_score_as_each_alone():
    made, model = rows(1), make().to(DEVICE)
    batch = Batch.pack([tokens for tokens, _ in made], images=[images for _, images in made]).to(DEVICE)
    with torch.no_grad():
        together = score(model, batch).logprobs.split(batch.lengths)
        for (tokens, images), found in zip(made, together, strict=True):
            alone = score(model, Batch.pack([tokens], images=[images]).to(DEVICE)).logprobs
            torch.testing.assert_close(found, alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("alike", [False, True])
def test_gradients_equal_those_of_the_cpu(alike):
    """Also of completions of one prompt, whose beginning and picture are computed once."""
    made = rows(2)
    if alike:
        made = [([*tokens, *ends], images) for tokens, images in made[1:4] for ends in ([7], [8, 9], [9, 8, 7])]
    batch = Batch.pack([tokens for tokens, _ in made], images=[images for _, images in made])
    assert (batch.shared is not None) is alike
    grads = []
    for device in (DEVICE, "cpu"):
        model = make().to(device)
        score(model, batch.to(device)).logprobs.sum().backward()
        grads.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() == {name for name, _ in model.named_parameters()}
    gaps = {name: relative(found, grads[1][name]) for name, found in grads[0].items()}
    assert {name: gap for name, gap in gaps.items() if gap > 1e-4} == {}


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("settings", [{}, {"prefill_tokens": 16, "kv_bytes": 2**22}])
def test_greedy_tokens_equal_those_of_the_cpu(triton, settings, monkeypatch):
    if not triton:
        for module in ("lm.layers", "lm.head", "generate.engine.batch", "generate.engine.engine"):
            monkeypatch.setattr(f"palestra.{module}.TRITON", False)
    sampling, model = Sampling(temperature=0, max_new_tokens=24, ignore_eos=True), make()
    asked = [Request(tuple(tokens), sampling, media=images) for tokens, images in rows(3)]
    first = asked[-1].media[0]  # the same tokens with another picture, which must not find the first one's pages
    other = Image(np.random.default_rng(9).integers(0, 256, first.pixels.shape, np.uint8), first.start)
    asked = [*asked, Request(asked[-1].prompt, sampling, media=(other,)), *asked]
    found = []
    for device in (DEVICE, "cpu"):
        engine = Engine(model, eos=frozenset(), device=device, max_running=4, **settings)
        found.append([result.generations[0].tokens for result in engine.run(asked)])
        assert engine.metrics()["free_pages"] == engine.metrics()["pages"]
    assert found[0] == found[1]
    assert found[0][5] != found[0][6]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-8), (torch.bfloat16, 1e-4)])
def test_log_probabilities_of_samples_are_those_of_the_trainer(dtype, bound):
    model = make(dtype).to(DEVICE)
    engine = Engine(model, eos=frozenset(), device=DEVICE, max_running=8)
    asked = [
        Request(tuple(tokens), Sampling(max_new_tokens=60, seed=seed, ignore_eos=True), n=4, media=images)
        for seed in range(4)
        for tokens, images in rows(seed)
    ]
    made = [(result, one) for result in engine.run(asked) for one in result.generations]
    masks = [[0.0] * len(result.prompt) + [1.0] * len(one.tokens) for result, one in made]
    media = [request.media for request in asked for _ in range(4)]
    batch = Batch.pack([(*r.prompt, *one.tokens) for r, one in made], masks, images=media).to(DEVICE)
    behavior = torch.tensor([value for _, one in made for value in one.logprobs], device=DEVICE)
    assert len(behavior) == len(asked) * 4 * 60
    with torch.no_grad():
        trainer = score(model, batch).logprobs[batch.loss_mask > 0]
    kl = k3(behavior, trainer).mean().item()
    print(f"k3 {kl:.2e} over {len(behavior)} tokens, largest gap {(behavior - trainer).abs().max().item():.4f}")
    assert kl <= bound


def test_packed_scores_and_gradients_in_bf16_are_near_fp32_on_the_cpu():
    made = rows(4)
    batch = Batch.pack([tokens for tokens, _ in made], images=[images for _, images in made])
    found, names = [], ("vision.patches.weight", "vision.blocks.0.attn.qkv.weight", "layers.0.attn.qkv.weight")
    for device, dtype in ((DEVICE, torch.bfloat16), ("cpu", torch.float32)):
        model = make().to(device)
        model.dtype = dtype
        scored = score(model, batch.to(device))
        scored.logprobs.sum().backward()
        found.append([scored.logprobs.detach(), *(model.get_parameter(name).grad for name in names)])
    gaps = [relative(ours, exact) for ours, exact in zip(*found, strict=True)]
    print("relative gaps", [f"{gap:.1e}" for gap in gaps])
    assert gaps[0] < 2e-2
    assert max(gaps[1:]) < 8e-2


def test_compiled_blocks_score_and_learn_as_plain_ones():
    """As training on a GPU compiles them: batches with images and without come in turns."""
    plain, compiled = make().to(DEVICE), make().to(DEVICE)
    compile_for_training(compiled, ComputeSpec(steps=1, compile="on"), torch.device(DEVICE))
    for seed in range(3):
        made = [row for row in rows(seed) if bool(row[1]) is (seed != 1)]
        batch = Batch.pack([tokens for tokens, _ in made], images=[images for _, images in made]).to(DEVICE)
        results = []
        for model in (plain, compiled):
            model.zero_grad()
            scored = score(model, batch)
            scored.logprobs.sum().backward()
            results.append((scored.logprobs.detach(), model.layers[0].attn.qkv.weight.grad.clone()))
        for ours, theirs in zip(*results, strict=True):
            assert relative(ours, theirs) < 1e-4


def test_new_weights_of_the_tower_are_seen():
    model = make()
    engine = Engine(model, eos=frozenset(), device=DEVICE, max_running=4)
    tokens, images = rows(5)[0]
    request = Request(tuple(tokens), Sampling(temperature=0, max_new_tokens=8, ignore_eos=True), media=images)
    before = engine.run([request])[0].generations[0]
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_parameter("vision.out.weight").mul_(1.5)
    engine.publish(changed.state_dict(), 1)
    after = engine.run([request])[0].generations[0]
    assert before.logprobs != after.logprobs
    with torch.no_grad():
        batch = Batch.pack([[*tokens, *after.tokens]], images=[images])
        expected = score(changed, batch).logprobs[-8:]
    torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=1e-4, rtol=0)
