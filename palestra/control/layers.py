"""Layers with their initial weights."""

from typing import Any

from torch import nn


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
