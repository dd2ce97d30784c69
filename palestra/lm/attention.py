"""Attention of packed sequences over themselves: variable-length kernels on the GPU, padded blocks on the CPU."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor


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


def varlen(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, longest_q: int, longest_k: int, window: int | None
) -> Tensor:
    """Flash attention of sequences end to end, whose queries are the last tokens of their keys."""
    from torch.nn.attention.varlen import varlen_attn  # flash attention inside torch

    back = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, queries, keys, longest_q, longest_k, window_size=(back, 0))
    assert isinstance(out, Tensor)  # a pair only where the normalisers are asked for
    return out
