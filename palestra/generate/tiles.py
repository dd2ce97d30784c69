"""Products on the CPU whose result for a row does not depend on how many rows there are."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.lm.head import logits
from palestra.lm.model import Transformer
from palestra.lm.moe import MoE
from palestra.lm.ops import Linear

PREFILL_ROWS = {torch.float32: 64, torch.bfloat16: 256}
DECODE_ROWS = {torch.float32: 32, torch.bfloat16: 64}
"""Rows of a product. A matrix library picks its kernel, and with it the order of additions, by the number of rows: the
same number always gives the same bits. bf16 needs 64 to reach the matrix units, and more to keep them busy."""
ROWS = 16
"""Everything but products works on a multiple of so many rows: cut into a thread's shares between rows, so that no
row has elements at the end of a share, where one by one they round otherwise than in vectors."""
WORTH_PACKING = 2**17
"""Elements from which a matrix gains by lying in the library's own order."""


class Tiles:
    """How many rows a product is computed with, for all matrices of a model that this puts into tiles."""

    def __init__(self, model: Transformer):
        self.dtype = model.dtype
        self.for_prefill()
        self.head = TiledHead(model.unembed, self)
        self._matrices: list[TiledLinear] = [self.head]
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, MoE):
                    setattr(module, name, TiledMoE(child, self))
                elif isinstance(child, Linear):
                    self._matrices.append(TiledLinear(child.weight, child.bias, self))
                    setattr(module, name, self._matrices[-1])

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

    def apply(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of rows (T, …), tile by tile; the last one is filled up with zeros."""
        short = -len(x) % self.rows
        tiles = (F.pad(x, (0, 0, 0, short)) if short else x).split(self.rows)
        out = product(tiles[0]) if len(tiles) == 1 else torch.cat([product(tile) for tile in tiles])
        return out[: len(x)]


class TiledLinear(nn.Module):
    """A matrix that is applied to tiles of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, tiles: Tiles):
        super().__init__()
        self.weight, self.bias, self.tiles = weight, bias, tiles
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Lay the weights out for the library, which would otherwise do it in every product."""
        if torch.backends.mkldnn.is_available() and self.weight.numel() >= WORTH_PACKING:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(T, inputs) → (T, outputs)."""
        return self.tiles.apply(self._product, x)

    def _product(self, tile: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(tile, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(tile, self._packed, self.bias, "none", [], "")


class TiledHead(TiledLinear):
    """The output head, whose scores are FP32: weights in bf16 are kept in FP32 beside, as `logits` multiplies them."""

    def __init__(self, unembed: Tensor, tiles: Tiles):
        super().__init__(unembed, None, tiles)
        self._wide: Tensor | None = None

    def pack(self) -> None:
        """Take over new weights."""
        if self.weight.dtype == torch.float32:
            super().pack()
        else:
            self._wide = self.weight.detach().float()

    def _product(self, tile: Tensor) -> Tensor:
        return super()._product(tile) if self._wide is None else logits(tile, self._wide)


class TiledMoE(MoE):
    """Experts that are applied to tiles of the rows that chose them."""

    def __init__(self, moe: MoE, tiles: Tiles):
        nn.Module.__init__(self)
        self.spec, self.gate, self.shared, self.tiles = moe.spec, moe.gate, moe.shared, tiles
        self.router, self.gate_up, self.down = moe.router, moe.gate_up, moe.down
        self.register_buffer("bias", moe.bias)

    def _route(self, x: Tensor) -> Tensor:
        return self.tiles.apply(super()._route, x)

    def _experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        pieces, start = [rows[:0]], 0
        for end, first, second in zip(ends.tolist(), self.gate_up.unbind(), self.down.unbind(), strict=True):
            if start < end:
                expert = partial(_expert, first=first, second=second, gate=self.gate)
                pieces.append(self.tiles.apply(expert, rows[start:end]))
            start = end
        return torch.cat(pieces)


def _expert(x: Tensor, first: Tensor, second: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    return F.linear(gate(F.linear(x, first)), second)
