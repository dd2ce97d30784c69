"""Triton kernels of decoding: attention of one new token a row over its cache, and sampling."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.generate.engine.pages import PAGE

BLOCK = 128
"""Positions of the cache that a program reads at a time."""


LATE, EARLY = tl.constexpr(1), tl.constexpr(2)
"""When a kernel lets the next one start, and wait there: as it ends, or as soon as it runs itself. 0 for never."""


@triton.jit
def wait(NEXT: tl.constexpr):
    """Until the kernel before has written everything, where this one may start before that (Hopper and later)."""
    if NEXT > 0:
        tl.extra.cuda.gdc_wait()
    if NEXT == EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def proceed(NEXT: tl.constexpr):
    """All but the end is done."""
    if NEXT == LATE:
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
    next: int = 0,
    counts: Tensor | None = None,
) -> Tensor:
    """Attention of q (B, H, dim) over the first `lengths` + 1 positions of each row; any H / K.

    Keys and values are (pages, PAGE, K, dim), and those of row b lie in the pages `tables[b]`.

    Long caches are read by several programs a head, whose results are then joined: by the last one to end, if there are
    `counts` (B · K or more int32, zeros before and after), or by another kernel. How many is decided by the number of
    rows alone, so that a captured graph serves every length.
    """
    rows, heads, dim = q.shape
    kv = keys.shape[2]
    group = heads // kv
    splits, block, warps, stages = _plan(rows * kv, dim, tables.shape[1] * PAGE)
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    padded = max(16, triton.next_power_of_2(group))
    sizes = (group, padded, dim, max(16, triton.next_power_of_2(dim)))
    launch: dict[str, bool] = {"launch_pdl": True} if next else {}
    parts, tops, sums = out, out, out
    if splits > 1:
        parts = torch.empty((rows, kv, splits, padded, dim), dtype=torch.float32, device=q.device)
        tops, sums = (torch.empty((rows, kv, splits, padded), dtype=torch.float32, device=q.device) for _ in range(2))
    _attend[(rows, kv, splits)](
        q, keys, values, out, parts, tops, sums, out if counts is None else counts, tables, lengths, q.stride(0),
        tables.stride(0), dim**-0.5, window or 0, splits, *sizes, block, PAGE, counts is not None, next,
        num_warps=warps, num_stages=stages, **launch,
    )  # fmt: skip
    if splits > 1 and counts is None:
        _join[(rows, kv)](parts, tops, sums, out, splits, *sizes, next, **launch)
    return out


def _plan(heads: int, dim: int, context: int) -> tuple[int, int, int, int]:
    """Parts of each of so many heads of keys, positions read at a time, warps and stages.

    Many programs hide each other's waits; few have to read far ahead, or to be made more.
    """
    if heads >= 512:
        return 1, 32, 2, 2
    splits = max(1, min(triton.cdiv(context, BLOCK), 400 // heads))
    return splits, BLOCK if dim <= 64 else BLOCK // 2, 4, 2


@triton.jit
def _attend(
    q, keys, values, out, parts, tops, sums, counts, tables, lengths, q_stride, table_stride, scale, window,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, JOINS: tl.constexpr, NEXT: tl.constexpr,
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
    wait(NEXT)
    of_q = (head * GROUP + g[:, None]) * DIM + d[None, :]
    query = tl.load(q + row * q_stride + of_q, mask=(g[:, None] < GROUP) & (d[None, :] < DIM), other=0.0)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, WIDTH], tl.float32)
    table = tables + row * table_stride
    # Pages are looked up a block ahead: Triton takes stages from the keys' and values' own where these wait for a load.
    page = tl.load(table + (first + t) // PAGE, mask=first + t < last, other=0)
    for start in range(first, last, BLOCK):
        p = start + t
        seen = (p >= begin) & (p < last)
        at = ((page.to(tl.int64) * PAGE + p % PAGE) * kv + head)[:, None] * DIM + d[None, :]
        page = tl.load(table + (p + BLOCK) // PAGE, mask=p + BLOCK < last, other=0)
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
    proceed(NEXT)
    if SPLITS == 1:
        _write(out, row * kv + head, mixed, total, GROUP, PADDED, DIM, WIDTH)
    else:
        part = (row * kv + head) * SPLITS + split
        wanted = (g[:, None] < GROUP) & (d[None, :] < DIM)
        tl.store(parts + (part * PADDED + g[:, None]) * DIM + d[None, :], mixed, mask=wanted)
        tl.store(tops + part * PADDED + g, top)
        tl.store(sums + part * PADDED + g, total)
        if JOINS:
            tl.debug_barrier()  # every thread has stored before one says so
            if tl.atomic_add(counts + row * kv + head, 1, sem="acq_rel") == SPLITS - 1:
                tl.store(counts + row * kv + head, 0)
                _joined(parts, tops, sums, out, row * kv + head, SPLITS, GROUP, PADDED, DIM, WIDTH)


@triton.jit
def _write(
    out, head, mixed, total, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The result of a head of keys, for all queries that share it."""
    g, d = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    wanted = (g[:, None] < GROUP) & (d[None, :] < DIM)
    tl.store(out + (head * GROUP + g[:, None]) * DIM + d[None, :], result.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _joined(
    parts, tops, sums, out, head,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    g, d = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, WIDTH], tl.float32)
    wanted = (g[:, None] < GROUP) & (d[None, :] < DIM)
    for split in range(SPLITS):  # past the caches that this program may have filled before
        at = (head * SPLITS + split) * PADDED + g
        other = tl.load(tops + at, cache_modifier=".cg")
        higher = tl.maximum(top, other)
        # A part that read nothing holds −inf and zeros.
        old = tl.where(top > float("-inf"), tl.exp(top - higher), 0.0)
        new = tl.where(other > float("-inf"), tl.exp(other - higher), 0.0)
        total = total * old + tl.load(sums + at, cache_modifier=".cg") * new
        part = tl.load(parts + at[:, None] * DIM + d[None, :], mask=wanted, other=0.0, cache_modifier=".cg")
        mixed = mixed * old[:, None] + part * new[:, None]
        top = higher
    _write(out, head, mixed, total, GROUP, PADDED, DIM, WIDTH)


