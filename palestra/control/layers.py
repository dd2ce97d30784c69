"""Layers with their initial weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

THIN = 8  # numbers in a side of a matrix


def begin(layer: nn.Linear | nn.Conv2d, gain: float | None) -> None:
    """Orthogonal weights of the given gain and zero biases; None leaves torch's own."""
    if gain is None:
        return
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def linear(inputs: int, outputs: int, gain: float | None) -> nn.Linear:
    """A linear layer, with orthogonal weights of the given gain and zero biases, or with torch's own (None)."""
    layer = nn.Linear(inputs, outputs)
    begin(layer, gain)
    return layer


def conv(inputs: int, outputs: int, kernel: int, gain: float | None, **given: Any) -> nn.Conv2d:
    """A convolution over images, with initial weights as `linear`'s."""
    layer = nn.Conv2d(inputs, outputs, kernel, **given)
    begin(layer, gain)
    return layer


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight`, (..., B, inputs) and (..., inputs, outputs).

    In a compiled graph on a CPU a matrix with a side of a few numbers, as the first and last ones of a network are, is
    multiplied element by element: that becomes a part of the kernels around it, where a product of its own costs more
    to call than to work out (docs/log.md).
    """
    inputs, outputs = weight.shape[-2:]
    if not _thin(x, weight):
        return x @ weight
    # Stacked, which copies: numbers that lie next to each other in the long side are read many at a time.
    if inputs <= THIN:
        rows = torch.stack(weight.unbind(-2)).unsqueeze(-2)
        return sum((x[..., k, None] * rows[k] for k in range(1, inputs)), x[..., 0, None] * rows[0])
    columns = torch.stack(weight.unbind(-1)).unsqueeze(-2)
    return torch.stack([(x * columns[k]).sum(dim=-1) for k in range(outputs)], dim=-1)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`F.linear` with `product` where that is thin: weights are (outputs, inputs)."""
    return product(x, weight.mT) + bias if _thin(x, weight) else F.linear(x, weight, bias)


def _thin(x: Tensor, weight: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.is_cpu and min(weight.shape[-2:]) <= THIN
