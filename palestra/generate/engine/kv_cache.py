"""Keys and values of running sequences in pages, and attention over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.errors import UsageError
from palestra.generate.engine.pages import PAGE, pages_for
from palestra.lm import native
from palestra.lm.attention import LANES, additive_mask, masked
from palestra.lm.layers import sent
from palestra.spec.shape import Shape


class Cache:
    """Keys and values (L, pages, PAGE, K, dim). Which pages a sequence has, its row of a table tells."""

    def __init__(self, shape: Shape, pages: int, dtype: torch.dtype, device: torch.device):
        size = (shape.layers, pages, PAGE, shape.kv, shape.dim)
        self.keys, self.values = (_zeros(size, dtype, device) for _ in range(2))
        self.before = LANES if shape.sinks else 0
        """Columns that `masked` puts before the positions of a sequence."""

    @classmethod
    def fitting(
        cls, shape: Shape, context: int, dtype: torch.dtype, device: torch.device, budget: int | None, rows: int
    ) -> "Cache":
        """As many pages as a budget in bytes holds, at most those of `rows` sequences of `context` positions.

        Null takes of what is free. One page more is scratch.
        """
        each = 2 * shape.layers * PAGE * shape.kv * shape.dim * dtype.itemsize
        if budget is None and device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(device)[0] * 0.8)
        elif budget is None:
            # Memory is taken when it is first written, and other processes on the machine need some too.
            budget = psutil.virtual_memory().available // 2
        if budget < each * pages_for(context):
            raise UsageError(
                f"a sequence of {context} tokens needs {each * pages_for(context) / 2**20:,.1f} MiB of keys and "
                f"values, but there is room for {budget / 2**20:,.1f} MiB: give more memory or a shorter context"
            )
        return cls(shape, min(rows * pages_for(context), budget // each) + 1, dtype, device)

    @property
    def pages(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the pages may come to use."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Put k and v (T, K, dim) to `places` (T), which count the positions of all pages."""
        for cached, new in ((self.keys[layer], k), (self.values[layer], v)):
            cached.view(-1, *new.shape[1:]).index_copy_(0, places, new)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of sequences whose pages are `tables` (B, n): each (B, K, n · PAGE, dim)."""
        keys, values = (cached[layer][tables].flatten(1, 2).transpose(1, 2) for cached in (self.keys, self.values))
        return keys, values

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give pages what others hold."""
        to, of = sent(torch.tensor([targets, sources]), self.keys.device)
        for tensor in (self.keys, self.values):
            tensor[:, to] = tensor[:, of]


