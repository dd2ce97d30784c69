"""The model on a GPU: prefill by variable-length attention, decode bursts as CUDA graphs.

Small models are bound by the host, which can launch a few hundred thousand kernels a second. A graph holds all the
kernels of a whole burst, sampling and stops included, and is launched once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.generate.engine import decode_kernel
from palestra.generate.engine.batch import BatchRows, DecodeStep, advance
from palestra.generate.engine.cpu import Runner
from palestra.generate.engine.decode_layers import DecodeLayers
from palestra.generate.engine.kv_cache import Cache, Segment, spots
from palestra.generate.engine.pages import PAGE
from palestra.generate.engine.request import MOST_ALTERNATIVES
from palestra.generate.engine.sampler import Needs
from palestra.generate.engine.score_edits import ScoreEdits
from palestra.lm.attention import flash_settings, varlen
from palestra.lm.head import logits
from palestra.lm.layers import sent

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Graphs are captured for these numbers of rows, then for multiples of the last; other numbers are padded."""


class CudaRunner(Runner):
    """A copy of a model on a GPU, whose decode steps are captured once for each size of the batch."""

    ahead = True

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        host = self.host
        self._sent = [BatchRows(*(t.clone().pin_memory() for t in host.parts)) for _ in range(2)]
        """Copies of the host's rows that are on their way, those of the last two bursts in turns."""
        self._integers = torch.zeros_like(self.rows.integers)
        """What the host last sent of them."""
        self._graphs: dict[tuple[int, Needs], tuple[torch.cuda.CUDAGraph, DecodeStep]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._layers = DecodeLayers.of(self.model, self.cache, self.rows.tables.shape[1] * PAGE)

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment], tokens: Sequence[int]) -> None:
        """Put the keys and values of `tokens`, those of all segments end to end, into the cache."""
        if self.model.dtype == torch.float32:  # flash attention has no FP32
            super().prefill(segments, tokens)
            return
        inputs = torch.from_numpy(np.stack([np.asarray(tokens, np.int64), *spots(segments)]))
        token, position, place = sent(inputs, self.device)
        self.model(token, position, PackedPrefill(self.cache, segments, place))

    @torch.inference_mode()
    def start(
        self, batch: int, steps: int, longest: int, needs: Needs, edits: ScoreEdits | None = None
    ) -> Callable[[], DecodeStep]:
        """A burst in each of the first rows, of the captured number of steps; with edits of one, without a graph.

        Everything is in the order of the stream: what a burst needs of the one before it finds on the device.
        """
        # Cheap here, and fewer graphs. Rows truncate the alternatives to what they asked for.
        needs = replace(needs, stochastic=True, greedy=True, tempered=True, top=MOST_ALTERNATIVES if needs.top else 0)
        rows = min(_bucket(batch), self.slots)
        if edits is None and (rows, needs) not in self._graphs:
            self._graphs[rows, needs] = self._captured(rows, needs)
        sent = self._sent[0]  # the burst before the last has been read
        self._sent.reverse()
        for part, new in zip(sent.parts, self.host.parts, strict=True):
            part.copy_(new)
        self.host.go_on()
        for part, new in zip((self._integers, *self.rows.parts[1:]), sent.parts, strict=True):
            part.copy_(new, non_blocking=True)
        if edits is None:
            graph, output = self._graphs[rows, needs]
            graph.replay()
        else:
            output = self.burst(rows, steps, longest, needs, edits)
        read = [torch.empty(part[:, :batch].shape, dtype=part.dtype, pin_memory=True) for part in output]
        for part, new in zip(read, output, strict=True):
            part.copy_(new[:, :batch], non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> DecodeStep:
            done.synchronize()
            return DecodeStep(*read)

        return wait

    def burst(self, batch: int, steps: int, longest: int, needs: Needs, edits: ScoreEdits | None = None) -> DecodeStep:
        self.rows.follow(self._integers)
        return super().burst(batch, steps, longest, needs, edits)

    def step(self, batch: int, columns: int, needs: Needs, edits: ScoreEdits | None) -> DecodeStep:
        """One token in each of the first rows."""
        tokens, lengths, tables = self.rows.token[:batch], self.rows.length[:batch], self.rows.tables[:batch]
        if self._layers is not None:
            hidden = self._layers(tokens, lengths, tables)
        else:
            hidden = self.model(tokens, lengths, KernelAttention(self.cache, tables, lengths)).hidden
        return advance(self.rows, logits(hidden, self.model.unembed), needs, edits)

    def _captured(self, rows: int, needs: Needs) -> tuple[torch.cuda.CUDAGraph, DecodeStep]:
        """A graph of a burst. Rows are set idle for the trial run, which compiles kernels and fills caches."""
        kept = self.rows.integers.clone()
        self.rows.stop_all()  # what an idle row computes goes to scratch
        self._integers.copy_(self.rows.integers)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.burst(rows, 1, 0, needs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self.burst(rows, self.steps, 0, needs)
        self.rows.integers.copy_(kept)
        self.captures += 1
        return graph, output


class KernelAttention:
    """Attention of one new token in each of the first rows, over what the row has cached and itself."""

    def __init__(self, cache: Cache, tables: Tensor, lengths: Tensor):
        """`tables` (B, n): the pages of each row; `lengths` (B): tokens cached before."""
        self.cache, self.tables, self.lengths = cache, tables, lengths
        page = tables.gather(1, (lengths // PAGE)[:, None])[:, 0]
        self.places = page.long() * PAGE + lengths % PAGE

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (B, H, dim), k and v (B, K, dim) → (B, H, dim)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        decode_kernel.store(k, v, keys, values, self.places)
        return decode_kernel.attend(q, keys, values, self.tables, self.lengths, window)


class PackedPrefill:
    """Attention of pieces of sequences that lie end to end, each over what is cached of its sequence and itself.

    A piece may read what another one writes.
    """

    def __init__(self, cache: Cache, segments: Sequence[Segment], places: Tensor):
        """`places` (T): where each token goes in the cache."""
        self.cache, self.places = cache, places
        new, whole = [s.end - s.start for s in segments], [s.end for s in segments]
        self.queries, self.keys = _bounds(new, places.device), _bounds(whole, places.device)
        self.longest = (max(new), max(whole))
        self.read: Tensor | None = None
        """Where all keys lie, if some pieces begin in the middle of a sequence."""
        if any(s.start for s in segments):
            _, read = spots(segments, whole=True)
            self.read = sent(torch.from_numpy(read), places.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim) → (T, H, dim)."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        decode_kernel.store(k, v, keys, values, self.places)
        if self.read is not None:
            k, v = (cached.flatten(0, 1)[self.read] for cached in (keys, values))
        return varlen(q, k, v, self.queries, self.keys, *self.longest, window, **flash_settings())


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    return sent(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def _bucket(batch: int) -> int:
    return next((size for size in BUCKETS if size >= batch), -(-batch // BUCKETS[-1]) * BUCKETS[-1])
