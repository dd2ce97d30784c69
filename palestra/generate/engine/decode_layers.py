"""A decode step's layers on a GPU in seven kernels each: a small model's step is bound by launches, not by arithmetic.

Each lets the next one start while it ends (programmatic dependent launch), and products are cut along their inner
dimension too, so that they fill the device. Intermediate results are rounded where the modules round them: a norm
inside the products that read it would be faster, but not what the trainer computes (docs/log.md).
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from palestra.generate.engine import decode_kernel
from palestra.generate.engine.decode_kernel import EARLY, LATE, proceed, wait
from palestra.generate.engine.kv_cache import Cache
from palestra.generate.engine.pages import PAGE
from palestra.lm.layers import MLP, RMSNorm, swiglu
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


FEW = Tiles(Tile(16, 0, 128, 4, 4), Tile(16, 16, 128, 4, 4), Tile(16, 32, 128, 4, 4), Tile(16, 16, 128, 4, 4))
SOME = Tiles(Tile(16, 0, 64, 4, 5), Tile(64, 16, 64, 4, 5), Tile(64, 16, 64, 4, 5), Tile(64, 16, 128, 4, 5))
MANY = Tiles(Tile(64, 0, 64, 4, 4), Tile(64, 64, 64, 4, 4), Tile(64, 32, 64, 4, 3), Tile(64, 64, 128, 4, 4))
MOST = Tiles(Tile(64, 0, 64, 4, 4), Tile(128, 64, 64, 8, 4), Tile(128, 64, 64, 8, 3), Tile(64, 128, 128, 4, 4))
PROGRAMS = 112
"""Where a product has fewer, it is also cut along its inner dimension, into up to four parts."""
LIBRARY = 4e9
"""A product of this many operations, bound by arithmetic and not by launches, is left to cuBLAS."""
ONE_COLUMNS = 4
"""Columns of a program's products where there is a single row."""
ONE_DEPTH = 1024
"""And the part of the inner dimension, where it can be cut."""
WIDEST_ONE = 4096
"""Beyond this a program's weights do not fit its registers; heads with a norm are in one piece, and a quarter is."""


