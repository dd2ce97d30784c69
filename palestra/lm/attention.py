"""Attention of packed sequences over themselves and over shared prefixes, which are computed once.

A hidden state depends on a token and those before it, so tokens after the same beginning have the same one. Matrices,
norms and gates then see every such token once; attention alone sees whole sequences.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.lm import native
from palestra.lm.layers import sent, wide

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
        return Shared(*(sent(part, device) for part in self))


def shared(tokens: np.ndarray, lengths: Sequence[int]) -> Shared | None:
    """Beginnings that neighbors among the sequences have in common; None where they are too few to matter."""
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
        (index,), grad = ctx.saved_tensors, wide(grads[0].flatten(1))
        if grad.is_cuda:  # `index_add_` would add in any order there
            summed = torch.ops.aten.embedding_dense_backward(grad, index, ctx.rows, -1, False)
        else:
            summed = grad.new_zeros(ctx.rows, grad.shape[1]).index_add_(0, index, grad)
        return summed.to(grads[0].dtype).view(ctx.rows, *grads[0].shape[1:]), None


SHORT = 64 if torch.backends.mkl.is_available() else 0
"""Up to this many tokens a CPU is faster with whole products than with flash attention: twice at 40, as fast at 128.
Without MKL torch multiplies one matrix of a batch after the other: 78 ms for 128 × 4 heads of 24 tokens, flash 9."""
LANES = 16
"""Keys that a query has at least, hidden ones included: torch's softmax of a shorter row takes 7 times as long."""


class PackedAttention:
    """Causal attention inside each of the sequences that lie in one row; `cu_seqlens` are their bounds (B + 1).

    On the CPU sequences of similar length are gathered into padded blocks: a `[T, T]` mask would be 80 times slower.
    """

    def __init__(self, cu_seqlens: Tensor, lengths: list[int], shared: Shared | None = None):
        """With `shared`, queries, keys and values are of the tokens that are computed, and so is the result."""
        self.cu_seqlens, self.lengths, self.shared = cu_seqlens, lengths, shared
        self.longest, self.flash = max(lengths), flash_settings() if cu_seqlens.is_cuda else {}
        self.rows = len(lengths) if len(set(lengths)) == 1 else None
        """How many sequences, where all have the same length and are a rectangle."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim) → (T, H, dim)."""
        flash = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and sinks is None
        if self.rows is None and not flash:
            return self._blocks(q, k, v, window, sinks)
        if self.shared is None:
            return self._whole(q, k, v, window, sinks)
        q, k, v = (spread(t, self.shared.place) for t in (q, k, v))
        return self._whole(q, k, v, window, sinks).index_select(0, self.shared.first)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
        """Of every token of the batch, without blocks."""
        if self.rows is not None:
            q, k, v = (t.unflatten(0, (self.rows, -1)).transpose(1, 2) for t in (q, k, v))
            return causal(q, k, v, window, sinks).transpose(1, 2).flatten(0, 1)
        return varlen(q, k, v, self.cu_seqlens, self.cu_seqlens, self.longest, self.longest, window, **self.flash)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
        pieces = []
        for index in self._buckets:
            # (rows, heads, longest, dim)
            block_q, block_k, block_v = (
                spread(t, index.flatten()).unflatten(0, index.shape).transpose(1, 2) for t in (q, k, v)
            )
            pieces.append(causal(block_q, block_k, block_v, window, sinks).transpose(1, 2).flatten(0, 1))
        return torch.cat(pieces).index_select(0, self._back)

    @cached_property
    def _alike(self) -> list[np.ndarray]:
        return alike(self.lengths)

    @cached_property
    def _buckets(self) -> list[Tensor]:
        """For each of these groups where its tokens lie, (rows, longest); the end is padding.

        Padding repeats the first token: causal, so no real token sees it.
        """
        lengths = np.array(self.lengths)
        starts, device = np.cumsum(lengths) - lengths, self.cu_seqlens.device
        buckets = []
        for group in self._alike:
            columns = np.arange(lengths[group[-1]])
            index = starts[group, None] + np.where(columns < lengths[group, None], columns, 0)
            buckets.append(sent(torch.from_numpy(index), device))
        return buckets if self.shared is None else [self.shared.place[index] for index in buckets]

    @cached_property
    def _back(self) -> Tensor:
        """Where each token that is asked for lies in the blocks laid end to end."""
        lengths, begins, offset = np.array(self.lengths), np.zeros(len(self.lengths), np.int64), 0
        for group in self._alike:
            longest = lengths[group[-1]]
            begins[group] = offset + longest * np.arange(len(group))
            offset += longest * len(group)
        starts = np.cumsum(lengths) - lengths
        back = torch.from_numpy(np.repeat(begins - starts, lengths) + np.arange(lengths.sum()))
        back = sent(back, self.cu_seqlens.device)
        return back if self.shared is None else back[self.shared.first]