@triton.jit
def _join(
    parts, tops, sums, out,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    NEXT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    wait(NEXT)
    proceed(NEXT)
    _joined(parts, tops, sums, out, head, SPLITS, GROUP, PADDED, DIM, WIDTH)


CHUNK = 4096
"""Tokens of the vocabulary whose probabilities a sampler adds up first: only the chunk it stops in is read again."""


def sample_and_advance(scores: Tensor, integers: Tensor, temperature: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    """Sample a token (B) of softmax(scores / temperature) in each of the first rows, and advance them in place.

    `integers`, `temperature` and `ends` are of `BatchRows`. By inverse transform, over the vocabulary in order; −inf is
    never sampled. A temperature of 0 takes the most likely token, with its log-probability at temperature 1. Gives the
    tokens, their log-probabilities, and which rows were active.
    """
    (rows, vocab), device = scores.shape, scores.device
    chunks = triton.cdiv(vocab, CHUNK)
    tops, sums = (torch.empty((rows, chunks), dtype=torch.float32, device=device) for _ in range(2))
    best = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    each = max(1, min(chunks, rows * chunks // 1024))
    _chunk_sums[(rows, triton.cdiv(chunks, each))](
        scores, temperature, tops, sums, best, vocab, scores.stride(0), chunks, each, CHUNK, num_warps=8
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, counted = torch.empty_like(tops[:, 0]), torch.empty(rows, dtype=torch.int32, device=device)
    _choose[(rows,)](
        scores, temperature, tops, sums, best, integers, ends, tokens, logprobs, counted, vocab, scores.stride(0),
        integers.stride(0), chunks, triton.next_power_of_2(chunks), CHUNK, ends.shape[1], num_warps=8,
    )  # fmt: skip
    return tokens, logprobs, counted


@triton.jit
def _chunk_sums(
    scores, temperature, tops, sums, best, vocab, stride, chunks, each, CHUNK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    scale = 1.0 / tl.where(heat > 0, heat, 1.0)
    first = tl.program_id(1) * each
    for chunk in range(first, tl.minimum(first + each, chunks)):
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        z = tl.load(scores + row * stride + i, mask=i < vocab, other=-float("inf")) * scale
        high, where = tl.max(z, 0, return_indices=True)
        total = tl.sum(tl.where(z > -float("inf"), tl.exp(z - high), 0.0), 0)
        at = row * chunks + chunk
        tl.store(tops + at, high)
        tl.store(sums + at, total)
        tl.store(best + at, chunk * CHUNK + where)


@triton.jit
def _shifted(x, PLACES: tl.constexpr):
    return (x.to(tl.uint64) >> PLACES).to(tl.int64)


@triton.jit
def _splitmix(x):
    """As `sampler.uniform` has it."""
    x = x - 0x61C8864680B583EB
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


@triton.jit
def _choose(
    scores, temperature, tops, sums, best, integers, ends, tokens, logprobs, counted, vocab, stride, slots, chunks,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    scale = 1.0 / tl.where(heat > 0, heat, 1.0)
    n = tl.arange(0, CHUNKS)
    highs = tl.load(tops + row * chunks + n, mask=n < chunks, other=-float("inf"))
    shares = tl.load(sums + row * chunks + n, mask=n < chunks, other=0.0)
    top, winner = tl.max(highs, 0, return_indices=True)
    shares = tl.where(shares > 0, shares * tl.exp(highs - top), 0.0)
    total = tl.sum(shares, 0)
    token = tl.load(best + row * chunks + winner)
    sampled = tl.load(integers + 4 * slots + row)
    if heat > 0:
        bits = _splitmix(_splitmix(tl.load(integers + 6 * slots + row)) ^ sampled)
        goal = (_shifted(bits, 11).to(tl.float64) * 1.1102230246251565e-16).to(tl.float32) * total
        passed = tl.min(tl.where((tl.cumsum(shares, 0) > goal) & (shares > 0), n, CHUNKS), 0)
        # Where rounding leaves the goal beyond the sum, the last that has any probability is taken.
        chunk = tl.where(passed < CHUNKS, passed, tl.max(tl.where(shares > 0, n, 0), 0))
        below = tl.sum(tl.where(n < chunk, shares, 0.0), 0)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        z = tl.load(scores + row * stride + i, mask=i < vocab, other=-float("inf")) * scale
        p = tl.where(z > -float("inf"), tl.exp(z - top), 0.0)
        first = tl.min(tl.where((below + tl.cumsum(p, 0) > goal) & (p > 0), i, vocab), 0)
        token = tl.where(first < vocab, first, tl.max(tl.where(p > 0, i, 0), 0))
    score = tl.load(scores + row * stride + token) * scale
    tl.store(logprobs + row, score - top - tl.log(total))
    tl.store(tokens + row, token.to(tl.int64))
    active = tl.load(integers + 2 * slots + row)
    tl.store(counted + row, active.to(tl.int32))
    remaining = tl.load(integers + 3 * slots + row) - active
    e = tl.arange(0, ENDS)
    ended = (tl.max((tl.load(ends + row * ENDS + e) == token).to(tl.int32), 0) > 0) | (remaining <= 0)
    if active > 0:
        tl.store(integers + row, token.to(tl.int64))
    tl.store(integers + slots + row, tl.load(integers + slots + row) + active)
    tl.store(integers + 2 * slots + row, tl.where(ended, 0, active))
    tl.store(integers + 3 * slots + row, remaining)
    tl.store(integers + 4 * slots + row, sampled + active)
