"""MXFP4 tensors as numbers (OCP Microscaling Formats): blocks of 32 values of four bits with a common power of two."""

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; those from 8 on are the same with a minus."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of both parts of a tensor."""


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """(experts, rows, n, 16) bytes of two values each and exponents (experts, rows, n) → (experts, rows, 32 · n).

    In bf16, which holds them exactly.
    """
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    out = torch.empty(*scales.shape[:-1], 32 * scales.shape[-1], dtype=torch.bfloat16)
    for codes, exponents, expert in zip(blocks, scales, out, strict=True):  # all at once would take much memory
        numbers = values[torch.stack([codes & 15, codes >> 4], dim=-1).int()].flatten(-2)  # (rows, n, 32)
        powers = (exponents.int() << 23).view(torch.float32)  # their bits are the exponent's of a number
        expert.copy_((numbers * powers[..., None]).flatten(-2))
    return out
