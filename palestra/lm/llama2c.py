"""Models of llama2.c: a header of seven integers, then all weights in FP32 (its legacy format, version 0)."""

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from palestra.errors import UsageError
from palestra.lm.rope import pair_halves
from palestra.spec.shape import Shape

EOS = (1, 2)
"""Stories are told apart by BOS alone, so that ends a generation, as in run.c; </s> does by its name."""
_HEADER = struct.Struct("<7i")
_MAGIC = 0x616B3432  # "ak42": the first integer from version 1 on, where version 0 has the width


def load_llama2c(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """The shape and the weights, by the transformer's names, of a llama2.c file."""
    data = Path(path).read_bytes()
    shape = _read_shape(data, path)
    numbers = torch.from_numpy(np.frombuffer(data, np.float32, offset=_HEADER.size).copy())
    layers, width, vocab, half = shape.layers, shape.width, shape.vocab or 0, shape.dim // 2
    rows, kv_rows, hidden = shape.heads * shape.dim, shape.kv * shape.dim, shape.hidden
    # In the order of the file. The tables of cosines and sines follow from the shape.
    sizes: dict[str, tuple[int, ...]] = {
        "embed": (vocab, width),
        "attn_norm": (layers, width),
        "q": (layers, rows, width),
        "k": (layers, kv_rows, width),
        "v": (layers, kv_rows, width),
        "o": (layers, width, rows),
        "mlp_norm": (layers, width),
        "gate": (layers, hidden, width),
        "down": (layers, width, hidden),
        "up": (layers, hidden, width),
        "norm": (width,),
        "cosines": (shape.context, half),
        "sines": (shape.context, half),
    }
    if not shape.tied:
        sizes["head"] = (vocab, width)
    counts = [int(np.prod(size)) for size in sizes.values()]
    if sum(counts) != len(numbers):
        raise UsageError(
            f"{path} holds {len(numbers):,} numbers after its header, which announces {sum(counts):,} ({shape!r}); "
            "it is cut off or not a model of llama2.c"
        )
    parts = {name: part.view(size) for (name, size), part in zip(sizes.items(), numbers.split(counts), strict=True)}
    weights = {"embed": parts["embed"], "norm.weight": parts["norm"]}
    if not shape.tied:
        weights["head"] = parts["head"]
    for layer in range(layers):
        at = {name: part[layer] for name, part in parts.items() if part.ndim > 1 and len(part) == layers}
        q, k = pair_halves(at["q"], shape.heads), pair_halves(at["k"], shape.kv)
        weights |= {
            f"layers.{layer}.attn_norm.weight": at["attn_norm"],
            f"layers.{layer}.attn.qkv.weight": torch.cat([q, k, at["v"]]),
            f"layers.{layer}.attn.o.weight": at["o"],
            f"layers.{layer}.mlp_norm.weight": at["mlp_norm"],
            f"layers.{layer}.mlp.gate_up.weight": torch.cat([at["gate"], at["up"]]),
            f"layers.{layer}.mlp.down.weight": at["down"],
        }
    return shape, weights


def _read_shape(data: bytes, path: Path) -> Shape:
    if len(data) < _HEADER.size:
        raise UsageError(f"{path} is not a model of llama2.c: it has {len(data)} bytes")
    width, mlp, layers, heads, kv_heads, vocab, context = _HEADER.unpack_from(data)
    if width == _MAGIC:
        raise UsageError(f"{path} has version {mlp} of llama2.c's format; only the legacy one (version 0) is supported")
    if min(width, mlp, layers, heads, kv_heads, abs(vocab), context) < 1 or width % heads or heads % kv_heads:
        raise UsageError(f"{path} is not a model of llama2.c: its header is {_HEADER.unpack_from(data)}")
    return Shape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        mlp=mlp,
        context=context,
        vocab=abs(vocab),
        tied=vocab > 0,  # the sign says whether the embedding is also the head
    )
