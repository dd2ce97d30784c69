"""The model at work: pieces of prompts into the cache, bursts of decode steps, new weights."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from palestra.errors import UsageError
from palestra.generate.cache import (
    BLOCK,
    COLUMNS,
    Cache,
    DecodeAttention,
    PrefillAttention,
    Segment,
    columns_for,
    rows_that_fit,
)
from palestra.generate.rows import Rows, Step, advance
from palestra.generate.sampler import Needs
from palestra.generate.tiles import ROWS, Tiles
from palestra.lm.head import logits
from palestra.lm.hf import empty_model
from palestra.lm.model import Transformer
from palestra.lm.ops import wide

PORTION = BLOCK
"""Tokens of prompts in one forward pass on the CPU: more would not fit into its caches. A whole number of blocks."""


class Runner:
    """A copy of a model in compute precision with its cache and rows on a device."""

    captures = 0
    """CUDA graphs captured so far."""

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        budget: int | None,
        most_rows: int,
    ):
        """`budget` is the memory for keys and values in bytes; None takes of what the weights leave free."""
        self.model = empty_model(model.shape, dtype, dtype, device).requires_grad_(False)
        self.device, self.tiles = device, Tiles(self.model) if device.type == "cpu" else None
        self.load(model.state_dict())
        columns = columns_for(-(-context // COLUMNS) * COLUMNS, dtype)
        rows = rows_that_fit(model.shape, columns, dtype, device, budget, most_rows)
        self.slots = rows
        """How many sequences run at a time."""
        self.cache = Cache(model.shape, rows, columns, dtype, device)
        self.host = Rows.empty(self._padded(rows), torch.device("cpu"))
        """What the scheduler's side writes between bursts; on the CPU the steps work on the same memory."""
        self.rows = self.host if device.type == "cpu" else Rows.empty(rows, device)
        self._room: Tensor | None = None
        if self.tiles is not None:
            self.tiles.for_decoding()
            self._room = self.tiles.head.room(rows)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights in place. Nothing has changed if a name, a shape or a value does not fit."""
        mine = self.model.state_dict()
        if missing := sorted(mine.keys() - weights.keys()):
            raise UsageError(f"the weights lack {_named(missing)}, which the model has")
        if extra := sorted(weights.keys() - mine.keys()):
            raise UsageError(f"the weights have {_named(extra)}, which the model has not")
        for name, tensor in mine.items():
            if tensor.shape != weights[name].shape:
                theirs = tuple(weights[name].shape)
                raise UsageError(f"the weight {name} has shape {theirs}, expected {tuple(tensor.shape)}")
            # The extremes tell, for they carry a NaN, and cost no copy of the weights.
            extremes = torch.stack(weights[name].detach().aminmax()).to(tensor.dtype)
            if not extremes.isfinite().all():
                raise UsageError(f"the weight {name} has values that are not finite in {tensor.dtype}")
        for name, tensor in mine.items():
            tensor.copy_(weights[name].detach())
        if self.tiles is not None:
            self.tiles.pack()

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment], tokens: Sequence[int]) -> None:
        """Put the keys and values of `tokens`, those of all segments end to end, into the cache."""
        if self.tiles is not None:
            self.tiles.for_prefill()
        offset = 0
        for portion in _portions(segments):
            positions = [position for segment in portion for position in range(segment.start, segment.end)]
            padding = [0] * (self._padded(len(positions)) - len(positions))
            mine = tokens[offset : offset + len(positions)]
            inputs = torch.tensor([[*mine, *padding], [*positions, *padding]], device=self.device)
            self.model(inputs[0], inputs[1], PrefillAttention(self.cache, portion))
            offset += len(positions)

    @torch.inference_mode()
    def decode(self, batch: int, steps: int, longest: int, needs: Needs) -> Step:
        """`steps` tokens in each of the first rows: (steps, B) on the host. No row has more than `longest` cached."""
        if self.rows is self.host:
            return self.burst(batch, steps, longest, needs)
        self.rows.copy_(self.host)
        found = self.burst(batch, steps, longest, needs)
        self.host.copy_(self.rows)
        return Step(*(part.cpu() for part in found))

    def burst(self, batch: int, steps: int, longest: int, needs: Needs) -> Step:
        """The same on the device, without waiting for it."""
        done = [self.step(batch, longest + step + 1, needs) for step in range(steps)]
        return Step(*(torch.stack(parts) for parts in zip(*done, strict=True)))

    def step(self, batch: int, columns: int, needs: Needs) -> Step:
        """One token in each of the first rows, which look at `columns` positions of the cache at most."""
        if self.tiles is not None:
            self.tiles.for_decoding()
        inputs = slice(self._padded(batch))
        attend = DecodeAttention(self.cache, self.rows.length[:batch], columns)
        hidden = self.model(self.rows.token[inputs], self.rows.length[inputs], attend).hidden
        return advance(self.rows, self._scores(hidden[:batch]), needs)

    def _scores(self, hidden: Tensor) -> Tensor:
        if self.tiles is None:
            return logits(hidden, self.model.unembed)
        return wide(self.tiles.head(hidden, self._room))

    def _padded(self, count: int) -> int:
        # Our own kernels go row by row. What torch computes beside them are angles, and those fill whole vectors.
        if self.tiles is None or (self.tiles.whole and count <= PORTION and self.model.shape.dim % ROWS == 0):
            return count
        return -(-count // ROWS) * ROWS


def _portions(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """The segments in order, cut and put together to portions of at most PORTION tokens."""
    portion, size = [], 0
    for segment in segments:
        for start in range(segment.start, segment.end, PORTION):
            piece = Segment(segment.row, start, min(start + PORTION, segment.end))
            if size + piece.end - piece.start > PORTION:
                yield portion
                portion, size = [], 0
            portion.append(piece)
            size += piece.end - piece.start
    yield portion


def _named(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
