"""Frozen matrices in 4 bits (NF4, QLoRA: Dettmers et al. 2023), restored whenever they are multiplied with."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.lm.moments import CHUNK, dequantize, quantize

BLOCK = 64
"""Numbers that share a scale."""
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NF4: quantiles of a normal distribution between -1 and 1, with an exact 0 (Appendix E of the paper)."""


@dataclass(frozen=True)
class Quantized:
    """A matrix of which each block of 64 numbers has a scale, and each number 4 bits of a byte."""

    shape: torch.Size
    codes: Tensor
    """Two numbers a byte."""
    scales: Tensor
    """Of blocks: FP32, or the codes of `moments.quantize` (§3, double quantization)."""
    outer: tuple[Tensor, Tensor] | None
    """Of scales in 8 bits: the scales of their blocks, and their mean."""

    @classmethod
    def of(cls, weight: Tensor, *, double: bool) -> "Quantized":
        """The nearest numbers of the code."""
        numbers = torch.tensor(CODE, device=weight.device)
        flat = weight.detach().float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        codes = torch.bucketize(scaled, (numbers[1:] + numbers[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
        packed, mean = codes[:, 0] << 4 | codes[:, 1], scales.mean()
        if not double:
            return cls(weight.shape, packed, scales, None)
        inner, outer = quantize(scales - mean, signed=True)
        return cls(weight.shape, packed, inner, (outer, mean))

    def whole(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, restored in FP32 a chunk at a time."""
        scales = self.scales
        if self.outer is not None:
            scales = dequantize(scales, self.outer[0], signed=True) + self.outer[1]
        numbers = torch.tensor(CODE, device=scales.device)
        flat = torch.empty(len(scales), BLOCK, dtype=dtype, device=scales.device)
        for start in range(0, len(scales), CHUNK // BLOCK):
            at = slice(start, start + CHUNK // BLOCK)
            codes = self.codes.view(len(scales), -1)[at]
            pairs = torch.stack((codes >> 4, codes & 15), 2).flatten(1).int()
            flat[at] = numbers[pairs].mul_(scales[at, None])
        return flat.view(-1)[: self.shape.numel()].view(self.shape)

    def product(self, x: Tensor) -> Tensor:
        """x · Wᵀ in the precision of `x`; no restored matrix outlives it."""
        return _Product.apply(x, self)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantized) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.whole(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.weight.whole(grads[0].dtype), None
