"""A decode step's layers on a GPU in seven kernels each: a small model's step is bound by launches, not by arithmetic.

Each lets the next one start while it ends (programmatic dependent launch). Intermediate results are rounded where the
modules round them: a norm inside the products that read it would be faster, but not what the trainer computes, and
six times as far from it (docs/log.md).
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from palestra.generate.engine import decode_kernel
from palestra.generate.engine.decode_kernel import proceed, wait
from palestra.generate.engine.kv_cache import Cache
from palestra.generate.engine.pages import PAGE
from palestra.lm.layers import MLP, RMSNorm
from palestra.lm.model import Attention, Block, Transformer

SHARED = 200 * 2**10
"""Bytes of shared memory a block must be able to have: tiles are in flight while others are multiplied."""


class Tile(NamedTuple):
    """How a product is cut: rows and columns of a program, the depth of a step, warps, and steps in flight."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The fastest of those tried on an H200 (docs/log.md) for a number of rows."""

    qkv: Tile
    out: Tile
    up: Tile
    down: Tile


FEW = Tiles(Tile(16, 0, 128, 4, 4), Tile(16, 16, 128, 4, 3), Tile(16, 32, 128, 4, 4), Tile(16, 16, 256, 4, 3))
SOME = Tiles(Tile(16, 0, 128, 4, 4), Tile(64, 16, 128, 4, 4), Tile(64, 16, 64, 4, 4), Tile(64, 16, 256, 4, 3))
MANY = Tiles(Tile(64, 0, 64, 8, 4), Tile(64, 64, 128, 4, 4), Tile(128, 64, 64, 8, 4), Tile(64, 64, 128, 4, 4))


class DecodeLayers:
    """All layers of a model for one new token in each of the first rows."""

    def __init__(self, model: Transformer, cache: Cache):
        self.model, self.cache = model, cache

    @classmethod
    def of(cls, model: Transformer, cache: Cache) -> "DecodeLayers | None":
        """None where these kernels do not fit the model or the device."""
        shape, device = model.shape, cache.keys.device
        limits: Any = torch.cuda.get_device_properties(device)
        fits = (
            limits.major >= 9
            and limits.shared_memory_per_block_optin >= SHARED
            and model.dtype in (torch.bfloat16, torch.float16)
            and shape.moe is None
            and not shape.beyond_llama
            and shape.qk_norm in (None, "head")
            and shape.dim in (32, 64, 128)
        )
        return cls(model, cache) if fits else None

    def __call__(self, tokens: Tensor, lengths: Tensor, tables: Tensor) -> Tensor:
        """Tokens (B) at positions `lengths` (B) of sequences in pages `tables` → normalized hidden states (B, D)."""
        model, shape, rows = self.model, self.model.shape, len(tokens)
        tiles = FEW if rows <= 16 else SOME if rows <= 64 and shape.width <= 1024 else MANY
        cos, sin = model.rotation(lengths)
        x = F.embedding(tokens, model.embed)
        for layer, block in enumerate(cast("list[Block]", list(model.layers))):
            attn, keys, values = block.attn, self.cache.keys[layer], self.cache.values[layer]
            q = _queries(tiles.qkv, attn, _norm(x, block.attn_norm), keys, values, tables, lengths, cos, sin)
            mixed = decode_kernel.attend(q, keys, values, tables, lengths, attn.window, dependent=True)
            _add(tiles.out, mixed.flatten(1), attn.o.weight, x)
            assert isinstance(block.mlp, MLP)
            _add(tiles.down, _gated(tiles.up, block.mlp, _norm(x, block.mlp_norm)), block.mlp.down.weight, x)
        return _norm(x, model.norm)


