"""Attention of packed sequences over themselves: variable-length kernels on the GPU, padded blocks on the CPU."""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.lm.ops import wide

SHORT = 64
"""Up to so many tokens a CPU is faster with whole products than with flash attention: twice at 40, as fast at 128."""
LANES = 16
"""Keys that a query has at least, hidden ones included: torch's softmax of a shorter row takes 7 times as long."""


class PackedAttention:
    """Causal attention inside each of the sequences that lie in one row; `cu_seqlens` are their bounds (B + 1).

    On the CPU sequences of similar length are gathered into padded blocks: a `[T, T]` mask would be 80 times slower.
    """

    def __init__(self, cu_seqlens: Tensor, lengths: list[int]):
        self.cu_seqlens, self.lengths = cu_seqlens, lengths
        self.longest = max(lengths)
        self.rows = len(lengths) if len(set(lengths)) == 1 else None
        """How many sequences, where all have the same length and are a rectangle."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim) → (T, H, dim)."""
        if self.rows is not None:
            q, k, v = (t.unflatten(0, (self.rows, -1)).transpose(1, 2) for t in (q, k, v))
            return causal(q, k, v, window).transpose(1, 2).flatten(0, 1)
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            return varlen(q, k, v, self.cu_seqlens, self.cu_seqlens, self.longest, self.longest, window)
        return self._blocks(q, k, v, window)

    @torch.compiler.disable  # lengths differ from batch to batch: it would be compiled again for each
    def _blocks(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        pieces = []
        for index in self._buckets:
            block_q, block_k, block_v = (t[index].transpose(1, 2) for t in (q, k, v))  # (rows, heads, longest, dim)
            pieces.append(causal(block_q, block_k, block_v, window).transpose(1, 2).flatten(0, 1))
        return torch.cat(pieces)[self._back]

    @cached_property
    def _buckets(self) -> list[Tensor]:
        """Indices (rows, longest) of sequences whose lengths differ by less than a quarter; the end is padding.

        Padding repeats the first token: causal, so no real token sees it.
        """
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        groups: list[list[int]] = []
        for i in order:
            if not groups or self.lengths[i] * 3 > self.lengths[groups[-1][0]] * 4:
                groups.append([])
            groups[-1].append(i)
        buckets = []
        for group in groups:
            longest = self.lengths[group[-1]]
            rows = [[starts[i] + t if t < self.lengths[i] else starts[i] for t in range(longest)] for i in group]
            buckets.append(torch.tensor(rows, device=self.cu_seqlens.device))
        return buckets

    @cached_property
    def _back(self) -> Tensor:
        """Where each token of the row lies in the blocks laid end to end."""
        total = sum(self.lengths)
        back = torch.empty(total, dtype=torch.long)
        offset, lengths = 0, dict(zip(self.cu_seqlens[:-1].tolist(), self.lengths, strict=True))
        for index in self._buckets:
            for row in index.tolist():
                length = lengths[row[0]]
                back[row[0] : row[0] + length] = torch.arange(offset, offset + length)
                offset += len(row)
        return back.to(self.cu_seqlens.device)


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of a block: q (rows, H, T, dim), k and v (rows, K, T, dim) → (rows, H, T, dim)."""
    length, grouped, dtype = q.shape[2], q.shape[1] != k.shape[1], q.dtype
    if q.device.type == "cpu" and length <= SHORT:
        mask = _mask(length, window, q)
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


def _mask(length: int, window: int | None, like: Tensor) -> Tensor:
    """(length, length or LANES), at least FP32: 0 where a token looks, −inf elsewhere."""
    t = torch.arange(max(length, LANES), device=like.device)
    behind = t[:length, None] - t[None, :]
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return wide(like.new_zeros(hidden.shape)).masked_fill_(hidden, float("-inf"))


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


def varlen(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_q: int, longest_k: int, window: int | None
) -> Tensor:
    """Flash attention of sequences end to end, whose queries are the last tokens of their keys."""
    from torch.nn.attention.varlen import varlen_attn  # flash attention inside torch

    back = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, queries, keys, longest_q, longest_k, window_size=(back, 0))
    assert isinstance(out, Tensor)  # a pair only where the normalisers are asked for
    return out
