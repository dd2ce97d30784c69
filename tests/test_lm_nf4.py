"""Frozen matrices in 4 bits: the nearest numbers of the code, products and gradients, adapters on them."""

import copy

import pytest
import torch
import torch.nn.functional as F

from palestra.lm import nf4
from palestra.lm.batch import Batch, score
from palestra.lm.lora import adapted, adapter_state, add_lora, merged_weights
from palestra.lm.model import Transformer
from palestra.lm.nf4 import BLOCK, CODE, Quantized
from palestra.spec.lm import LoraSpec
from palestra.spec.shape import Shape

SHAPE = Shape(layers=2, width=64, heads=4, kv_heads=2, mlp=96, context=32, vocab=40, attention_bias=True)
BATCH = Batch.pack([[1, 2, 3, 4, 5, 6], [7, 8, 9], list(range(20))])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(**spec) -> Transformer:
    model = Transformer(SHAPE)
    model.initialize(torch.Generator().manual_seed(0))
    if spec:
        add_lora(model, LoraSpec(rank=4, **spec), torch.Generator().manual_seed(1))
        for tensor in adapter_state(model).values():
            tensor.add_(normal(*tensor.shape, seed=2) * 0.1)
    return model


@pytest.mark.parametrize("shape", [(7, 9), (64, 64), (5, 64), (1, 1)])
def test_restored_numbers_are_the_nearest_of_their_block(monkeypatch, shape):
    monkeypatch.setattr(nf4, "CHUNK", 2 * BLOCK)
    weight = normal(*shape)
    restored = Quantized.of(weight, double=False).whole()
    for block, back in zip(weight.flatten().split(BLOCK), restored.flatten().split(BLOCK), strict=True):
        scale = block.abs().max()
        distance = (block[:, None] / scale - torch.tensor(CODE)).abs().min(1).values
        torch.testing.assert_close((block - back).abs() / scale, distance, rtol=1e-4, atol=1e-6)
    assert restored.shape == weight.shape
    assert torch.equal(Quantized.of(restored, double=False).whole(), restored)


def test_code_is_even_about_normal_numbers():
    codes = Quantized.of(normal(256, 256), double=False).codes
    counts = torch.bincount(torch.cat([codes >> 4, codes & 15]).int(), minlength=16)
    assert counts.min() > 0.02 * 256 * 256 / BLOCK  # the ends belong to the largest of each block
    assert counts[3:13].max() / counts[3:13].min() < 2


def test_scales_in_8_bits_change_little_and_take_an_eighth_of_a_bit():
    weight = normal(256, 256)
    plain, double = (Quantized.of(weight, double=double) for double in (False, True))
    error = (plain.whole() - weight).norm()
    assert error / weight.norm() < 0.1
    assert (double.whole() - weight).norm() < 1.01 * error
    assert plain.codes.nbytes * 2 == weight.numel()
    assert double.scales.nbytes * 64 == weight.numel()
    assert not Quantized.of(torch.zeros(8, 64), double=False).whole().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_restored_matrix(dtype):
    quantized, out = Quantized.of(normal(48, 32), double=True), normal(5, 48, seed=2).to(dtype)
    x, same = (normal(5, 32, seed=1).to(dtype).requires_grad_() for _ in range(2))
    found, expected = quantized.product(x), F.linear(same, quantized.whole(dtype))
    assert torch.equal(found, expected)
    found.backward(out)
    expected.backward(out)
    assert torch.equal(x.grad, same.grad)


@pytest.mark.parametrize("spec", [{}, {"dora": True}, {"targets": ["v_proj"]}], ids=["all", "dora", "some"])
def test_adapters_on_4_bits_compute_what_their_merged_weights_do(spec):
    model, plain = make(quantize="nf4", double_quantize=True, **spec), Transformer(SHAPE)
    plain.load_state_dict(merged_weights(model))
    with torch.no_grad():
        torch.testing.assert_close(score(model, BATCH).logprobs, score(plain, BATCH).logprobs, rtol=1e-4, atol=1e-4)
    score(model, BATCH).logprobs.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == set(adapter_state(model))
    assert len(adapted(model)) == 2 * 4
    assert not any(module.weight.numel() for module in adapted(model).values())


def test_copy_in_bf16_keeps_the_scales():
    model = make(quantize="nf4")
    other = copy.deepcopy(model).to(torch.bfloat16)
    for mine, copied in zip(adapted(model).values(), adapted(other).values(), strict=True):
        assert torch.equal(mine.quantized.whole(), copied.quantized.whole())