def _norm(x: Tensor, norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    rows, width = x.shape
    out = torch.empty_like(x)
    _rms_norm[(rows,)](x, norm.weight, out, width, norm.eps, triton.next_power_of_2(width), launch_pdl=True)
    return out


def _queries(
    tile: Tile,
    attn: Attention,
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """The queries (B, H, dim) of `x`; its keys and values go into the cache, at positions `lengths`."""
    (rows, width), weight, bias = x.shape, attn.qkv.weight, attn.qkv.bias
    q = torch.empty((rows, attn.heads, attn.dim), dtype=x.dtype, device=x.device)
    normed, eps, q_norm, k_norm = False, 0.0, weight, weight
    if attn.q_norm is not None and attn.k_norm is not None:
        normed, eps, q_norm, k_norm = True, attn.q_norm.eps, attn.q_norm.weight, attn.k_norm.weight
    _rotated_qkv[(attn.heads + 2 * attn.kv, triton.cdiv(rows, tile.rows))](
        x, weight, weight if bias is None else bias, q_norm, k_norm, cos, sin, tables, lengths, q, keys, values,
        tables.stride(0), rows, width, attn.heads, attn.kv, eps, attn.dim // 2, normed, bias is not None,
        tile.rows, tile.depth, PAGE, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=True,
    )  # fmt: skip
    return q


def _gated(tile: Tile, mlp: MLP, x: Tensor) -> Tensor:
    """SiLU(gate) · up of `x`."""
    (rows, width), hidden = x.shape, mlp.down.weight.shape[1]
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    _gate_up[triton.cdiv(hidden, tile.columns), triton.cdiv(rows, tile.rows)](
        x, mlp.gate_up.weight, out, rows, width, hidden, *tile[:3],
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=True,
    )  # fmt: skip
    return out


def _add(tile: Tile, a: Tensor, weight: Tensor, x: Tensor) -> None:
    """x += a Wᵀ."""
    (rows, inner), width = a.shape, x.shape[1]
    _add_product[triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows)](
        a, weight, x, rows, inner, width, *tile[:3], num_warps=tile.warps, num_stages=tile.stages, launch_pdl=True
    )


@triton.jit
def _rms_norm(x, norm, out, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    factor = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    wait(True)
    values = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    proceed(True)
    tl.store(out + row * width + i, (values * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated_qkv(
    x, weight, bias, q_norm, k_norm, cos, sin, tables, lengths, q, keys, values, table_stride,
    rows, width, heads, kv, eps, HALF: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """A program has one head of some rows, in two halves, which are rotated together."""
    head = tl.program_id(0)
    m = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    d = tl.arange(0, HALF)
    n = head * 2 * HALF + d
    here = m[:, None] < rows
    wait(True)
    first, second = tl.zeros([M, HALF], tl.float32), tl.zeros([M, HALF], tl.float32)
    for start in range(0, width, K):
        k = start + tl.arange(0, K)
        part = tl.load(x + m[:, None] * width + k[None, :], mask=here & (k[None, :] < width), other=0.0)
        to_first = tl.load(weight + n[None, :] * width + k[:, None], mask=k[:, None] < width, other=0.0)
        to_second = tl.load(weight + (n[None, :] + HALF) * width + k[:, None], mask=k[:, None] < width, other=0.0)
        first = tl.dot(part, to_first, first)
        second = tl.dot(part, to_second, second)
    proceed(True)
    dtype = q.dtype.element_ty
    if BIASED:
        first += tl.load(bias + n)[None, :].to(tl.float32)
        second += tl.load(bias + n + HALF)[None, :].to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    position = tl.load(lengths + m, mask=m < rows, other=0)
    if head < heads + kv:
        if NORMED:
            root = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
            factor = q_norm
            if head >= heads:
                factor = k_norm
            first = (first * root * tl.load(factor + d)[None, :].to(tl.float32)).to(dtype).to(tl.float32)
            second = (second * root * tl.load(factor + d + HALF)[None, :].to(tl.float32)).to(dtype).to(tl.float32)
        c = tl.load(cos + m[:, None] * HALF + d[None, :], mask=here, other=0.0)
        s = tl.load(sin + m[:, None] * HALF + d[None, :], mask=here, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    page = tl.load(tables + m * table_stride + position // PAGE, mask=m < rows, other=0).to(tl.int64)
    place = (page * PAGE + position % PAGE) * kv
    at = q + (m[:, None] * heads + head) * 2 * HALF + d[None, :]
    if head >= heads + kv:
        at = values + (place + head - heads - kv)[:, None] * 2 * HALF + d[None, :]
    elif head >= heads:
        at = keys + (place + head - heads)[:, None] * 2 * HALF + d[None, :]
    tl.store(at, first.to(dtype), mask=here)
    tl.store(at + HALF, second.to(dtype), mask=here)


@triton.jit
def _gate_up(x, weight, out, rows, width, hidden, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    n = tl.program_id(0) * N + tl.arange(0, N)
    here = m[:, None] < rows
    wait(True)
    gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for start in range(0, width, K):
        k = start + tl.arange(0, K)
        part = tl.load(x + m[:, None] * width + k[None, :], mask=here & (k[None, :] < width), other=0.0)
        inside = (k[:, None] < width) & (n[None, :] < hidden)
        gate = tl.dot(part, tl.load(weight + n[None, :] * width + k[:, None], mask=inside, other=0.0), gate)
        up = tl.dot(part, tl.load(weight + (n[None, :] + hidden) * width + k[:, None], mask=inside, other=0.0), up)
    proceed(True)
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    product = silu * up.to(dtype).to(tl.float32)
    tl.store(out + m[:, None] * hidden + n[None, :], product.to(dtype), mask=here & (n[None, :] < hidden))


@triton.jit
def _add_product(a, weight, x, rows, inner, width, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    n = tl.program_id(0) * N + tl.arange(0, N)
    here = (m[:, None] < rows) & (n[None, :] < width)
    wait(True)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, inner, K):
        k = start + tl.arange(0, K)
        left = tl.load(a + m[:, None] * inner + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < inner), other=0.0)
        inside = (k[:, None] < inner) & (n[None, :] < width)
        total = tl.dot(left, tl.load(weight + n[None, :] * inner + k[:, None], mask=inside, other=0.0), total)
    at = m[:, None] * width + n[None, :]
    dtype = x.dtype.element_ty
    before = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    proceed(True)
    tl.store(x + at, (before + total.to(dtype).to(tl.float32)).to(dtype), mask=here)