def columns_for(length: int, dtype: torch.dtype) -> int:
    """How many positions attention reads where `length` are needed, a multiple of LANES: odd sizes take twice as long.

    What is masked adds exact zeros. But a row must have the same bits whatever the longest row needs. Torch attends in
    blocks of 512 positions, and of a block's products in FP32 the library adds up more than 384 in two halves: beyond
    256 a block is read whole.
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

    def __init__(self, cache: Cache, tables: Tensor, lengths: Tensor, longest: int):
        """`tables` (B, n): the pages of each row; `lengths` (B): tokens cached before; `longest`: one more at least."""
        self.cache, self.tables, self.lengths = cache, tables, lengths
        self.columns = columns_for(cache.before + longest, cache.keys.dtype) - cache.before
        self._masks: dict[int | None, Tensor] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim), T ≥ B → (T, H, dim), zeros beyond B."""
        batch, (padded, heads, dim) = len(self.lengths), q.shape
        self.cache.write(layer, self.places, k[:batch], v[:batch])
        if native.available(q) and dim % LANES == 0 and sinks is None:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            return native.attend(q, keys, values, self.tables, self.lengths, window)
        keys, values = (read[:, :, : self.columns] for read in self.cache.read(layer, self._pages))
        # Queries that share keys stand where several positions would: each key is read once.
        grouped, mask = q[:batch].unflatten(1, (keys.shape[1], -1)), self._mask(window, q.dtype)
        sinks = None if sinks is None else sinks.view(grouped.shape[1:3])
        out = masked(grouped, keys, values, mask, sinks).reshape(batch, heads, dim)
        return out if padded == batch else F.pad(out, (0, 0, 0, 0, 0, padded - batch))

    @cached_property
    def places(self) -> Tensor:
        """Where the new tokens go (B)."""
        page = self.tables.gather(1, (self.lengths // PAGE)[:, None])[:, 0]
        return page.long() * PAGE + self.lengths % PAGE

    @cached_property
    def _pages(self) -> Tensor:
        pages = self.tables[:, : pages_for(self.columns)].long()
        return F.pad(pages, (0, pages_for(self.columns) - pages.shape[1]))

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            columns = torch.arange(self.columns, device=self.lengths.device)
            self._masks[window] = additive_mask(self.lengths, columns, window, dtype)[:, None, None]
        return self._masks[window]


@dataclass(frozen=True)
class Looked:
    """The images of a prompt, computed."""

    rotary: np.ndarray
    """(3, prompt): rotary positions."""
    places: np.ndarray
    """(M), ascending: where their tokens lie."""
    embeddings: Tensor
    """(M, D)."""

    def positions(self, start: int, end: int) -> np.ndarray:
        """(3, end − start): rotary positions, of generated tokens too."""
        length = self.rotary.shape[1]
        after = self.rotary[:, -1:] + np.arange(max(start, length), max(end, length)) - (length - 1)
        return np.concatenate([self.rotary[:, start : min(end, length)], after], axis=1)


class Segment(NamedTuple):
    """Tokens `start` to `end` of a sequence that has these pages."""

    pages: Sequence[int]
    start: int
    end: int
    seen: "Looked | None" = None
    """What the tower has made of the sequence's images."""


def spots(segments: Sequence[Segment], *, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The positions of all segments' tokens, end to end, and where they lie in the cache; `whole`: from 0 on.

    The cache counts the positions of all pages.
    """
    starts = np.array([0 if whole else segment.start for segment in segments])
    lengths = np.array([segment.end for segment in segments]) - starts
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths - starts, lengths)
    pages = np.array([page for segment in segments for page in segment.pages])
    counts = np.array([len(segment.pages) for segment in segments])
    first = np.repeat(np.cumsum(counts) - counts, lengths)
    return positions, pages[first + positions // PAGE] * PAGE + positions % PAGE


class PrefillAttention:
    """Attention of pieces of sequences that lie end to end, each over what is cached of its sequence and itself.

    Queries attend in tiles of a page, those of all sequences that have the same position at once. However a prompt is
    cut into pieces, and wherever what others have computed ends, each product has the same shape, and a token the same
    bits. A piece may read what another one writes.
    """

    def __init__(self, cache: Cache, segments: Sequence[Segment]):
        self.cache, device = cache, cache.keys.device
        self.places = torch.from_numpy(spots(segments)[1]).to(device)
        """Where each token goes."""
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        tiles: dict[int, list[tuple[Segment, int]]] = {}
        """By position: the segments with tokens in this page, and where their first token lies among all."""
        offset = 0
        for segment in segments:
            for start in range(segment.start // PAGE * PAGE, segment.end, PAGE):
                tiles.setdefault(start, []).append((segment, offset - segment.start))
            offset += segment.end - segment.start
        self._tiles = [(start, *(t.to(device) for t in _tile(start, members))) for start, members in tiles.items()]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim), T at least all segments → (T, H, dim), zeros beyond them."""
        count = len(self.places)
        self.cache.write(layer, self.places, k[:count], v[:count])
        out = torch.zeros_like(q)
        for start, pages, tokens, inside in self._tiles:
            # What lies before the first query's window is not read.
            low = 0 if window is None else max(0, start - window + 1) // PAGE
            keys, values = self.cache.read(layer, pages[:, low:])
            queries = q[tokens].transpose(1, 2)
            if start == 0 and (window is None or window >= PAGE) and sinks is None:
                grouped = q.shape[1] != keys.shape[1]
                attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
            else:
                attended = masked(queries, keys, values, self._mask(start, low * PAGE, window, q), sinks)
            out[tokens[inside]] = attended.transpose(1, 2)[inside]
        return out

    def _mask(self, start: int, low: int, window: int | None, like: Tensor) -> Tensor:
        key = (start, window)
        if key not in self._masks:
            positions = torch.arange(low, start + PAGE, device=like.device)
            self._masks[key] = additive_mask(positions[start - low :], positions, window, like.dtype)
        return self._masks[key]


def _tile(start: int, members: Sequence[tuple[Segment, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pages up to this one (n, start / PAGE + 1), where the queries lie (n, PAGE), and which of those there are.

    In place of the others any query is taken, and the result is not.
    """
    pages = torch.tensor([segment.pages[: start // PAGE + 1] for segment, _ in members])
    positions = torch.arange(start, start + PAGE)
    first, last, shift = torch.tensor([(segment.start, segment.end, shift) for segment, shift in members]).T[..., None]
    inside = (positions >= first) & (positions < last)
    return pages, torch.where(inside, positions + shift, 0), inside
