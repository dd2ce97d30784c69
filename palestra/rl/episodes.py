"""Where episodes end in a `(T, N)` block, and which rows receive credit from the next one."""

import torch
from torch import Tensor


def continues(terminated: Tensor, truncated: Tensor, valid: Tensor | None = None) -> Tensor:
    """Where the next row is the next step of the same episode, `(T, N)`, boolean; False in the block's last row.

    Rows with `valid=False` (dummy autoreset steps, padding) belong to no episode.
    """
    follows = ~(terminated | truncated)
    if valid is not None:
        follows &= valid
        follows[:-1] &= valid[1:]
    follows[-1] = False
    return follows


def full_precision(x: Tensor) -> Tensor:
    """At least float32: sums over an episode lose their small terms in bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
