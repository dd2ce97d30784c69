"""Adam (Kingma & Ba 2015) on one flat vector, as a pure function, so that a whole update can be one compiled graph."""

from typing import NamedTuple

import torch
from torch import Tensor

BETA1, BETA2 = 0.9, 0.999


class Adam(NamedTuple):
    """Adam's memory, all of it tensors, so that counting does not recompile."""

    mean: Tensor
    square: Tensor
    count: Tensor
    """Updates so far."""
    left: Tensor
    """1 − β₁ᵗ and 1 − β₂ᵗ of the update that comes next, (2,). Worked out an update ahead: in the same graph they would
    be worked out again for every parameter."""

    @classmethod
    def zeros(cls, parameters: Tensor) -> "Adam":
        """The memory before the first update."""
        count = parameters.new_zeros((), dtype=torch.float64)
        return cls(torch.zeros_like(parameters), torch.zeros_like(parameters), count, _left(count, parameters.dtype))


def adam_step(parameters: Tensor, gradient: Tensor, adam: Adam, lr: Tensor, eps: float) -> tuple[Tensor, Adam]:
    """One update: the new parameters and the new memory. `eps` is added to the corrected root, as in the paper."""
    mean = torch.lerp(adam.mean, gradient, 1 - BETA1)
    square = torch.lerp(adam.square, gradient * gradient, 1 - BETA2)
    first, second = adam.left.unbind()
    root = (square / second).sqrt_().add_(eps)
    count = adam.count + 1
    return parameters - (lr / first) * mean / root, Adam(mean, square, count, _left(count, parameters.dtype))


def _left(count: Tensor, dtype: torch.dtype) -> Tensor:
    # From the count in double precision: 1 - 0.999 has lost five digits in single.
    return torch.stack([1 - BETA1 ** (count + 1), 1 - BETA2 ** (count + 1)]).to(dtype)


def clip_norm(gradient: Tensor, most: float | None) -> tuple[Tensor, Tensor]:
    """The gradient scaled down to the norm `most` where it is longer, and its norm before."""
    norm = torch.linalg.vector_norm(gradient)
    if most is None:
        return gradient, norm
    return gradient * (most / (norm + 1e-6)).clamp(max=1.0), norm