def alike(lengths: Sequence[int]) -> list[np.ndarray]:
    """The numbers of sequences whose lengths differ by less than a quarter, by length."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not groups or lengths[i] * 3 > lengths[groups[-1][0]] * 4:
            groups.append([])
        groups[-1].append(i)
    return [np.array(group) for group in groups]


class TreeAttention:
    """Attention of the tokens that are computed of a batch, by our kernel: on the CPU and without gradients.

    Sequences that begin alike read the same keys and values, and nothing is padded.
    """

    def __init__(self, lengths: Sequence[int], shared: Shared | None, wanted: Tensor, last: int):
        """In the layer `last`, only the computed tokens `wanted` (in order) need a result."""
        sizes = np.asarray(lengths)
        starts, place = np.cumsum(sizes) - sizes, np.arange(sizes.sum())
        own = np.ones(len(place), bool)
        if shared is not None:
            own, place = np.isin(place, shared.first.numpy()), shared.place.numpy()
        # A range ends where the next token lies elsewhere, and where a sequence's own tokens begin.
        edge = np.concatenate([[True], (np.diff(place) != 1) | (own[1:] != own[:-1])])
        edge[starts] = True
        begins = np.flatnonzero(edge)
        ranges = np.stack([place[begins], np.diff(begins, append=len(place))], axis=1)
        bounds = np.searchsorted(begins, np.stack([starts, starts + sizes], axis=1))
        bounds = bounds[own[starts + sizes - 1]]  # without sequences that others begin with, which have no queries
        first, own_tokens = ranges[bounds[:, 1] - 1].T
        some = np.append(wanted.numpy(), len(place))  # the first at or after the first of its own
        spared = np.minimum(some[np.searchsorted(some[:-1], first)] - first, own_tokens)
        self._last, self._ranges = last, torch.from_numpy(ranges)
        self._bounds, self._last_bounds = (
            torch.from_numpy(np.column_stack([bounds, asked])) for asked in (own_tokens, own_tokens - spared)
        )

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q (U, H, dim), k and v (U, K, dim) → (U, H, dim)."""
        bounds = self._last_bounds if layer == self._last else self._bounds
        return native.attend_tree(q, k, v, self._ranges, bounds, window, sinks)


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """Causal attention of a block: q (rows, H, T, dim), k and v (rows, K, T, dim) → (rows, H, T, dim)."""
    length, grouped, dtype = q.shape[2], q.shape[1] != k.shape[1], q.dtype
    if sinks is not None:
        positions = torch.arange(length, device=q.device)
        return masked(q, k, v, additive_mask(positions, positions, window, dtype), sinks)
    if q.device.type == "cpu" and length <= SHORT:
        positions = torch.arange(max(length, LANES), device=q.device)
        mask = additive_mask(positions[:length], positions, window, torch.promote_types(dtype, torch.float32))
        return _Short.apply(q, k, v, mask) if torch.is_grad_enabled() else _short(q, k, v, mask)[0]
    if q.device.type == "cpu" and dtype == torch.bfloat16 and length <= 512:
        # The backward pass of flash attention in bf16 is 4 times slower there than in FP32 (128 tokens; equal at 700).
        # Without gradients too, so that both give the same numbers.
        return causal(q.float(), k.float(), v.float(), window).to(dtype)
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    t = torch.arange(length, device=q.device)
    behind = t[:, None] - t[None, :]
    mask = (behind >= 0) & (behind < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of q (rows, H, T, dim) with an additive mask (…, T, S); `sinks` (H) or (H, T) join each softmax.

    A sink is one more key, with that score and no value. It comes first, with hidden ones up to `LANES`: where the
    others lie does not depend on how many there are.
    """
    if sinks is not None:
        k, v = (F.pad(t, (0, 0, LANES, 0)) for t in (k, v))
        sinks = (sinks if sinks.ndim > 1 else sinks[:, None]).to(mask.dtype)
        first = F.pad(sinks[None, ..., None], (0, LANES - 1), value=float("-inf"))  # (1, H, T, LANES)
        lead = torch.broadcast_shapes(first.shape[:-1], mask.shape[:-1])
        mask = torch.cat([part.expand(*lead, part.shape[-1]) for part in (first, mask)], dim=-1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def additive_mask(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """(Q, K): 0 where the token at a query's position attends to that at a key's, −inf elsewhere."""
    hidden = keys > queries[:, None]
    if window is not None:
        hidden |= keys <= queries[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


class _Short(torch.autograd.Function):
    """Attention with all its probabilities in memory, at least in FP32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out, *saved = _short(q, k, v, mask)
        ctx.save_for_backward(*saved)
        ctx.shapes = q.shape, k.shape, q.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        q_shape, k_shape, dtype = ctx.shapes
        grad = _stacked(grads[0], k_shape[1])
        to_p = torch.bmm(grad, v.transpose(1, 2))
        to_scores = torch._softmax_backward_data(to_p, p, -1, p.dtype)
        to_q = torch.bmm(to_scores, k).mul_(_scale(q))
        to_k = torch.bmm(to_scores.transpose(1, 2), q).mul_(_scale(q))
        to_v = torch.bmm(p.transpose(1, 2), grad)
        to_k, to_v = (t[:, : k_shape[2]].reshape(k_shape).to(dtype) for t in (to_k, to_v))
        return to_q.view(q_shape).to(dtype), to_k, to_v, None


def _short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The result, and what it was computed from: queries, keys, values and probabilities, (rows · K, …)."""
    shape, dtype, groups = q.shape, q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (_stacked(t, k.shape[1]) for t in (q, k, v))
    if k.shape[1] < LANES:
        k, v = (F.pad(t, (0, 0, 0, LANES - t.shape[1])) for t in (k, v))
    scores = torch.baddbmm(mask.repeat(groups, 1), q, k.transpose(1, 2), alpha=_scale(q))
    p = scores.softmax(-1)
    return torch.bmm(p, v).view(shape).to(dtype), q, k, v, p


def _stacked(t: Tensor, heads: int) -> Tensor:
    """(rows, H, T, dim) → (rows · heads, H / heads · T, dim), at least in FP32 and contiguous."""
    return wide(t).reshape(t.shape[0] * heads, -1, t.shape[3])


def _scale(q: Tensor) -> float:
    return q.shape[-1] ** -0.5


@cache
def flash_settings() -> dict[str, Any]:
    """What tells some versions of torch's flash attention that heads may share keys: asked for outside of a graph."""
    from torch.nn.attention.varlen import varlen_attn  # which imports torch's compiler, 6 s on a slow core

    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def varlen(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_q: int, longest_k: int, window: int | None,
    **settings: Any,
) -> Tensor:  # fmt: skip
    """Flash attention of sequences end to end, whose queries are the last tokens of their keys."""
    from torch.nn.attention.varlen import varlen_attn

    back = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, queries, keys, longest_q, longest_k, window_size=(back, 0), **settings)
    assert isinstance(out, Tensor)  # a pair only where the normalizers are asked for
    return out
