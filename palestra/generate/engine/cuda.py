"""The model on a GPU: prefill by variable-length attention, decode bursts as CUDA graphs.

Small models are bound by the host, which can launch a few hundred thousand kernels a second. A graph holds all the
kernels of a whole burst, sampling and stops included, and is launched once; another one those of a few prompts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.generate.engine import decode_kernel
from palestra.generate.engine.batch import BatchRows, DecodeStep, advance
from palestra.generate.engine.cpu import Runner
from palestra.generate.engine.decode_layers import DecodeLayers
from palestra.generate.engine.kv_cache import Cache, Segment, spots
from palestra.generate.engine.pages import PAGE
from palestra.generate.engine.prefill_layers import PrefillLayers
from palestra.generate.engine.request import MOST_ALTERNATIVES
from palestra.generate.engine.sampler import Needs
from palestra.generate.engine.score_edits import ScoreEdits
from palestra.lm.attention import flash_settings, varlen
from palestra.lm.head import logits
from palestra.lm.layers import sent

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Graphs are captured for these numbers of rows, then for multiples of the last; other numbers are padded."""
PROMPTS = (256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Graphs compute so many tokens of prompts: to launch the kernels of fewer one by one takes longer than they do."""


class PrefillGraph(NamedTuple):
    """The kernels that compute so many tokens of prompts, and where they read what to compute."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """(3, T): tokens, their positions, and where they go in the cache."""
    bounds: Tensor
    """Of the prompts, which lie end to end."""


class CudaRunner(Runner):
    """A copy of a model on a GPU, whose decode steps are captured once for each size of the batch."""

    ahead = True
    portion = PROMPTS[-1] - 512  # the last prompt of it has room in the graph

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        host = self.host
        self._sent = [BatchRows(*(t.clone().pin_memory() for t in host.parts)) for _ in range(2)]
        """Copies of the host's rows that are on their way, those of the last two bursts in turns."""
        self._integers = torch.zeros_like(self.rows.integers)
        """What the host last sent of them."""
        self._graphs: dict[tuple[int, Needs], tuple[torch.cuda.CUDAGraph, DecodeStep]] = {}
        self._prefills: dict[tuple[int, int], PrefillGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._layers = DecodeLayers.of(self.model, self.cache, self.rows.tables.shape[1] * PAGE)
        self._prompt_layers = None if self._layers is None else PrefillLayers(self._layers)

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment], tokens: Sequence[int]) -> None:
        """Put the keys and values of `tokens`, those of all segments end to end, into the cache."""
        if self.model.dtype == torch.float32:  # flash attention has no FP32
            super().prefill(segments, tokens)
            return
        if any(segment.start for segment in segments):  # they may read what others in here write
            self._prefill(segments, tokens)
            return
        first = 0
        for portion in _portions(segments):
            count = sum(segment.end for segment in portion)
            self._prefill(portion, tokens[first : first + count])
            first += count

    def _prefill(self, segments: Sequence[Segment], tokens: Sequence[int]) -> None:
        inputs, bounds = np.stack([np.asarray(tokens, np.int64), *spots(segments)]), _bounds(segments)
        longest = max(128, 2 ** int(np.diff(bounds).max() - 1).bit_length())
        if (size := _graphed(bounds, longest)) is not None and not any(segment.start for segment in segments):
            self._prefill_by_graph(size, longest, inputs, bounds)
            return
        token, position, place = sent(torch.from_numpy(inputs), self.device)
        self._compute(token, position, PackedPrefill.of(self.cache, segments, place))

    def _compute(self, token: Tensor, position: Tensor, attend: "PackedPrefill") -> None:
        """Put keys and values of all layers into the cache; nobody reads the hidden states."""
        if self._prompt_layers is not None:
            self._prompt_layers(token, position, attend.places, attend.attend)
        else:
            self.model(token, position, attend, wanted=torch.zeros(1, dtype=torch.long, device=self.device))

    def _prefill_by_graph(self, size: int, longest: int, inputs: np.ndarray, bounds: np.ndarray) -> None:
        """Prompts of at most `longest` tokens, filled up to `size` by others that go to scratch."""
        count = inputs.shape[1]
        fillers = np.append(np.arange(count, size, longest), size)[1:].astype(np.int32)
        ends = np.pad(np.append(bounds, fillers), (0, _prompts(size) - len(bounds) - len(fillers) + 1), mode="edge")
        inputs = np.pad(inputs, ((0, 0), (0, size - count)))  # position 0, and the scratch page's first place
        if (size, longest) not in self._prefills:
            self._prefills[size, longest] = self._captured_prefill(size, longest, inputs, ends)
        prefill = self._prefills[size, longest]
        for part, new in ((prefill.inputs, inputs), (prefill.bounds, ends)):
            part.copy_(torch.from_numpy(new).pin_memory(), non_blocking=True)
        prefill.graph.replay()

    def _captured_prefill(self, size: int, longest: int, inputs: np.ndarray, ends: np.ndarray) -> PrefillGraph:
        """The graph for so many tokens, after a trial run with these."""
        held = torch.from_numpy(inputs).to(self.device)
        bounds = torch.from_numpy(ends).to(self.device)
        attend = PackedPrefill(self.cache, held[2], (bounds, bounds), (longest, longest))
        graph = self._graph(lambda: self._compute(held[0], held[1], attend))[0]
        return PrefillGraph(graph, held, bounds)

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
        captured = self._graph(lambda: self.burst(rows, self.steps, 0, needs), lambda: self.burst(rows, 1, 0, needs))
        self.rows.integers.copy_(kept)
        return captured

    def _graph(
        self, work: Callable[[], Any], trial: Callable[[], object] | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of `work`, and what it gives, after a trial run."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            (trial or work)()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
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

    def __init__(
        self,
        cache: Cache,
        places: Tensor,
        bounds: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        read: Tensor | None = None,
    ):
        """`places` (T): where each token goes in the cache; `bounds` of queries and of keys, and the longest of each.

        `read`: where all keys lie, if some pieces begin in the middle of a sequence.
        """
        self.cache, self.places, self.bounds, self.longest, self.read = cache, places, bounds, longest, read

    @classmethod
    def of(cls, cache: Cache, segments: Sequence[Segment], places: Tensor) -> "PackedPrefill":
        """That of these pieces."""
        new, whole = _bounds(segments), _bounds(segments, whole=True)
        queries, keys = (sent(torch.from_numpy(part), places.device) for part in (new, whole))
        read = None
        if any(segment.start for segment in segments):
            read = sent(torch.from_numpy(spots(segments, whole=True)[1]), places.device)
        return cls(cache, places, (queries, keys), (int(np.diff(new).max()), int(np.diff(whole).max())), read)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim) → (T, H, dim)."""
        decode_kernel.store(k, v, self.cache.keys[layer], self.cache.values[layer], self.places)
        return self.attend(layer, q, k, v, window)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """The same, of keys and values that the cache has already."""
        if self.read is not None:
            k, v = (cached[layer].flatten(0, 1)[self.read] for cached in (self.cache.keys, self.cache.values))
        return varlen(q, k, v, *self.bounds, *self.longest, window, **flash_settings())


def _bounds(segments: Sequence[Segment], *, whole: bool = False) -> np.ndarray:
    """Of pieces that lie end to end, or of `whole` sequences."""
    return np.cumsum([0, *(segment.end - (0 if whole else segment.start) for segment in segments)], dtype=np.int32)


def _portions(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """The pieces in order, as many at a time as a graph has room for."""
    portion, size = [], 0
    for segment in segments:
        if portion and size + segment.end - segment.start > PROMPTS[-1]:
            yield portion
            portion, size = [], 0
        portion.append(segment)
        size += segment.end - segment.start
    yield portion


def _graphed(bounds: np.ndarray, longest: int) -> int | None:
    """The tokens of the smallest graph for prompts with these bounds; None where they are too many."""
    count, prompts = int(bounds[-1]), len(bounds) - 1
    fillers = (-(-(size - count) // longest) for size in PROMPTS)
    sizes = zip(PROMPTS, fillers, strict=True)
    return next((size for size, more in sizes if count <= size and prompts + more <= _prompts(size)), None)


def _prompts(size: int) -> int:
    """How many prompts a graph of so many tokens has room for."""
    return max(16, size // 16)


def _bucket(batch: int) -> int:
    return next((size for size in BUCKETS if size >= batch), -(-batch // BUCKETS[-1]) * BUCKETS[-1])
