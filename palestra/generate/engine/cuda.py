"""The model on a GPU: prefill by variable-length attention, decode bursts as CUDA graphs.

Small models are bound by the host, which can launch a few hundred thousand kernels a second. A graph holds all the
kernels of a whole burst, sampling and stops included, and is launched once.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from palestra.generate.engine import decode_kernel
from palestra.generate.engine.batch import BatchRows, DecodeStep, advance
from palestra.generate.engine.cpu import Runner
from palestra.generate.engine.decode_layers import DecodeLayers
from palestra.generate.engine.kv_cache import Cache, Segment
from palestra.generate.engine.request import MOST_ALTERNATIVES
from palestra.generate.engine.sampler import Needs
from palestra.lm.attention import varlen
from palestra.lm.head import logits

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Graphs are captured for these numbers of rows, then for multiples of the last; other numbers are padded."""


class CudaRunner(Runner):
    """A copy of a model on a GPU, whose decode steps are captured once for each size of the batch."""

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self.host = BatchRows(*(t.pin_memory() for t in (self.host.integers, self.host.floats, self.host.ends)))
        self._graphs: dict[tuple[int, Needs], tuple[torch.cuda.CUDAGraph, DecodeStep]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._layers = DecodeLayers.of(self.model, self.cache)

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment], tokens: Sequence[int]) -> None:
        """Put the keys and values of `tokens`, those of all segments end to end, into the cache."""
        if self.model.dtype == torch.float32:  # flash attention has no FP32
            super().prefill(segments, tokens)
            return
        places = [(s.row, position) for s in segments for position in range(s.start, s.end)]
        inputs = torch.tensor([(token, *place) for token, place in zip(tokens, places, strict=True)])
        token, row, position = inputs.pin_memory().to(self.device, non_blocking=True).unbind(1)
        self.model(token, position, PackedPrefill(self.cache, segments, row.contiguous(), position.contiguous()))

    @torch.inference_mode()
    def decode(self, batch: int, steps: int, longest: int, needs: Needs) -> DecodeStep:
        """A burst in each of the first rows, as (steps, B) on the host; always of the captured number of steps."""
        # Cheap here, and fewer graphs. Rows truncate the alternatives to what they asked for.
        needs = replace(needs, stochastic=True, greedy=True, tempered=True, top=MOST_ALTERNATIVES if needs.top else 0)
        rows = min(_bucket(batch), self.cache.keys.shape[1])
        if (rows, needs) not in self._graphs:
            self._graphs[rows, needs] = self._captured(rows, needs)
        graph, steps_out = self._graphs[rows, needs]
        self.rows.copy_(self.host)
        graph.replay()
        self.host.copy_(self.rows)
        # Waits for the graph, and so for the copy before.
        return DecodeStep(*(part[:, :batch].cpu() for part in steps_out))

    def step(self, batch: int, columns: int, needs: Needs) -> DecodeStep:
        """One token in each of the first rows."""
        tokens, lengths = self.rows.token[:batch], self.rows.length[:batch]
        if self._layers is not None:
            hidden = self._layers(tokens, lengths)
        else:
            hidden = self.model(tokens, lengths, KernelAttention(self.cache, lengths)).hidden
        return advance(self.rows, logits(hidden, self.model.unembed), needs)

    def _captured(self, rows: int, needs: Needs) -> tuple[torch.cuda.CUDAGraph, DecodeStep]:
        """A graph of a burst. Rows are set idle for the trial run, which compiles kernels and fills caches."""
        self.rows.copy_(self.host)  # what an idle row computes goes behind what it has cached
        self.rows.active.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.burst(rows, 1, 0, needs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self.burst(rows, self.steps, 0, needs)
        self.captures += 1
        return graph, output


class KernelAttention:
    """Attention of one new token in each of the first rows, over what the row has cached and itself."""

    def __init__(self, cache: Cache, lengths: Tensor):
        """`lengths` (B): tokens cached before."""
        self.cache, self.lengths, self.seen = cache, lengths, lengths + 1
        self.rows = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (B, H, dim), k and v (B, K, dim) → (B, H, dim)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        decode_kernel.store(k, v, keys, values, self.rows, self.lengths)
        return decode_kernel.attend(q, keys, values, self.rows, self.seen, window)


class PackedPrefill:
    """Attention of pieces of sequences that lie end to end, each over what its row has cached and itself."""

    def __init__(self, cache: Cache, segments: Sequence[Segment], rows: Tensor, positions: Tensor):
        """`rows` and `positions` (T): where each token goes in the cache."""
        self.cache, self.rows, self.positions = cache, rows, positions
        new, whole = [s.end - s.start for s in segments], [s.end for s in segments]
        self.queries, self.keys = _bounds(new, rows.device), _bounds(whole, rows.device)
        self.longest = (max(new), max(whole))
        self.read: tuple[Tensor, Tensor] | None = None
        """Row and position of all keys, where some pieces begin in the middle of a sequence."""
        if any(s.start for s in segments):
            places = torch.tensor([(s.row, position) for s in segments for position in range(s.end)])
            row, position = places.to(rows.device).unbind(1)
            self.read = (row, position)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim) → (T, H, dim)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        decode_kernel.store(k, v, keys, values, self.rows, self.positions)
        if self.read is not None:
            row, position = self.read
            k, v = keys[row, :, position], values[row, :, position]
        return varlen(q, k, v, self.queries, self.keys, *self.longest, window)


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def _bucket(batch: int) -> int:
    return next((size for size in BUCKETS if size >= batch), -(-batch // BUCKETS[-1]) * BUCKETS[-1])
