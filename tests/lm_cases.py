"""Small transformers of every kind for tests, and their gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from palestra.lm.batch import Batch, score
from palestra.lm.model import Transformer
from palestra.spec.shape import MoESpec, Shape

SHAPE = Shape(layers=3, width=24, heads=4, kv_heads=2, mlp=40, context=64, vocab=50)
VARIANTS = {
    "llama": SHAPE,
    "qwen2": SHAPE.model_copy(update={"attention_bias": True, "tied": False, "window": 5, "window_from": 1}),
    "qwen3": SHAPE.model_copy(update={"qk_norm": "head", "head_dim": 10}),
    "experts": SHAPE.model_copy(
        update={
            "qk_norm": "full",
            "moe": MoESpec(experts=5, active=2, mlp=16, shared=1, balance=0.1, bias_rate=0.1),
        }
    ),
}


def make(shape: Shape, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model with weights large enough for every term to matter, and not so large that they amplify rounding."""
    model, generator = Transformer(shape, dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(1 + drawn if name.endswith("norm.weight") else drawn)
    return model


def sequences(lengths: Sequence[int], seed: int = 0, vocab: int = 50) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def gradients(model: Transformer, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Of the summed negative log-probabilities and entropies of several batches, one after the other."""
    model.zero_grad()
    for batch in batches:
        scored = score(model, batch)
        (scored.logprobs.sum() + 0.1 * scored.entropy.sum()).neg().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
