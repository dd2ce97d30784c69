"""Products in tiles: all rows at once only where that gives the same bits."""

import torch

from palestra.generate.engine.cpu import Tiles
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape


def tiles() -> Tiles:
    made = Tiles(Transformer(Shape(layers=1, width=8, heads=1, mlp=8, context=8, vocab=8)))
    made.whole = False  # as on a CPU with bf16, or without a compiler
    made.for_decoding()
    return made


def calls(product, x, key):
    """How many rows each product had, in a second call of `apply`, and its result."""
    made, seen = tiles(), []

    def counted(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return product(rows)

    made.apply(counted, x, key)
    seen.clear()
    return seen, made.apply(counted, x, key), made.rows


def test_product_that_depends_on_the_number_of_rows_stays_in_tiles():
    x = torch.randn(96, 8)
    seen, found, rows = calls(lambda part: part * len(part), x, "by rows")
    assert seen == [rows] * 3
    assert torch.equal(found, x * rows)


def test_product_with_the_same_bits_takes_all_rows_at_once():
    x = torch.randn(96, 8)
    seen, found, _ = calls(lambda part: part * 2, x, "plain")
    assert seen == [96]
    assert torch.equal(found, x * 2)


def test_product_without_a_key_or_of_zeros_stays_in_tiles():
    x = torch.randn(96, 8)
    assert calls(lambda part: part * 2, x, None)[0] == [32] * 3
    seen, _, rows = calls(lambda part: part * 0, x, "zeros")
    assert set(seen) == {rows}
