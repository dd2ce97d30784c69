"""Products on the CPU whose result for a row does not depend on how many rows there are."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.lm.model import Transformer
from palestra.lm.ops import Linear

PREFILL_ROWS = 64
DECODE_ROWS = {torch.float32: 16, torch.bfloat16: 64}
"""Rows of a product. A matrix library picks its kernel, and with it the order of additions, by the number of rows: the
same number always gives the same bits. bf16 needs 64 to reach the matrix units."""


class Tiles:
    """How many rows a product is computed with, for all matrices of a model that this puts into tiles."""

    def __init__(self, model: Transformer):
        self.dtype, self.rows = model.dtype, PREFILL_ROWS
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, Linear):
                    setattr(module, name, TiledLinear(child, self))

    def for_prefill(self) -> None:
        """Many rows: large tiles."""
        self.rows = PREFILL_ROWS

    def for_decoding(self) -> None:
        """Maybe few rows: tiles that waste little. A token is only ever computed in one of the two sizes."""
        self.rows = DECODE_ROWS.get(self.dtype, PREFILL_ROWS)


class TiledLinear(nn.Module):
    """A matrix that is applied to tiles of rows; the number of rows must be a multiple of the tile's."""

    def __init__(self, linear: Linear, tiles: Tiles):
        super().__init__()
        self.weight, self.bias, self.tiles = linear.weight, linear.bias, tiles

    def forward(self, x: Tensor) -> Tensor:
        """(T, inputs) → (T, outputs)."""
        return torch.cat([F.linear(tile, self.weight, self.bias) for tile in x.split(self.tiles.rows)])
