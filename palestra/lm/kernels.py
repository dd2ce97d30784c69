"""Triton kernels for the GPU: one launch, or one pass over the logits, where there would be many."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` (T, heads, dim), its last two dimensions contiguous, by `cos` and `sin` (T, dim / 2)."""
    rows, heads, dim = x.shape
    out = torch.empty((rows, heads, dim), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(heads * dim // 2)
    _rotate[(rows,)](x, cos, sin, out, x.stride(0), heads * dim // 2, dim // 2, block)
    return out


@triton.jit
def _rotate(x, cos, sin, out, x_stride, pairs, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < pairs
    head, place = i // half, i % half
    c = tl.load(cos + row * half + place, mask=inside, other=0.0)
    s = tl.load(sin + row * half + place, mask=inside, other=0.0)
    at = head * half * 2 + place
    first = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + at + half, mask=inside, other=0.0).to(tl.float32)
    base = out + row * pairs * 2 + at
    tl.store(base, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(base + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) · up of the two halves of (T, 2F)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = _block(width)
    _swiglu[(rows, triton.cdiv(width, block))](gate_up, out, width, block)
    return out


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=inside, other=0.0)
    # SiLU is rounded before the product, as it is where PyTorch computes the two one after the other.
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty)
    tl.store(out + row * width + i, silu * up, mask=inside)


class SwiGLU(torch.autograd.Function):
    """`swiglu` with a gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        out, (rows, width) = torch.empty_like(gate_up), grads[0].shape
        block = _block(width)
        grid = (rows, triton.cdiv(width, block))
        _swiglu_backward[grid](grads[0].contiguous(), gate_up, out, width, block)
        return out


@triton.jit
def _swiglu_backward(grad, gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    at = row * 2 * width + i
    g = tl.load(grad + row * width + i, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(out + at, (g * up * (sigmoid + silu * (1.0 - sigmoid))).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + width, (g * silu).to(out.dtype.element_ty), mask=inside)


def _block(width: int) -> int:
    """Elements of a row that a program takes: a power of two that divides it, where a large one does."""
    fits = width & -width
    return min(1024, fits if fits >= 256 else triton.next_power_of_2(width))


class Turned(torch.autograd.Function):
    """Queries and keys, rotated, and values of (T, H + 2K, dim), each contiguous; and back, in one pass each."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        rows, both, dim = qkv.shape
        kv = (both - heads) // 2
        ctx.save_for_backward(cos, sin)
        q, k, v = (torch.empty((rows, n, dim), dtype=qkv.dtype, device=qkv.device) for n in (heads, kv, kv))
        _turn[(rows,)](qkv, q, k, v, cos, sin, heads, kv, dim // 2, triton.next_power_of_2(both * dim // 2), False)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (cos, sin), (q, k, v) = ctx.saved_tensors, (grad.contiguous() for grad in grads)
        (rows, heads, dim), kv = q.shape, k.shape[1]
        out = torch.empty((rows, heads + 2 * kv, dim), dtype=q.dtype, device=q.device)
        block = triton.next_power_of_2((heads + 2 * kv) * dim // 2)
        _turn[(rows,)](out, q, k, v, cos, sin, heads, kv, dim // 2, block, True)
        return out, None, None, None


@triton.jit
def _turn(qkv, q, k, v, cos, sin, heads, kv, half, BLOCK: tl.constexpr, BACK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    head, place = i // half, i % half
    is_q, is_k = head < heads, (head >= heads) & (head < heads + kv)
    is_v = (head >= heads + kv) & (head < heads + 2 * kv)
    c = tl.load(cos + row * half + place, mask=is_q | is_k, other=1.0)
    s = tl.load(sin + row * half + place, mask=is_q | is_k, other=0.0)
    both = qkv + row * (heads + 2 * kv) * 2 * half + head * 2 * half + place
    to_q = q + row * heads * 2 * half + head * 2 * half + place
    to_k = k + (row * kv - heads) * 2 * half + head * 2 * half + place
    to_v = v + (row * kv - heads - kv) * 2 * half + head * 2 * half + place
    if BACK:
        first, second = tl.load(to_q, mask=is_q, other=0.0), tl.load(to_q + half, mask=is_q, other=0.0)
        first += tl.load(to_k, mask=is_k, other=0.0) + tl.load(to_v, mask=is_v, other=0.0)
        second += tl.load(to_k + half, mask=is_k, other=0.0) + tl.load(to_v + half, mask=is_v, other=0.0)
        first, second, s = first.to(tl.float32), second.to(tl.float32), -s
    else:
        first = tl.load(both, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
        second = tl.load(both + half, mask=is_q | is_k | is_v, other=0.0).to(tl.float32)
    one = (first * c - second * s).to(qkv.dtype.element_ty)
    other = (second * c + first * s).to(qkv.dtype.element_ty)
    if BACK:
        tl.store(both, one, mask=is_q | is_k | is_v)
        tl.store(both + half, other, mask=is_q | is_k | is_v)
    else:
        tl.store(to_q, one, mask=is_q)
        tl.store(to_q + half, other, mask=is_q)
        tl.store(to_k, one, mask=is_k)
        tl.store(to_k + half, other, mask=is_k)
        tl.store(to_v, one, mask=is_v)
        tl.store(to_v + half, other, mask=is_v)


def softmax_rows(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row z = logits / temperature: log p(target), log Σ exp z, and the entropy, in one pass."""
    rows, vocab = logits.shape
    logprobs, normalizers, entropies = out = tuple(torch.empty(rows, device=logits.device) for _ in range(3))
    _softmax_rows[(rows,)](logits, targets, *out, vocab, 1.0 / temperature, 4096, num_warps=8)
    return logprobs, normalizers, entropies


@triton.jit
def _softmax_rows(logits, targets, logprobs, normalizers, entropies, vocab, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], -1e30, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    firsts = tl.zeros([BLOCK], tl.float32)  # Σ exp(z − top) · z
    for start in range(0, vocab, BLOCK):
        z = tl.load(logits + row * vocab + start + i, mask=start + i < vocab, other=-1e30) * scale
        higher = tl.maximum(tops, z)
        shrink, weight = tl.exp(tops - higher), tl.exp(z - higher)
        weight = tl.where(start + i < vocab, weight, 0.0)
        totals = totals * shrink + weight
        firsts = firsts * shrink + weight * z
        tops = higher
    top = tl.max(tops, 0)
    shrink = tl.exp(tops - top)
    total = tl.sum(totals * shrink, 0)
    normalizer = top + tl.log(total)
    target = tl.load(logits + row * vocab + tl.load(targets + row)) * scale
    tl.store(logprobs + row, target - top - tl.log(total))
    tl.store(normalizers + row, normalizer)
    tl.store(entropies + row, normalizer - tl.sum(firsts * shrink, 0) / total)


def softmax_rows_backward(
    logits: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient (rows, V) of `softmax_rows` by the logits, in `dtype`; `saved` are targets, log Σ exp, entropies."""
    rows, vocab = logits.shape
    of_entropy = torch.zeros_like(of_logprob) if of_entropy is None else of_entropy.contiguous()
    out = torch.empty((rows, vocab), dtype=dtype, device=logits.device)
    grads, grid = (of_logprob.contiguous(), of_entropy), (rows, triton.cdiv(vocab, 4096))
    _softmax_rows_backward[grid](logits, *saved, *grads, out, vocab, 1.0 / temperature, 4096, num_warps=8)
    return out


@triton.jit
def _softmax_rows_backward(
    logits, targets, normalizers, entropies, of_logprob, of_entropy, out, vocab, scale, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocab
    log_p = tl.load(logits + row * vocab + i, mask=inside, other=0.0) * scale - tl.load(normalizers + row)
    # ∂ log p(y) / ∂ z = 1[y] − p,   ∂ H / ∂ z = −p (log p + H)
    to_logprob, to_entropy = tl.load(of_logprob + row), tl.load(of_entropy + row)
    grad = -tl.exp(log_p) * (to_logprob + to_entropy * (log_p + tl.load(entropies + row)))
    grad += tl.where(i == tl.load(targets + row), to_logprob, 0.0)
    tl.store(out + row * vocab + i, (grad * scale).to(out.dtype.element_ty), mask=inside)


def logprobs_and_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """log p(target) of each row, and the gradient (rows, V) of Σ weights · log p in `dtype`, in one kernel."""
    rows, vocab = logits.shape
    logprobs, out = torch.empty(rows, device=logits.device), torch.empty_like(logits, dtype=dtype)
    # Of those tried on an H200 the fastest: rows are read again while most of them lie in the L2 cache.
    _logprobs_and_gradient[(rows,)](logits, targets, weights, logprobs, out, vocab, 8192, num_warps=16)
    return logprobs, out


@triton.jit
def _logprobs_and_gradient(logits, targets, weights, logprobs, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], -1e30, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z = tl.load(logits + row * vocab + start + i, mask=start + i < vocab, other=-float("inf"))
        higher = tl.maximum(tops, z)
        totals = totals * tl.exp(tops - higher) + tl.exp(z - higher)
        tops = higher
    top = tl.max(tops, 0)
    log_total = tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    target, weight = tl.load(targets + row), tl.load(weights + row)
    tl.store(logprobs + row, tl.load(logits + row * vocab + target) - top - log_total)
    blocks = (vocab + BLOCK - 1) // BLOCK
    for block in range(blocks):  # the last first: it was read last
        at = (blocks - 1 - block) * BLOCK + i
        z = tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0)
        grad = tl.where(at == target, weight, 0.0) - weight * tl.exp(z - top - log_total)
        tl.store(out + row * vocab + at, grad.to(out.dtype.element_ty), mask=at < vocab)