class DecodeLayers:
    """All layers of a model for one new token in each of the first rows."""

    def __init__(self, model: Transformer, cache: Cache, context: int):
        self.model, self.cache = model, cache
        positions = torch.arange(context, device=cache.keys.device)
        self.cos, self.sin = (part.contiguous() for part in model.rotation(positions))
        # Of heads whose keys several programs read. Many more rows have a program each.
        self.counts = torch.zeros(2**12, dtype=torch.int32, device=cache.keys.device)

    @classmethod
    def of(cls, model: Transformer, cache: Cache, context: int) -> "DecodeLayers | None":
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
        return cls(model, cache, context) if fits else None

    def __call__(self, tokens: Tensor, lengths: Tensor, tables: Tensor) -> Tensor:
        """Tokens (B) at positions `lengths` (B) of sequences in pages `tables` → normalized hidden states (B, D)."""
        model, width, rows = self.model, self.model.shape.width, len(tokens)
        if rows == 1 and width <= (WIDEST_ONE if model.shape.qk_norm is None else WIDEST_ONE // 4):
            return self._one(tokens, lengths, tables)
        tiles = FEW if rows <= 16 else SOME if rows <= 64 and width <= 1024 else MANY if rows <= 256 else MOST
        next = EARLY.value if rows <= 64 else LATE.value
        x, added = F.embedding(tokens, model.embed), None
        for layer, block in enumerate(cast("list[Block]", list(model.layers))):
            attn, keys, values = block.attn, self.cache.keys[layer], self.cache.values[layer]
            normed = add_norm(x, added, block.attn_norm, next)
            q = self._queries(tiles.qkv, attn, normed, keys, values, tables, lengths, next)
            mixed = decode_kernel.attend(q, keys, values, tables, lengths, attn.window, next, self.counts)
            normed = add_norm(x, _product(tiles.out, mixed.flatten(1), attn.o.weight, next), block.mlp_norm, next)
            assert isinstance(block.mlp, MLP)
            added = _product(tiles.down, _gated(tiles.up, block.mlp, normed, next), block.mlp.down.weight, next)
        return add_norm(x, added, model.norm, next)

    def _one(self, token: Tensor, length: Tensor, table: Tensor) -> Tensor:
        """The same for a single row: norms are computed again by every program of the products that read them.

        All weights of a program are on their way before it waits for its inputs.
        """
        model, shape, next = self.model, self.model.shape, EARLY.value
        x, other, added = (embedded := F.embedding(token, model.embed)), torch.empty_like(embedded), None
        for layer, block in enumerate(cast("list[Block]", list(model.layers))):
            attn, mlp, keys, values = block.attn, block.mlp, self.cache.keys[layer], self.cache.values[layer]
            assert isinstance(mlp, MLP)
            assert isinstance(block.attn_norm, RMSNorm)
            assert isinstance(block.mlp_norm, RMSNorm)
            q = torch.empty((1, attn.heads, attn.dim), dtype=x.dtype, device=x.device)
            weight, bias, block_k = attn.qkv.weight, attn.qkv.bias, triton.next_power_of_2(shape.width)
            normed, eps, q_norm, k_norm = False, 0.0, weight, weight
            if attn.q_norm is not None and attn.k_norm is not None:
                normed, eps, q_norm, k_norm = True, attn.q_norm.eps, attn.q_norm.weight, attn.k_norm.weight
            pairs = attn.dim // 2 if normed else min(8, attn.dim // 2)
            _one_qkv[attn.heads + 2 * attn.kv, attn.dim // 2 // pairs](
                x, x if added is None else added, block.attn_norm.weight, other, weight,
                weight if bias is None else bias, q_norm, k_norm, self.cos, self.sin, table, length, q, keys, values,
                shape.width, attn.heads, attn.kv, block.attn_norm.eps, eps, 0 if added is None else len(added),
                attn.dim // 2, pairs, normed, bias is not None, block_k, PAGE, next,
                num_warps=_warps(2 * pairs * block_k), launch_pdl=True,
            )  # fmt: skip
            x, other = other, x
            mixed = decode_kernel.attend(q, keys, values, table, length, attn.window, next, self.counts)
            added = _one_product(mixed.flatten(), attn.o.weight)
            hidden = mlp.down.weight.shape[1]
            gated = torch.empty(hidden, dtype=x.dtype, device=x.device)
            _one_gate_up[(triton.cdiv(hidden, ONE_COLUMNS),)](
                x, added, block.mlp_norm.weight, other, mlp.gate_up.weight, gated, shape.width, hidden,
                block.mlp_norm.eps, len(added), ONE_COLUMNS, block_k, next,
                num_warps=_warps(2 * ONE_COLUMNS * block_k), launch_pdl=True,
            )  # fmt: skip
            x, other = other, x
            added = _one_product(gated, mlp.down.weight)
        return add_norm(x, added, model.norm, next)

    def _queries(
        self,
        tile: Tile,
        attn: Attention,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        next: int,
    ) -> Tensor:
        """The queries (B, H, dim) of `x`; its keys and values go into the cache, at positions `lengths`."""
        (rows, width), weight, bias = x.shape, attn.qkv.weight, attn.qkv.bias
        q = torch.empty((rows, attn.heads, attn.dim), dtype=x.dtype, device=x.device)
        normed, eps, q_norm, k_norm = False, 0.0, weight, weight
        if attn.q_norm is not None and attn.k_norm is not None:
            normed, eps, q_norm, k_norm = True, attn.q_norm.eps, attn.q_norm.weight, attn.k_norm.weight
        _rotated_qkv[(attn.heads + 2 * attn.kv, triton.cdiv(rows, tile.rows))](
            x, weight, weight if bias is None else bias, q_norm, k_norm, self.cos, self.sin, tables, lengths,
            q, keys, values, tables.stride(0), rows, width, attn.heads, attn.kv, eps, attn.dim // 2, normed,
            bias is not None, tile.rows, tile.depth, PAGE, width % tile.depth == 0, next,
            num_warps=tile.warps, num_stages=tile.stages, launch_pdl=True,
        )  # fmt: skip
        return q


def add_norm(x: Tensor, added: Tensor | None, norm: nn.Module, next: int) -> Tensor:
    """The norm of `x`, to which a product's parts (splits, B, D) are added first, in place."""
    assert isinstance(norm, RMSNorm)
    rows, width = x.shape
    out = torch.empty_like(x)
    parts, splits = (x, 0) if added is None else (added, len(added))
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](x, parts, norm.weight, out, rows, width, norm.eps, splits, block, next, launch_pdl=True)
    return out


