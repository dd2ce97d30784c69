"""Adam (Kingma & Ba 2015) on one flat vector, as a pure function, so that a whole update can be one compiled graph."""

from typing import NamedTuple

import torch
from torch import Tensor

BETA1, BETA2 = 0.9, 0.999


class Adam(NamedTuple):
    """Adam's memory: both moments and the number of updates so far (a tensor, so that counting does not recompile)."""

    mean: Tensor
    square: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, parameters: Tensor) -> "Adam":
        """The memory before the first update."""
        # The count in double precision: 1 - 0.999 has lost five digits in single.
        count = parameters.new_zeros((), dtype=torch.float64)
        return cls(torch.zeros_like(parameters), torch.zeros_like(parameters), count)


def adam_step(parameters: Tensor, gradient: Tensor, adam: Adam, lr: Tensor, eps: float) -> tuple[Tensor, Adam]:
    """One update: the new parameters and the new memory. `eps` is added to the corrected root, as in the paper."""
    count = adam.count + 1
    mean = torch.lerp(adam.mean, gradient, 1 - BETA1)
    square = torch.lerp(adam.square, gradient * gradient, 1 - BETA2)
    # Single precision again before they meet the vectors: in one fused kernel those would be doubles too.
    first, second = (1 - BETA1**count).to(lr.dtype), (1 - BETA2**count).to(lr.dtype)
    root = (square / second).sqrt_().add_(eps)
    return parameters - (lr / first) * mean / root, Adam(mean, square, count)


def clip_norm(gradient: Tensor, most: float | None) -> tuple[Tensor, Tensor]:
    """The gradient scaled down to the norm `most` where it is longer, and its norm before."""
    norm = torch.linalg.vector_norm(gradient)
    if most is None:
        return gradient, norm
    return gradient * (most / (norm + 1e-6)).clamp(max=1.0), norm
