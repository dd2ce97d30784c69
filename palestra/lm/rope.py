"""Rotary frequencies, plain and stretched."""

import math

import torch
from torch import Tensor

from palestra.spec.shape import RopeScaling, Shape


def frequencies(shape: Shape) -> tuple[Tensor, float]:
    """The angle a position for each pair of a head's dimensions (dim / 2, FP32), and the factor of cos and sin."""
    exponents = torch.arange(0, shape.dim, 2, dtype=torch.float32, device="cpu") / shape.dim
    plain = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, scaling, shape), scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths stay, long ones are divided, those between are blended."""
    wavelength = 2 * math.pi / plain
    smooth = (scaling.original_context / wavelength - scaling.low) / (scaling.high - scaling.low)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(plain: Tensor, scaling: RopeScaling, shape: Shape) -> Tensor:
    """Peng et al. 2023, §3.2: a linear ramp between the dimensions that turn `low` and `high` times in the context."""

    def dimension(turns: float) -> float:
        return shape.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    first = max(math.floor(dimension(scaling.high)), 0)
    last = min(math.ceil(dimension(scaling.low)), shape.dim - 1)
    ramp = (torch.arange(shape.dim // 2, dtype=torch.float32, device="cpu") - first) / max(last - first, 0.001)
    divided = ramp.clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)


def pair_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection (heads · dim, …) in which neighbours are rotated together, as halves that are.

    Meta's checkpoints, llama2.c and llama.cpp pair neighbours; `rotate` and Hugging Face pair the halves of a head.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
