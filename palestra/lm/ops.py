"""The small parts of the transformer: matrices, normalisation, rotation, gates, the feed-forward network."""

from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """A matrix kept in its own precision and applied in the input's: master weights in FP32, arithmetic in bf16.

    `parts` are the rows of the matrices that are stacked in it, by their names elsewhere (`{"q_proj": 576, …}`): one
    product is faster than three. Checkpoints, LoRA and Muon see the parts.
    """

    def __init__(self, inputs: int, parts: dict[str, int], *, bias: bool = False):
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), inputs))
        self.bias = nn.Parameter(torch.zeros(sum(parts.values()))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the precision of `x`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` over its root mean square, times the weight."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def wide(x: Tensor) -> Tensor:
    """`x` in FP32, or as it is where it is wider: what exponentials, routers and rotations are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x` (T, heads, dim) by `cos` and `sin` (T, dim / 2), in FP32; halves are paired."""
    if _fused(x):
        return _kernels().rotate(x, cos, sin)
    first, second = wide(x).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) · up of the two halves."""
    if _fused(gate_up):
        return _kernels().swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _fused(x: Tensor) -> bool:
    """Whether one kernel stands in for several: while generating on a GPU, where launches are what costs."""
    return x.is_cuda and torch.is_inference_mode_enabled()


def _kernels() -> ModuleType:
    from palestra.lm import kernels  # Triton comes with torch for GPUs alone

    return kernels


def bilinear(gate_up: Tensor) -> Tensor:
    """gate · up of the two halves, without a nonlinearity."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * up


class MLP(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, width: int, hidden: int, gate: Callable[[Tensor], Tensor] = swiglu):
        super().__init__()
        self.gate = gate
        self.gate_up = Linear(width, {"gate_proj": hidden, "up_proj": hidden})
        self.down = Linear(hidden, {"down_proj": width})

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) → (T, D)."""
        return self.down(self.gate(self.gate_up(x)))
