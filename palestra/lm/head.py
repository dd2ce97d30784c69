"""The output head: log-probabilities and entropies of tokens without ever holding `[tokens, vocab]`."""

import threading
from typing import Any

import torch
from torch import Tensor

from palestra.lm.layers import TRITON
from palestra.spec.shape import LOGITS as CHUNK_ELEMENTS


def logits(hidden: Tensor, unembed: Tensor, out: Tensor | None = None) -> Tensor:
    """Scores (T, V), at least in FP32, of hidden states (T, D). Trainer and generator both score with this function.

    Products of bf16 accumulate and stay in FP32: rounded to bf16, scores around 25 would be 0.125 apart. They go into
    `out` where it is given.
    """
    return _product(hidden, unembed.to(_kept(hidden)).t(), out)


def token_logprobs(
    hidden: Tensor, unembed: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p (both (T), FP32), p = softmax(logits / temperature), in chunks of tokens.

    The backward pass computes each chunk's logits again. Without `entropy` the second result is zeros.
    """
    return _TokenLogprobs.apply(hidden, unembed, targets, temperature, entropy)


def weighted_logprob(hidden: Tensor, unembed: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · log p(target), in FP32; the weights (T) have no gradient.

    What the backward pass needs is known here already: each chunk's logits are computed once, not twice.
    """
    if torch.is_grad_enabled():
        return _WeightedLogprob.apply(hidden, unembed, targets, weights)
    return (token_logprobs(hidden, unembed, targets, entropy=False)[0] * weights).sum()


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Tokens whose logits are computed together: four times as many on a GPU, to fill it."""
    return max(1, CHUNK_ELEMENTS * (4 if device.type == "cuda" else 1) // vocab)


def _kept(hidden: Tensor) -> torch.dtype:
    """The precision in which matrices are kept for products with hidden states."""
    return hidden.dtype if hidden.is_cuda else _sums(hidden)


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a · b in FP32 (or FP64), where bf16 numbers are multiplied by the units for bf16."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    if a.dtype != torch.bfloat16:
        return torch.mm(a.to(_sums(a)), b.to(_sums(a)), out=out)
    with _ROUNDING:
        return torch.mm(a.float(), b.float(), out=out)


class _Rounding:
    """While entered, the CPU's library takes FP32 in and out and rounds what it multiplies to bf16.

    The switch is the process's: threads that score together share it, and the last one out turns it back. Whatever
    else multiplies in FP32 in that moment is rounded too; one thread owns torch, so nothing does.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, ""
        self._matmul: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 (the type stubs do not know it)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before, self._matmul.fp32_precision = self._matmul.fp32_precision, "bf16"
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._matmul.fp32_precision = self._before


_ROUNDING = _Rounding()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, unembed: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=_sums(hidden), device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        normalizers = torch.empty_like(logprobs)  # of z, used on the GPU alone
        weight, rows = unembed.to(_kept(hidden)), chunk_rows(len(unembed), hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            scores = logits(hidden[part], weight)
            if hidden.is_cuda and TRITON:
                from palestra.lm.kernels import softmax_rows

                logprobs[part], normalizers[part], entropies[part] = softmax_rows(scores, targets[part], temperature)
                continue
            log_p = _log_softmax(scores, temperature)
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            if entropy:
                entropies[part] = log_p.exp().mul_(log_p).sum(-1).neg_()
        ctx.save_for_backward(hidden, unembed, targets, entropies, normalizers)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, unembed, targets, entropies, normalizers = ctx.saved_tensors
        of_logprob, of_entropy = grads  # none where a result was not used
        of_logprob = torch.zeros_like(entropies) if of_logprob is None else of_logprob
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_unembed = torch.zeros_like(unembed, dtype=_sums(hidden)) if ctx.needs_input_grad[1] else None
        weight, rows = unembed.to(_kept(hidden)), chunk_rows(len(unembed), hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            scores = logits(hidden[part], weight)
            of_h = None if of_entropy is None else of_entropy[part]
            if hidden.is_cuda and TRITON:
                from palestra.lm.kernels import softmax_rows_backward

                saved = (targets[part], normalizers[part], entropies[part])
                to_logits = softmax_rows_backward(scores, saved, of_logprob[part], of_h, ctx.temperature, hidden.dtype)
            else:
                to_logits = _to_logits(scores, targets[part], entropies[part], of_logprob[part], of_h, ctx.temperature)
                to_logits = to_logits.to(hidden.dtype)
            _add_gradients(to_logits, hidden[part], weight, None if to_hidden is None else to_hidden[part], to_unembed)
        grad = None if to_unembed is None else to_unembed.to(unembed.dtype)
        return to_hidden, grad, None, None, None


class _WeightedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, unembed: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_unembed = torch.zeros_like(unembed, dtype=_sums(hidden)) if wanted[1] else None
        logprobs = torch.empty(len(hidden), dtype=_sums(hidden), device=hidden.device)
        weight, rows = unembed.to(_kept(hidden)), chunk_rows(len(unembed), hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            scores, asked, by = logits(hidden[part], weight), targets[part], weights[part].to(logprobs.dtype)
            if hidden.is_cuda and TRITON:
                from palestra.lm.kernels import logprobs_and_gradient

                logprobs[part], to_logits = logprobs_and_gradient(scores, asked, by, hidden.dtype)
            else:
                log_p = scores.log_softmax(-1)
                logprobs[part] = log_p.gather(1, asked[:, None])[:, 0]
                to_logits = log_p.exp_().mul_(-by[:, None]).scatter_add_(1, asked[:, None], by[:, None])
                to_logits = to_logits.to(hidden.dtype)
            _add_gradients(to_logits, hidden[part], weight, None if to_hidden is None else to_hidden[part], to_unembed)
        ctx.save_for_backward(to_hidden, None if to_unembed is None else to_unembed.to(unembed.dtype))
        return (logprobs * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        to_hidden, to_unembed = (None if saved is None else saved * grads[0] for saved in ctx.saved_tensors)
        return to_hidden, to_unembed, None, None


def _add_gradients(
    to_logits: Tensor, hidden: Tensor, weight: Tensor, to_hidden: Tensor | None, to_unembed: Tensor | None
) -> None:
    """Of a chunk's logits to its hidden states and to the matrix, where these are wanted."""
    if to_hidden is not None:
        to_hidden.copy_(_product(to_logits, weight))
    if to_unembed is not None:  # the sum over chunks stays in FP32
        if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
            torch.addmm(to_unembed, to_logits.t(), hidden, out_dtype=torch.float32, out=to_unembed)
        else:
            to_unembed += _product(to_logits.t(), hidden)


def _log_softmax(scores: Tensor, temperature: float) -> Tensor:
    """(rows, V). Torch's takes the largest logit off first: log Z of all would round at the size of the logits."""
    return scores.div_(temperature).log_softmax(-1)


def _to_logits(
    scores: Tensor,
    targets: Tensor,
    entropies: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient (rows, V) of log-probabilities and entropies: ∂ log p(y)/∂z = 1[y] − p, ∂H/∂z = −p (log p + H)."""
    log_p = _log_softmax(scores, temperature)
    factor = -of_logprob[:, None]
    if of_entropy is not None:
        factor = factor - of_entropy[:, None] * (log_p + entropies[:, None])
    grad = log_p.exp_().mul_(factor)
    return grad.scatter_add_(1, targets[:, None], of_logprob[:, None]).div_(temperature)


def _sums(hidden: Tensor) -> torch.dtype:
    """The precision of sums over the vocabulary and over chunks: FP32 but for FP64."""
    return torch.promote_types(hidden.dtype, torch.float32)