def _gated(tile: Tile, mlp: MLP, x: Tensor, next: int) -> Tensor:
    """SiLU(gate) · up of `x`."""
    (rows, width), hidden = x.shape, mlp.down.weight.shape[1]
    if 4 * rows * width * hidden >= LIBRARY:
        return swiglu(F.linear(x, mlp.gate_up.weight))
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    _gate_up[triton.cdiv(hidden, tile.columns), triton.cdiv(rows, tile.rows)](
        x, mlp.gate_up.weight, out, rows, width, hidden, *tile[:3], width % tile.depth == 0, next,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=True,
    )  # fmt: skip
    return out


def _product(tile: Tile, a: Tensor, weight: Tensor, next: int) -> Tensor:
    """a Wᵀ in parts (splits, B, D), of which it is the sum; FP32 where there are several."""
    (rows, inner), width = a.shape, len(weight)
    if 2 * rows * inner * width >= LIBRARY:
        return F.linear(a, weight)[None]
    grid = triton.cdiv(width, tile.columns), triton.cdiv(rows, tile.rows)
    splits = max(1, min(4, round(PROGRAMS / (grid[0] * grid[1]))))
    each = triton.cdiv(triton.cdiv(inner, splits), tile.depth) * tile.depth
    parts = torch.empty((triton.cdiv(inner, each), rows, width), dtype=torch.float32, device=a.device)
    _split_product[*grid, len(parts)](
        a, weight, parts, rows, inner, width, each, *tile[:3], inner % tile.depth == 0, next,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=True,
    )  # fmt: skip
    return parts


def _one_product(a: Tensor, weight: Tensor) -> Tensor:
    """W a in parts (splits, 1, D), FP32."""
    width, inner = weight.shape
    depth = min(ONE_DEPTH, triton.next_power_of_2(inner))
    parts = torch.empty((triton.cdiv(inner, depth), 1, width), dtype=torch.float32, device=a.device)
    _one_split[triton.cdiv(width, ONE_COLUMNS), len(parts)](
        a, weight, parts, inner, width, ONE_COLUMNS, depth, EARLY.value,
        num_warps=_warps(ONE_COLUMNS * depth), launch_pdl=True,
    )  # fmt: skip
    return parts


def _warps(weights: int) -> int:
    """For a program that has so many weights in its registers."""
    return 4 if weights <= 2**14 else 8 if weights <= 2**16 else 16


