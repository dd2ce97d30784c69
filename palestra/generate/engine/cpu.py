"""The model on the CPU: prefill, decode bursts, weight updates, and products whose bits do not depend on the batch."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.data.media import Image, rope_positions
from palestra.errors import UsageError
from palestra.generate.engine.batch import BatchRows, DecodeStep, advance
from palestra.generate.engine.kv_cache import Cache, DecodeAttention, Looked, PrefillAttention, Segment
from palestra.generate.engine.sampler import Needs
from palestra.generate.engine.score_edits import ScoreEdits
from palestra.lm import native
from palestra.lm.head import logits
from palestra.lm.hf import empty_model
from palestra.lm.layers import MLP, Linear, doubled, sent, wide
from palestra.lm.model import Transformer
from palestra.lm.moe import MoE
from palestra.spec.shape import Shape, precision

PREFILL_ROWS = {torch.float32: 64, torch.bfloat16: 256}
DECODE_ROWS = {torch.float32: 32, torch.bfloat16: 64}
"""Rows of a product. A matrix library picks its kernel, and with it the order of additions, by the number of rows: the
same number always gives the same bits. bf16 needs 64 to reach the matrix units, and more to keep them busy."""
ROWS = 16
"""Everything but products works on a multiple of this many rows: threads then split the work between rows, so that no
row has elements at the end of a share, where scalar code rounds differently from vector code."""
WORTH_PACKING = {torch.float32: 2**17, torch.bfloat16: 2**12}
"""Elements from which a matrix gains by lying in the library's own order."""


