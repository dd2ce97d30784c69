"""How exactly matrix products are worked out while learning."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def products(precision: Literal["fp32", "bf16"]) -> Iterator[None]:
    """Products of single-precision matrices in it, or with their factors rounded to bfloat16 and sums in single.

    The latter is several times as fast on a CPU with AMX and changes nothing where the hardware has no such products.
    Parameters, gradients and the optimizer's memory are single precision either way.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def no_denormals() -> Iterator[None]:
    """Numbers below 1e-38 are 0 in it, on processors that can.

    The moments of Adam of a weight whose gradient has become 0, as behind a unit that is never active, shrink to such
    numbers and stay there, and arithmetic with them takes ten times as long (docs/log.md).
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
