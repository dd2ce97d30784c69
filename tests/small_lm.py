"""A small random transformer and its character tokenizer, for tests of generation."""

import string

import torch

from palestra.data.tokenizers import Tokenizer, character_tokenizer
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

CONTEXT, VOCAB = 96, 64


def small_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, deviation: float = 0.25, **changes: object
) -> Transformer:
    """Random weights large enough that some tokens are much likelier than others."""
    sizes = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp": 64, "context": CONTEXT, "vocab": VOCAB}
    model = Transformer(Shape(**{**sizes, **changes}), dtype)
    draw = torch.Generator().manual_seed(seed)
    model.initialize(draw)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * deviation)
    return model.requires_grad_(False)


def overflowing(model: Transformer) -> dict[str, torch.Tensor]:
    """Weights that are all finite, with which a model computes no numbers."""
    weights = dict(model.state_dict())
    return {**weights, "norm.weight": torch.full_like(weights["norm.weight"], 3e38)}


def small_tokenizer() -> Tokenizer:
    """A token for each letter, space and full stop: at most VOCAB of them."""
    return character_tokenizer(string.ascii_letters + " .")
