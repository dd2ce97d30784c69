"""Triton kernels of decoding: attention of one new token a row over its cache, and sampling."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.generate.engine.pages import PAGE

BLOCK = 64
"""Positions of the cache that a program reads at a time."""


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Until the kernel before has written everything, where this one may start before that (Hopper and later)."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def proceed(DEPENDENT: tl.constexpr):
    """Let the kernel after this one start, and wait there."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: Tensor) -> None:
    """Write k and v (T, K, dim) to `places` (T) of `keys` and `values` (pages, PAGE, K, dim)."""
    rows, heads, dim = k.shape
    block = triton.next_power_of_2(heads * dim)
    _store[(rows,)](k, v, keys, values, places, k.stride(0), v.stride(0), heads * dim, block)


@triton.jit
def _store(k, v, keys, values, places, k_stride, v_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    at = tl.load(places + row).to(tl.int64) * width + i
    tl.store(keys + at, tl.load(k + row * k_stride + i, mask=inside), mask=inside)
    tl.store(values + at, tl.load(v + row * v_stride + i, mask=inside), mask=inside)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None,
    dependent: bool = False,
) -> Tensor:
    """Attention of q (B, H, dim) over the first `lengths` + 1 positions of each row; any H / K.

    Keys and values are (pages, PAGE, K, dim), and those of row b lie in the pages `tables[b]`.

    Long caches are read by several programs a head, whose results are then joined. How many is decided by the
    number of rows alone, so that a captured graph serves every length.
    """
    rows, heads, dim = q.shape
    kv, context = keys.shape[2], tables.shape[1] * PAGE
    group = heads // kv
    splits = max(1, min(triton.cdiv(context, 4 * BLOCK), triton.next_power_of_2(264 // max(1, rows * kv) + 1) // 2))
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    padded = max(16, triton.next_power_of_2(group))
    common = (tables, lengths, q.stride(0), tables.stride(0), dim**-0.5, window or 0)
    sizes = (group, padded, dim, max(16, triton.next_power_of_2(dim)))
    launch: dict[str, bool] = {"launch_pdl": True} if dependent else {}
    if splits == 1:
        # Many programs hide each other's waits; few have to read far ahead.
        block, warps, stages = (32, 2, 2) if rows * kv >= 512 else (128 if dim <= 64 else BLOCK, 4, 3)
        _attend[(rows, kv, 1)](
            q, keys, values, out, out, out, *common, 1, *sizes, block, PAGE, dependent,
            num_warps=warps, num_stages=stages, **launch,
        )  # fmt: skip
        return out
    parts = torch.empty((rows, kv, splits, padded, dim), dtype=torch.float32, device=q.device)
    tops, sums = (torch.empty((rows, kv, splits, padded), dtype=torch.float32, device=q.device) for _ in range(2))
    _attend[(rows, kv, splits)](
        q, keys, values, parts, tops, sums, *common, splits, *sizes, BLOCK, PAGE, dependent, **launch
    )
    _join[(rows, kv)](parts, tops, sums, out, splits, *sizes, triton.next_power_of_2(splits), dependent, **launch)
    return out


@triton.jit
def _attend(
    q, keys, values, out, tops, sums, tables, lengths, q_stride, table_stride, scale, window,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv = tl.num_programs(1)
    length = tl.load(lengths + row).to(tl.int32) + 1
    begin = 0
    if window > 0:
        begin = tl.maximum(length - window, 0)
    # Splits share the blocks between begin and length evenly.
    blocks = tl.cdiv(length - (begin // BLOCK) * BLOCK, BLOCK)
    each = tl.cdiv(blocks, SPLITS)
    first = (begin // BLOCK + split * each) * BLOCK
    last = tl.minimum(first + each * BLOCK, length)
    g, d, t = tl.arange(0, PADDED), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    wait(DEPENDENT)
    of_q = (head * GROUP + g[:, None]) * DIM + d[None, :]
    query = tl.load(q + row * q_stride + of_q, mask=(g[:, None] < GROUP) & (d[None, :] < DIM), other=0.0)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, WIDTH], tl.float32)
    for start in range(first, last, BLOCK):
        p = start + t
        seen = (p >= begin) & (p < last)
        page = tl.load(tables + row * table_stride + p // PAGE, mask=seen, other=0).to(tl.int64)
        at = ((page * PAGE + p % PAGE) * kv + head)[:, None] * DIM + d[None, :]
        inside = seen[:, None] & (d[None, :] < DIM)
        key = tl.load(keys + at, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(values + at, mask=inside, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = higher
    proceed(DEPENDENT)
    wanted = (g[:, None] < GROUP) & (d[None, :] < DIM)
    if SPLITS == 1:
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        to = (row * kv * GROUP + head * GROUP + g[:, None]) * DIM + d[None, :]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=wanted)
    else:
        part = (row * kv + head) * SPLITS + split
        tl.store(out + (part * PADDED + g[:, None]) * DIM + d[None, :], mixed, mask=wanted)
        tl.store(tops + part * PADDED + g, top)
        tl.store(sums + part * PADDED + g, total)


@triton.jit
def _join(
    parts, tops, sums, out, splits,
    GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv = tl.num_programs(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    wait(DEPENDENT)
    for g in range(GROUP):
        at = ((row * kv + head) * splits + s) * PADDED + g
        there = s < splits
        top = tl.load(tops + at, mask=there, other=float("-inf"))
        highest = tl.max(top, 0)
        factor = tl.where(there & (top > float("-inf")), tl.exp(top - highest), 0.0)
        total = tl.sum(tl.load(sums + at, mask=there, other=0.0) * factor, 0)
        of_part = at[:, None] * DIM + d[None, :]
        values = tl.load(parts + of_part, mask=there[:, None] & (d[None, :] < DIM), other=0.0)
        # A part that read nothing holds zeros over zeros: its factor is 0.
        joined = tl.sum(values * factor[:, None], 0) / tl.where(total > 0, total, 1.0)
        to = (row * kv * GROUP + head * GROUP + g) * DIM + d
        tl.store(out + to, joined.to(out.dtype.element_ty), mask=d < DIM)


def sample_tokens(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token (B) of softmax(logits / temperature) for each row and uniform number, and its log-probability.

    By inverse transform, over the vocabulary in order; −inf is never sampled. A temperature of 0 takes the most likely
    token, with its log-probability at temperature 1.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _sample_tokens[(rows,)](logits, temperature, uniform, tokens, logprobs, vocab, logits.stride(0), 4096, num_warps=8)
    return tokens, logprobs


@triton.jit
def _sample_tokens(logits, temperature, uniform, tokens, logprobs, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    scale = 1.0 / tl.where(heat > 0, heat, 1.0)
    i = tl.arange(0, BLOCK)
    base = logits + row * stride
    top = -float("inf")
    best = 0
    total = 0.0
    for start in range(0, vocab, BLOCK):
        z = tl.load(base + start + i, mask=start + i < vocab, other=-float("inf")) * scale
        high, where = tl.max(z, 0, return_indices=True)
        if high > top:
            total = total * tl.exp(top - high)
            top = high
            best = start + where
        total += tl.sum(tl.where(z > -float("inf"), tl.exp(z - top), 0.0), 0)
    token = best
    if heat > 0:
        goal = tl.load(uniform + row) * total
        below = 0.0
        chosen = -1
        likely = -1  # the last token of any probability, where rounding leaves the goal beyond the sum
        for start in range(0, vocab, BLOCK):
            if chosen < 0:
                z = tl.load(base + start + i, mask=start + i < vocab, other=-float("inf")) * scale
                p = tl.where(z > -float("inf"), tl.exp(z - top), 0.0)
                likely = tl.maximum(likely, tl.max(tl.where(p > 0, start + i, -1), 0))
                until = below + tl.cumsum(p, 0)
                passed = tl.min(tl.where((until > goal) & (p > 0), start + i, vocab), 0)
                if passed < vocab:
                    chosen = passed
                below += tl.sum(p, 0)
        token = tl.where(chosen < 0, likely, chosen)
    z = tl.load(base + token) * scale
    tl.store(tokens + row, token)
    tl.store(logprobs + row, z - top - tl.log(total))
