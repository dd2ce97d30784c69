"""A network as a function of one vector, and Adam on it in place: an update of a larger network as one graph.

`nets.Flat` and `adam.py` do the same for PPO's small networks. Here the vectors have 10⁵ numbers: it is worth not to
allocate them again, and not to work out Adam's bias corrections, which are the same for all, once for each number.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from palestra.control.adam import BETA1, BETA2, clip_norm


class Trained(NamedTuple):
    """Parameters that are learned and both moments of Adam (Kingma & Ba 2015), changed in place."""

    vector: Tensor
    mean: Tensor
    square: Tensor

    @classmethod
    def of(cls, vector: Tensor) -> "Trained":
        """These, before the first update."""
        return cls(vector, torch.zeros_like(vector), torch.zeros_like(vector))

    def step(self, gradient: Tensor, pace: Tensor, most: float | None = None, beta1: float = BETA1) -> None:
        """One gradient step at this `pace`, the gradient's norm clipped to `most`."""
        if most is not None:
            gradient, _ = clip_norm(gradient, most)
        mean = torch.lerp(self.mean, gradient, 1 - beta1)
        square = torch.lerp(self.square, gradient * gradient, 1 - BETA2)
        self.vector.copy_(self.vector - pace[0] * mean / (square.sqrt() + pace[1]))
        self.mean.copy_(mean)
        self.square.copy_(square)


def pace(lr: float, eps: float, count: int, beta1: float = BETA1) -> list[float]:
    """Step size and ε of the `count`-th update (from 1), both with the corrections of the moments in them.

    lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + ε) = [lr · √(1-β₂ᵗ)/(1-β₁ᵗ)] · m / (√v + [ε · √(1-β₂ᵗ)])
    """
    root = math.sqrt(1 - BETA2**count)
    return [lr * root / (1 - beta1**count), eps * root]


class Shaped:
    """The shapes of a network's parameters: `shaped(vector)` is the network with these parameters."""

    def __init__(self, net: nn.Module):
        self.net = net
        self.names = [name for name, _ in net.named_parameters()]
        self.shapes = [p.shape for p in net.parameters()]
        self.sizes = [p.numel() for p in net.parameters()]

    def start(self) -> Tensor:
        """The parameters that the network was made with, as one vector."""
        return torch.cat([p.detach().reshape(-1) for p in self.net.parameters()])

    def __call__(self, vector: Tensor) -> Callable:
        """The network as a function of its arguments, differentiable in `vector`."""
        parts = zip(self.names, vector.split(self.sizes), self.shapes, strict=True)
        named = {name: part.view(shape) for name, part, shape in parts}
        return lambda *args: torch.func.functional_call(self.net, named, args)


def gradient(loss: Callable[[Tensor], tuple[Tensor, Any]], vector: Tensor) -> tuple[Tensor, Any]:
    """The gradient of `loss(vector)[0]`, and `loss(vector)[1]`; eager or inside a compiled graph."""
    if torch.compiler.is_compiling():
        slope, (_, extra) = torch.func.grad_and_value(loss, has_aux=True)(vector)
        return slope, extra
    leaf = vector.detach().requires_grad_()
    with torch.enable_grad():
        value, extra = loss(leaf)
    return torch.autograd.grad(value, leaf)[0], extra


def taken(tensors: Sequence[Any]) -> list[Any]:
    """A copy of nested tuples of tensors, as plain lists on the CPU."""
    return [part.to("cpu", copy=True) if isinstance(part, Tensor) else taken(part) for part in tensors]


def put_back(tensors: Sequence[Any], saved: Sequence[Any]) -> None:
    """Write what `taken` gave into the same tensors, so that views of them stay views."""
    for part, value in zip(tensors, saved, strict=True):
        if isinstance(part, Tensor):
            part.copy_(value)
        else:
            put_back(part, value)