class Tiles:
    """How many rows a product is computed with, for all matrices of a model that this puts into tiles."""

    def __init__(self, model: Transformer):
        self.dtype = model.dtype
        self.whole = precision("auto", "cpu") == "fp32" and model.dtype in native.NAMES and model.shape.moe is None
        self.whole = self.whole and native.library() is not None
        """Whether our own product computes all rows at once, with the same bits for any number of them. With bf16
        the library's are faster; elsewhere they take up to 0.4 ms for a call, and as long for one row as for many."""
        half = model.dtype == torch.bfloat16
        known = torch.backends.mkldnn.is_available() and (not half or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self.worth_packing = WORTH_PACKING.get(model.dtype, math.inf) if known else math.inf
        self.for_prefill()
        self.head = TiledHead(model.unembed, self)
        self._matrices: list[TiledLinear] = [self.head]
        self._short: dict[tuple[int, int, torch.dtype], Tensor] = {}
        """Memory for tiles that are not full."""
        self._wholes: dict[tuple[object, ...], bool] = {}
        self._put_into(model)

    def _put_into(self, module: nn.Module) -> None:
        """Let the parts of a module multiply in tiles."""
        for name, part in list(module.named_children()):
            if isinstance(part, MoE):
                part = TiledMoE(part, self)
            elif isinstance(part, MLP):
                part = TiledMLP(part, self)
            elif isinstance(part, Linear):
                part = TiledLinear(part.weight, part.bias, self)
            setattr(module, name, part)
            if isinstance(part, TiledLinear):
                self._matrices.append(part)
            self._put_into(part)

    def pack(self) -> None:
        """Bring the weights, which have changed, into the order in which products read them."""
        for matrix in self._matrices:
            matrix.pack()

    def for_prefill(self) -> None:
        """Many rows: large tiles."""
        self.rows = PREFILL_ROWS.get(self.dtype, 64)

    def for_decoding(self) -> None:
        """Maybe few rows: tiles that waste little. A token is only ever computed in one of the two sizes."""
        self.rows = DECODE_ROWS.get(self.dtype, 64)

    def apply(self, product: Callable[[Tensor], Tensor], x: Tensor, key: object = None) -> Tensor:
        """A function of rows (T, D), tile by tile; at once where `key` names the product and that gives the same bits.

        Whether it does is tried out once for each number of rows: which kernel is taken depends on shapes alone.
        """
        if self.whole:
            return product(x)
        if len(x) <= self.rows or key is None:
            return self._tiled(product, x)
        case = (key, self.rows, len(x))
        if case not in self._wholes:
            trial = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
            expected = self._tiled(product, trial)
            if not expected.any():  # weights of zeros tell nothing
                return self._tiled(product, x)
            self._wholes[case] = torch.equal(expected, product(trial))
        return product(x) if self._wholes[case] else self._tiled(product, x)

    def _tiled(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = [product(tile) for tile in self.of(x)]
        return (out[0] if len(out) == 1 else torch.cat(out))[: len(x)]

    def of(self, x: Tensor) -> Iterator[Tensor]:
        """The tiles of rows (T, D). A short last one is padded with other rows, whose results are not read.

        Take each before the next call: short tiles share their memory.
        """
        for tile in x.split(self.rows):
            yield tile if len(tile) == self.rows else self._filled_up(tile)

    def _filled_up(self, tile: Tensor) -> Tensor:
        key = (self.rows, tile.shape[1], tile.dtype)
        if key not in self._short:
            self._short[key] = tile.new_zeros(self.rows, tile.shape[1])
        self._short[key][: len(tile)] = tile
        return self._short[key]


class TiledLinear(nn.Module):
    """A matrix that is applied to tiles of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tiles: Tiles):
        super().__init__()
        self.weight, self.bias, self.tiles = weight, bias, tiles
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """Lay the weights out as products read them, which would otherwise be done in each."""
        if self.tiles.whole:
            self.packed = native.in_panels(self.weight.detach().float())
        elif self.weight.numel() >= self.tiles.worth_packing:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(T, inputs) → (T, outputs)."""
        return self.tiles.apply(self.product, x, (type(self), self.weight.shape))

    def product(self, tile: Tensor) -> Tensor:
        """The same for one tile."""
        if self.packed is None:
            return F.linear(tile, self.weight, self.bias)
        if self.tiles.whole:
            return self._product(tile, torch.empty(len(tile), len(self.weight))).to(tile.dtype)
        return torch.ops.mkldnn._linear_pointwise(tile, self.packed, self.bias, "none", [], "")

    def _product(self, x: Tensor, out: Tensor) -> Tensor:
        """All rows by our own kernel, in FP32."""
        assert self.packed is not None
        native.product(x.float(), self.packed, out)
        return out if self.bias is None else out.add_(self.bias)


class TiledMLP(nn.Module):
    """A feed-forward network that is applied to tiles of rows."""

    def __init__(self, mlp: MLP, tiles: Tiles):
        super().__init__()
        self.tiles, self.gate = tiles, mlp.gate
        self.gate_up = TiledLinear(mlp.gate_up.weight, mlp.gate_up.bias, tiles)
        self.down = TiledLinear(mlp.down.weight, mlp.down.bias, tiles)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) → (T, D)."""
        key = (type(self), self.gate, self.down.weight.shape)
        return self.tiles.apply(lambda tile: self.down.product(self.gate(self.gate_up.product(tile))), x, key)


class TiledHead(TiledLinear):
    """The output head, whose scores are FP32: bf16 weights also have an FP32 copy, which `logits` multiplies."""

    def __init__(self, unembed: Tensor, tiles: Tiles):
        super().__init__(unembed, None, tiles)
        self._wide: Tensor | None = None

    def pack(self) -> None:
        """Take over new weights."""
        if self.weight.dtype == torch.float32 or self.tiles.whole:
            super().pack()
        else:
            self._wide = self.weight.detach().float()

    def room(self, count: int) -> Tensor:
        """Memory for the scores of `count` rows. Allocating it in every step took a tenth of the step's time."""
        return torch.empty(-(-count // self.tiles.rows) * self.tiles.rows, len(self.weight))

    def forward(self, x: Tensor, room: Tensor | None = None) -> Tensor:
        """(T, D) → (T, V), which may lie in `room`, if it is given, and are lost when it is used again."""
        room = self.room(len(x)) if room is None else room
        if self.tiles.whole:
            return self._product(x, room[: len(x)])
        if self._wide is None:
            return super().forward(x)
        for tile, scores in zip(self.tiles.of(x), room.split(self.tiles.rows), strict=False):
            logits(tile, self._wide, out=scores)
        return room[: len(x)]


class TiledMoE(MoE):
    """Experts that are applied to tiles of the rows that chose them."""

    def __init__(self, moe: MoE, tiles: Tiles):
        nn.Module.__init__(self)
        self.spec, self.gate, self.shared, self.tiles = moe.spec, moe.gate, moe.shared, tiles
        self.router, self.gate_up, self.down, self.shared_gate = moe.router, moe.gate_up, moe.down, moe.shared_gate
        self.router_bias, self.gate_up_bias, self.down_bias = moe.router_bias, moe.gate_up_bias, moe.down_bias
        self.register_buffer("bias", moe.bias)

    def _route(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        route = super()._route
        return self.tiles.apply(lambda tile: route(tile, matrix, bias), x)

    def _expert(self, x: Tensor, *expert: Tensor) -> Tensor:
        return self.tiles.apply(lambda tile: self.expert(tile, *expert), x)


PORTION = 256
"""Tokens of prompts in one forward pass on the CPU: more would not fit into its caches. A whole number of pages."""


class Runner:
    """A copy of a model in compute precision with its cache and rows on a device."""

    captures = 0
    """CUDA graphs captured so far."""
    ahead = False
    """Whether a burst is started before the one before it is read."""
    portion = sys.maxsize
    """Tokens of prompts that are computed before further requests are admitted."""

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        budget: int | None,
        most_rows: int,
        steps: int,
    ):
        """`budget` is the memory for keys and values in bytes; None takes of what the weights leave free.

        A burst has at most `steps` steps.
        """
        self.steps = steps
        self.model = empty_model(model.shape, dtype, dtype, device).requires_grad_(False)
        self.device, self.tiles = device, Tiles(self.model) if device.type == "cpu" else None
        self._decoder: native.Decoder | None = None
        self.cache = Cache.fitting(model.shape, context, dtype, device, budget, most_rows)
        self.slots = min(most_rows, self.cache.pages - 1)
        """How many sequences run at a time."""
        self.load(model.state_dict())
        self.host = BatchRows.empty(self._padded(self.slots), context, torch.device("cpu"))
        """What the scheduler's side writes between bursts; on the CPU the steps work on the same memory."""
        self.rows = self.host if device.type == "cpu" else BatchRows.empty(self.slots, context, device)
        self._room: Tensor | None = None
        if self.tiles is not None:
            self.tiles.for_decoding()
            self._room = self.tiles.head.room(self.slots)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights in place. Nothing has changed if a name, a shape or a value does not fit."""
        own = self.model.state_dict()
        if missing := sorted(own.keys() - weights.keys()):
            raise UsageError(f"the weights lack tensors of the model: {_named(missing)}")
        if extra := sorted(weights.keys() - own.keys()):
            raise UsageError(f"the weights have tensors that the model does not have: {_named(extra)}")
        for name, tensor in own.items():
            if tensor.shape != weights[name].shape:
                theirs = tuple(weights[name].shape)
                raise UsageError(f"the weight {name} has shape {theirs}, expected {tuple(tensor.shape)}")
        new = [weights[name].detach() for name in own]
        # The extremes tell, for they carry a NaN: no copy of the weights, and one wait for the device.
        extremes = torch.stack([torch.stack(tensor.aminmax()).float() for tensor in new]).to(self.model.dtype)
        for (name, tensor), fits in zip(own.items(), extremes.isfinite().all(-1).tolist(), strict=True):
            if not fits:
                raise UsageError(f"the weight {name} has values that are not finite in {tensor.dtype}")
        torch._foreach_copy_(list(own.values()), new)
        if self.tiles is not None:
            self.tiles.pack()
            self._decoder = self._decoder_of(self.tiles)

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment], tokens: Sequence[int]) -> None:
        """Put the keys and values of `tokens`, those of all segments end to end, into the cache."""
        if self.tiles is not None:
            self.tiles.for_prefill()
        offset = 0
        for portion in _portions(segments):
            positions, seen = _positions(portion), _seen(portion, self.device)
            count = positions.shape[-1]
            padding = self._padded(count) - count
            rows = np.concatenate([[tokens[offset : offset + count]], np.atleast_2d(positions)])
            inputs = torch.from_numpy(np.pad(rows, ((0, 0), (0, padding)))).to(self.device)
            places = inputs[1] if positions.ndim == 1 else inputs[1:]
            self.model(inputs[0], places, PrefillAttention(self.cache, portion), seen=seen)
            offset += count

    @torch.inference_mode()
    def look(self, images: Sequence[Image], length: int) -> Looked:
        """What the tower makes of a prompt's images: one by one, so that none has other bits beside others."""
        if self.tiles is not None:
            self.tiles.for_prefill()
        embeddings = torch.cat([self.model.look([image]) for image in images])
        places = np.concatenate([np.arange(image.start, image.stop) for image in images])
        return Looked(rope_positions(length, images), places, embeddings)

    @torch.inference_mode()
    def start(
        self, batch: int, steps: int, longest: int, needs: Needs, edits: ScoreEdits | None = None
    ) -> Callable[[], DecodeStep]:
        """Sample `steps` tokens in each of the first rows; the function waits for them, (steps, B) on the host.

        No row has more than `longest` cached. Edits are of one step.
        """
        if self.rows is self.host:
            output = self.burst(batch, steps, longest, needs, edits)
            return lambda: output
        self.rows.copy_(self.host)
        output = self.burst(batch, steps, longest, needs, edits)
        self.host.copy_(self.rows)
        return lambda: DecodeStep(*(part.cpu() for part in output))

    def burst(self, batch: int, steps: int, longest: int, needs: Needs, edits: ScoreEdits | None = None) -> DecodeStep:
        """The same on the device, without waiting for it."""
        done = [self.step(batch, longest + step + 1, needs, edits) for step in range(steps)]
        return DecodeStep(*(torch.stack(parts) for parts in zip(*done, strict=True)))

    def step(self, batch: int, columns: int, needs: Needs, edits: ScoreEdits | None) -> DecodeStep:
        """One token in each of the first rows, which look at `columns` positions of the cache at most."""
        lengths, tables = self.rows.length[:batch], self.rows.tables[:batch]
        turned = self.rows.length if self.model.vision is None else self.rows.length + self.rows.shift
        if self._decoder is not None:
            embedded = F.embedding(self.rows.token[:batch], self.model.embed)
            angles = self.model.rotation(turned[:batch])
            hidden = self.model.norm(self._decoder(embedded, *doubled(*angles), lengths, tables))
            return advance(self.rows, self._scores(hidden), needs, edits)
        if self.tiles is not None:
            self.tiles.for_decoding()
        inputs, attend = slice(self._padded(batch)), DecodeAttention(self.cache, tables, lengths, columns)
        hidden = self.model(self.rows.token[inputs], turned[inputs], attend).hidden
        return advance(self.rows, self._scores(hidden[:batch]), needs, edits)

    def _decoder_of(self, tiles: Tiles) -> native.Decoder | None:
        """What decodes in one call, where our kernels can."""
        shape = self.model.shape
        if not tiles.whole or self.model.dtype != torch.float32 or shape.dim % ROWS or shape.beyond_llama:
            return None
        parts = self.model.state_dict()
        for name, module in self.model.named_modules():
            if isinstance(module, TiledLinear) and module.packed is not None:
                parts[name] = module.packed
        return native.Decoder(shape, parts, self.cache.keys, self.cache.values)

    def _scores(self, hidden: Tensor) -> Tensor:
        if self.tiles is None:
            return logits(hidden, self.model.unembed)
        return wide(self.tiles.head(hidden, self._room))

    def _padded(self, count: int) -> int:
        shape = self.model.shape
        # Our own kernels go row by row. Only the rotary angles are left to torch, and those fill whole vectors.
        by_row = self.tiles is not None and self.tiles.whole and shape.dim % ROWS == 0 and not shape.beyond_llama
        if self.tiles is None or (by_row and count <= PORTION):
            return count
        return -(-count // ROWS) * ROWS


def prefill_tokens_for(shape: Shape, device: torch.device) -> int:
    """A GPU takes many tokens as fast as few, as long as a layer's activations are a small share of its memory."""
    if device.type == "cpu":
        return 4096
    each = 2 * (2 * (shape.mlp or shape.width) + 6 * shape.width)
    return max(4096, min(2**16, int(0.04 * torch.cuda.get_device_properties(device).total_memory) // each))


def _positions(portion: Sequence[Segment]) -> np.ndarray:
    """Rotary positions (T) of the tokens of a portion; (3, T) where one has images."""
    if all(segment.seen is None for segment in portion):
        return np.concatenate([np.arange(segment.start, segment.end) for segment in portion])
    parts = []
    for segment in portion:
        if segment.seen is None:
            parts.append(np.tile(np.arange(segment.start, segment.end), (3, 1)))
        else:
            parts.append(segment.seen.positions(segment.start, segment.end))
    return np.concatenate(parts, axis=1)


def _seen(portion: Sequence[Segment], device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """What puts the embeddings of images in the place of their tokens'; None without any."""
    places, embeddings, offset = [], [], 0
    for segment in portion:
        if segment.seen is not None:
            first, last = np.searchsorted(segment.seen.places, (segment.start, segment.end))
            places.append(segment.seen.places[first:last] - segment.start + offset)
            embeddings.append(segment.seen.embeddings[first:last])
        offset += segment.end - segment.start
    if not places:
        return None
    at, values = sent(torch.from_numpy(np.concatenate(places)), device), torch.cat(embeddings)
    return lambda x: x.index_copy(0, at, values)


def _portions(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """The segments in order, cut and put together to portions of at most PORTION tokens."""
    portion, size = [], 0
    for segment in segments:
        for start in range(segment.start, segment.end, PORTION):
            piece = segment._replace(start=start, end=min(start + PORTION, segment.end))
            if size + piece.end - piece.start > PORTION:
                yield portion
                portion, size = [], 0
            portion.append(piece)
            size += piece.end - piece.start
    yield portion


def _named(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
