"""What sequences begin with alike, computed once: the prompt of a group's answers, or of a question's choices.

A hidden state depends on a token and those before it, so tokens after the same beginning have the same one. Matrices,
norms and gates then see every such token once; attention alone sees whole sequences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

WORTH = 0.2
"""The share of tokens that must be spared: handing them out to attention costs as much as 0.14 (docs/log.md)."""


class Shared(NamedTuple):
    """Which tokens of a batch are computed, and which of these stands for each of its tokens."""

    first: Tensor
    """(U) int64: where they lie in the batch."""
    place: Tensor
    """(T) int64: numbers below U."""

    def to(self, device: torch.device | str) -> "Shared":
        """The same on a device."""
        return Shared(*(part.to(device, non_blocking=True) for part in self))


def shared(tokens: np.ndarray, lengths: Sequence[int]) -> Shared | None:
    """Beginnings that neighbours among the sequences have in common; None where they are too few to matter."""
    if len(lengths) < 2:
        return None
    sizes = np.asarray(lengths)
    starts = np.cumsum(sizes) - sizes
    if _at_most(tokens, sizes, starts) < WORTH * len(tokens):
        return None
    offset = np.arange(len(tokens)) - np.repeat(starts, sizes)
    # The token at the same place of the sequence before, where that is as long; of the first sequence none is.
    before = np.repeat(np.concatenate([[0], starts[:-1]]), sizes) + offset
    alike = (offset < np.repeat(np.concatenate([[0], sizes[:-1]]), sizes)) & (tokens[before] == tokens)
    common = np.minimum.reduceat(np.where(alike, np.repeat(sizes, sizes), offset), starts)
    own = offset >= np.repeat(common, sizes)
    if own.sum() > (1 - WORTH) * len(tokens):
        return None
    source = np.where(own, np.arange(len(tokens)), before)
    while not own[source].all():  # from the sequence before to the one before that: twice as far each time
        source = source[source]
    place = (np.cumsum(own) - 1)[source]
    return Shared(torch.from_numpy(np.flatnonzero(own)), torch.from_numpy(place))


def _at_most(tokens: np.ndarray, sizes: np.ndarray, starts: np.ndarray) -> int:
    """No more tokens than this are shared, by a look at the first two of each sequence: texts share one at most."""
    second = np.minimum(starts + 1, len(tokens) - 1)
    alike = (tokens[starts[1:]] == tokens[starts[:-1]]) & (tokens[second[1:]] == tokens[second[:-1]])
    return int(np.where(alike, np.minimum(sizes[1:], sizes[:-1]), 1).sum())


def spread(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x` (U, …) by their numbers, each as often as it is named; gradients are summed in FP32, in order."""
    return _Spread.apply(x, index)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,), grad = ctx.saved_tensors, grads[0].flatten(1)
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        if grad.is_cuda:  # `index_add_` would add in any order there
            found = torch.ops.aten.embedding_dense_backward(wide, index, ctx.rows, -1, False)
        else:
            found = wide.new_zeros(ctx.rows, wide.shape[1]).index_add_(0, index, wide)
        return found.to(grad.dtype).view(ctx.rows, *grads[0].shape[1:]), None
