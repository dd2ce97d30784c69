"""Compiles the blocks of a transformer for training, where that pays."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from palestra.lm.attention import PackedAttention
from palestra.lm.model import Transformer
from palestra.spec.lm import ComputeSpec

CACHE = "TORCHINDUCTOR_CACHE_DIR"
STEPS_THAT_PAY = 200
"""Compiling a block takes about 20 seconds, and saves a third of a step on a GPU."""


def compile_for_training(model: Transformer, spec: ComputeSpec, device: torch.device) -> None:
    """Compile each block in place, if the spec asks for it or it pays; blocks of one form share the code."""
    pays = device.type == "cuda" and spec.steps >= STEPS_THAT_PAY
    if spec.compile == "off" or (spec.compile == "auto" and not pays):
        return
    # A block's number is no reason to compile it again.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # Lengths differ from batch to batch: it would be compiled again for each. As a decorator it would import
    # torch._dynamo, 6 s on a slow core, in every process that only reads a model.
    PackedAttention._blocks = torch.compiler.disable(PackedAttention._blocks)
    for block in model.layers:
        block.compile()


@contextmanager
def compile_cache(folder: str | None) -> Iterator[None]:
    """Keep compiled code in a folder meanwhile: torch compiles when a block is first called. None leaves it be."""
    before = os.environ.get(CACHE)
    if folder is not None:
        os.environ[CACHE] = os.path.abspath(folder)
    try:
        yield
    finally:
        os.environ.pop(CACHE, None)
        if before is not None:
            os.environ[CACHE] = before