@triton.jit
def _add_norm(
    x, parts, norm, out, rows, width, eps, SPLITS: tl.constexpr, BLOCK: tl.constexpr, NEXT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    factor = tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    wait(NEXT)
    values = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        total = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            total += tl.load(parts + (split * rows + row) * width + i, mask=inside, other=0.0).to(tl.float32)
        new = (values + total.to(x.dtype.element_ty).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + row * width + i, new, mask=inside)
        values = new.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    proceed(NEXT)
    tl.store(out + row * width + i, (values * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated_qkv(
    x, weight, bias, q_norm, k_norm, cos, sin, tables, lengths, q, keys, values, table_stride,
    rows, width, heads, kv, eps, HALF: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, EVEN: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """A program has one head of some rows, in two halves, which are rotated together."""
    head = tl.program_id(0)
    m = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    d = tl.arange(0, HALF)
    n = head * 2 * HALF + d
    here = m[:, None] < rows
    wait(NEXT)
    first, second = tl.zeros([M, HALF], tl.float32), tl.zeros([M, HALF], tl.float32)
    for start in range(0, width, K):
        k = start + tl.arange(0, K)
        inner = (k < width) | EVEN
        part = tl.load(x + m[:, None] * width + k[None, :], mask=here & inner[None, :], other=0.0)
        to_first = tl.load(weight + n[None, :] * width + k[:, None], mask=inner[:, None], other=0.0)
        to_second = tl.load(weight + (n[None, :] + HALF) * width + k[:, None], mask=inner[:, None], other=0.0)
        first = tl.dot(part, to_first, first)
        second = tl.dot(part, to_second, second)
    proceed(NEXT)
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
        c = tl.load(cos + position[:, None] * HALF + d[None, :], mask=here, other=0.0)
        s = tl.load(sin + position[:, None] * HALF + d[None, :], mask=here, other=0.0)
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
def _gate_up(
    x, weight, out, rows, width, hidden,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    m = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    n = tl.program_id(0) * N + tl.arange(0, N)
    here = m[:, None] < rows
    wait(NEXT)
    gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for start in range(0, width, K):
        k = start + tl.arange(0, K)
        inner = (k < width) | EVEN
        part = tl.load(x + m[:, None] * width + k[None, :], mask=here & inner[None, :], other=0.0)
        inside = inner[:, None] & (n[None, :] < hidden)
        gate = tl.dot(part, tl.load(weight + n[None, :] * width + k[:, None], mask=inside, other=0.0), gate)
        up = tl.dot(part, tl.load(weight + (n[None, :] + hidden) * width + k[:, None], mask=inside, other=0.0), up)
    proceed(NEXT)
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    product = silu * up.to(dtype).to(tl.float32)
    tl.store(out + m[:, None] * hidden + n[None, :], product.to(dtype), mask=here & (n[None, :] < hidden))


@triton.jit
def _split_product(
    a, weight, parts, rows, inner, width, each,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """A program has some rows and columns of one part."""
    m = (tl.program_id(1) * M + tl.arange(0, M)).to(tl.int64)
    n = tl.program_id(0) * N + tl.arange(0, N)
    first = tl.program_id(2) * each
    here = (m[:, None] < rows) & (n[None, :] < width)
    wait(NEXT)
    total = tl.zeros([M, N], tl.float32)
    for start in range(first, tl.minimum(first + each, inner), K):
        k = start + tl.arange(0, K)
        deep = (k < inner) | EVEN
        left = tl.load(a + m[:, None] * inner + k[None, :], mask=(m[:, None] < rows) & deep[None, :], other=0.0)
        inside = deep[:, None] & (n[None, :] < width)
        total = tl.dot(left, tl.load(weight + n[None, :] * inner + k[:, None], mask=inside, other=0.0), total)
    proceed(NEXT)
    tl.store(parts + (tl.program_id(2) * rows + m[:, None]) * width + n[None, :], total, mask=here)


@triton.jit
def _normed(
    x, parts, norm, out, width, eps, stores, SPLITS: tl.constexpr, K: tl.constexpr, NEXT: tl.constexpr
):  # fmt: skip
    """The norm of a single row of `x` and what is added to it; the sum goes to `out` where `stores`."""
    k = tl.arange(0, K)
    inside = k < width
    factor = tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
    wait(NEXT)
    dtype = x.dtype.element_ty
    values = tl.load(x + k, mask=inside, other=0.0)
    if SPLITS > 0:
        total = tl.zeros([K], tl.float32)
        for split in tl.static_range(SPLITS):
            total += tl.load(parts + split * width + k, mask=inside, other=0.0)
        values = (values.to(tl.float32) + total.to(dtype).to(tl.float32)).to(dtype)
    if stores:
        tl.store(out + k, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    return (values * scale * factor).to(dtype).to(tl.float32)[None, :]


@triton.jit
def _matrix(weight, n, width, columns, K: tl.constexpr):
    """Rows `n` of a matrix, whole."""
    k = tl.arange(0, K)
    return tl.load(
        weight + n[:, None] * width + k[None, :], mask=(n[:, None] < columns) & (k[None, :] < width), other=0.0
    )


@triton.jit
def _one_qkv(
    x, parts, norm, out, weight, bias, q_norm, k_norm, cos, sin, table, length, q, keys, values, width, heads, kv,
    eps, head_eps, SPLITS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, NORMED: tl.constexpr,
    BIASED: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """A program has some of the pairs of a head that are rotated together."""
    head = tl.program_id(0)
    d = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    n = head * 2 * HALF + d
    columns = (heads + 2 * kv) * 2 * HALF
    to_first, to_second = _matrix(weight, n, width, columns, K), _matrix(weight, n + HALF, width, columns, K)
    stores = (head == 0) & (tl.program_id(1) == 0)
    row = _normed(x, parts, norm, out, width, eps, stores, SPLITS, K, NEXT)
    first, second = tl.sum(to_first.to(tl.float32) * row, 1), tl.sum(to_second.to(tl.float32) * row, 1)
    proceed(NEXT)
    dtype = q.dtype.element_ty
    if BIASED:
        first += tl.load(bias + n).to(tl.float32)
        second += tl.load(bias + n + HALF).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    position = tl.load(length)
    if head < heads + kv:
        if NORMED:
            root = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + head_eps)
            factor = q_norm
            if head >= heads:
                factor = k_norm
            first = (first * root * tl.load(factor + d).to(tl.float32)).to(dtype).to(tl.float32)
            second = (second * root * tl.load(factor + d + HALF).to(tl.float32)).to(dtype).to(tl.float32)
        c, s = tl.load(cos + position * HALF + d), tl.load(sin + position * HALF + d)
        first, second = first * c - second * s, second * c + first * s
    page = tl.load(table + position // PAGE).to(tl.int64)
    place = (page * PAGE + position % PAGE) * kv
    at = q + head * 2 * HALF + d
    if head >= heads + kv:
        at = values + (place + head - heads - kv) * 2 * HALF + d
    elif head >= heads:
        at = keys + (place + head - heads) * 2 * HALF + d
    tl.store(at, first.to(dtype))
    tl.store(at + HALF, second.to(dtype))


@triton.jit
def _one_gate_up(
    x, parts, norm, out, weight, gated, width, hidden, eps,
    SPLITS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * N + tl.arange(0, N)
    to_gate, to_up = _matrix(weight, n, width, hidden, K), _matrix(weight + hidden * width, n, width, hidden, K)
    row = _normed(x, parts, norm, out, width, eps, tl.program_id(0) == 0, SPLITS, K, NEXT)
    gate, up = tl.sum(to_gate.to(tl.float32) * row, 1), tl.sum(to_up.to(tl.float32) * row, 1)
    proceed(NEXT)
    dtype = gated.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(gated + n, (silu * up.to(dtype).to(tl.float32)).to(dtype), mask=n < hidden)


@triton.jit
def _one_split(a, weight, parts, inner, width, N: tl.constexpr, K: tl.constexpr, NEXT: tl.constexpr):
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.program_id(1) * K + tl.arange(0, K)
    inside = (n[:, None] < width) & (k[None, :] < inner)
    matrix = tl.load(weight + n[:, None] * inner + k[None, :], mask=inside, other=0.0)
    wait(NEXT)
    row = tl.load(a + k, mask=k < inner, other=0.0).to(tl.float32)
    total = tl.sum(matrix.to(tl.float32) * row[None, :], 1)
    proceed(NEXT)
    tl.store(parts + tl.program_id(1) * width + n, total, mask=n < width)
