"""Batch renormalisation (Ioffe 2017) as a pure function: the running statistics are arguments and results."""

from typing import NamedTuple

import torch
from torch import Tensor

MOST_SCALE, MOST_SHIFT = (
    3.0,
    5.0,
)  # how far batch and running statistics may disagree after the warm-up (Ioffe 2017, §4)
EPS = 1e-3


class Running(NamedTuple):
    """The running mean and variance of one layer for each of the twins, `(2, 1, D)`."""

    mean: Tensor
    var: Tensor

    @classmethod
    def start(cls, width: int) -> "Running":
        """Before the first batch."""
        return cls(torch.zeros(2, 1, width), torch.ones(2, 1, width))


def warmth_after(updates: int, warmup: int) -> list[float]:
    """How far batch and running statistics may disagree by then: in scale, from 1 on, and in shift, from 0 on.

    Plain batch normalisation at first, renormalisation after `warmup` updates, linearly in between.
    """
    share = 1.0 if warmup == 0 else min(1.0, updates / warmup)
    return [1.0 + share * (MOST_SCALE - 1.0), share * MOST_SHIFT]


def normalised(x: Tensor, running: Running) -> Tensor:
    """`x` (2, B, D) by the running statistics: how a network that is not learning sees it."""
    return (x - running.mean) * torch.rsqrt(running.var + EPS)


def renormalised(x: Tensor, running: Running, warmth: Tensor, momentum: float) -> tuple[Tensor, Running]:
    """`x` (2, B, D) by the batch's statistics, corrected towards the running ones, and these after the batch.

    `warmth` (2,) is what `warmth_after` says. The correction has no gradient; within its bounds the result equals
    `normalised`, so that what is learned is what the policy's step then sees.
    """
    var, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
    std, running_std = (var + EPS).sqrt(), (running.var + EPS).sqrt()
    ratio, offset = std.detach() / running_std, (mean.detach() - running.mean) / running_std
    scale = torch.minimum(torch.maximum(ratio, 1.0 / warmth[0]), warmth[0])
    shift = torch.minimum(torch.maximum(offset, -warmth[1]), warmth[1])
    after = Running(torch.lerp(running.mean, mean.detach(), momentum), torch.lerp(running.var, var.detach(), momentum))
    return (x - mean) / std * scale + shift, after
