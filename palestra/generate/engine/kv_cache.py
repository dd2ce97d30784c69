"""Keys and values of running sequences, one row of memory each, and attention over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.errors import UsageError
from palestra.lm.attention import additive_mask
from palestra.spec.shape import Shape

COLUMNS = 64
"""A row of the cache has a multiple of this many positions."""
LANES = 16
"""Attention works on a multiple of this many positions: vectors are full, and odd sizes would take twice as long."""
BLOCK = 256
"""Queries of a prompt attend in blocks that begin at multiples of this position: however a prompt is cut into chunks,
each product has the same shape, and the keys and values the same bits."""


class Cache:
    """Keys and values (L, rows, K, context, dim). Row i belongs to the sequence in row i of the batch."""

    def __init__(self, shape: Shape, rows: int, context: int, dtype: torch.dtype, device: torch.device):
        size = (shape.layers, rows, shape.kv, context, shape.dim)
        self.keys, self.values = (_zeros(size, dtype, device) for _ in range(2))

    @classmethod
    def fitting(
        cls, shape: Shape, context: int, dtype: torch.dtype, device: torch.device, budget: int | None, most: int
    ) -> "Cache":
        """As many rows of `context` positions as a budget in bytes holds, at most `most`; null takes of what is free.

        Positions are rounded up.
        """
        context = columns_for(-(-context // COLUMNS) * COLUMNS, dtype)
        each = 2 * shape.layers * shape.kv * context * shape.dim * dtype.itemsize
        if budget is None and device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(device)[0] * 0.8)
        elif budget is None:
            # Pages are allocated when they are first written, and other processes on the machine need memory too.
            budget = psutil.virtual_memory().available // 2
        if budget < each:
            raise UsageError(
                f"a sequence of {context} tokens needs {each / 2**20:,.1f} MiB of keys and values, but there is room "
                f"for {budget / 2**20:,.1f} MiB: give more memory or a shorter context"
            )
        return cls(shape, min(most, budget // each), context, dtype, device)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the rows may come to use."""
        return self.keys.nbytes + self.values.nbytes

    def copy(self, source: int, target: int, length: int) -> None:
        """Give a row the first `length` positions of another."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]


def columns_for(length: int, dtype: torch.dtype) -> int:
    """How many positions attention reads where `length` are needed. What is masked adds exact zeros.

    But a row must have the same bits whatever the longest row needs. Torch attends in blocks of 512 positions, and of
    a block's products in FP32 the library adds up more than 384 in two halves: beyond 256 a block is read whole.
    """
    columns = -(-length // LANES) * LANES
    if dtype != torch.bfloat16 and columns % 512 > 256:
        return -(-columns // 512) * 512
    return columns


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # NumPy asks the system for zeroed pages, which take memory only once they are written; torch would write them all.
    integer = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]
    return torch.from_numpy(np.zeros(size, integer)).view(dtype)


class DecodeAttention:
    """Attention of one new token in each of the first rows, over what the row has cached and itself."""

    def __init__(self, cache: Cache, lengths: Tensor, longest: int):
        """`lengths` (B): tokens cached before; `longest`: at least all of them and 1 more."""
        self.cache, self.lengths = cache, lengths
        self.columns = min(columns_for(longest, cache.keys.dtype), cache.keys.shape[3])
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim), T ≥ B → (T, H, dim), zeros beyond B."""
        batch, (padded, heads, dim) = len(self.lengths), q.shape
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        for cached, new in ((keys, k[:batch]), (values, v[:batch])):
            cached.view(-1, dim).index_copy_(0, self.places, new.reshape(-1, dim))
        # Queries that share keys stand where several positions would: each key is read once.
        grouped, mask = q[:batch].unflatten(1, (keys.shape[1], -1)), self._mask(window, q.dtype)
        keys, values = keys[:batch, :, : self.columns], values[:batch, :, : self.columns]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(batch, heads, dim)
        return out if padded == batch else F.pad(out, (0, 0, 0, 0, 0, padded - batch))

    @cached_property
    def places(self) -> Tensor:
        """Where the new tokens go: of all positions of all heads of all rows, (B · K)."""
        heads, context = self.cache.keys.shape[2:4]
        starts = context * torch.arange(heads * len(self.lengths), device=self.lengths.device)
        return starts + self.lengths.repeat_interleave(heads)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            columns = torch.arange(self.columns, device=self.lengths.device)
            self._masks[window] = additive_mask(self.lengths, columns, window, dtype)[:, None, None]
        return self._masks[window]


@dataclass(frozen=True)
class Segment:
    """Tokens `start` to `end` of the sequence in a row."""

    row: int
    start: int
    end: int


class PrefillAttention:
    """Attention of pieces of sequences that lie end to end, each over what its row has cached and itself.

    Pieces with the same places in their sequences, such as prompts of one length, are computed together.
    """

    def __init__(self, cache: Cache, segments: Sequence[Segment]):
        self.cache = cache
        self._alike: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """By start and end: the rows (n), and where their tokens lie (n, end - start)."""
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        ends = np.cumsum([segment.end - segment.start for segment in segments])
        for bounds in dict.fromkeys((segment.start, segment.end) for segment in segments):
            same = [i for i, segment in enumerate(segments) if (segment.start, segment.end) == bounds]
            places = ends[same][:, None] + np.arange(bounds[0] - bounds[1], 0)
            rows = torch.tensor([segments[i].row for i in same], device=cache.keys.device)
            self._alike[bounds] = rows, torch.from_numpy(places).to(rows.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim), T at least all segments → (T, H, dim), zeros beyond them."""
        out = torch.zeros_like(q)
        for (first, last), (rows, places) in self._alike.items():
            for cached, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
                cached[rows, :, first:last] = new[places].transpose(1, 2)
            for start in range(first, last, BLOCK):
                count = min(BLOCK, last - start)
                columns = -(-count // LANES) * LANES
                block = places[:, start - first : start - first + count]
                # Filled up with queries that count for nothing, and keys that are later than all queries.
                part = F.pad(q[block], (0, 0, 0, 0, 0, columns - count))
                stored = (self.cache.keys, self.cache.values)
                keys, values = (tensor[layer, :, :, : start + columns][rows] for tensor in stored)
                plain = start == 0 and (window is None or window >= columns)
                attended = F.scaled_dot_product_attention(
                    part.transpose(1, 2),
                    keys,
                    values,
                    attn_mask=None if plain else self._mask(start, start + columns, window, q),
                    is_causal=plain,
                    enable_gqa=q.shape[1] != keys.shape[1],
                )
                out[block] = attended.transpose(1, 2)[:, :count]
        return out

    def _mask(self, start: int, end: int, window: int | None, like: Tensor) -> Tensor:
        key = (start, end, window)
        if key not in self._masks:
            positions = torch.arange(end, device=like.device)
            self._masks[key] = additive_mask(positions[start:], positions, window, like.dtype)
        return self._masks[key]
