"""The output head: log-probabilities and entropies of tokens without ever holding `[tokens, vocab]`."""

from typing import Any

import torch
from torch import Tensor

from palestra.lm.ops import wide

CHUNK_ELEMENTS = 2**26
"""Logits that exist at one time (256 MB in FP32)."""


def logits(hidden: Tensor, unembed: Tensor) -> Tensor:
    """Scores (T, V), at least in FP32, of hidden states (T, D). Trainer and generator both score with this function.

    On the GPU the product of bf16 accumulates and stays in FP32; on the CPU it is rounded to bf16 first.
    """
    weight = unembed.to(hidden.dtype)
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return wide(torch.mm(hidden, weight.t()))


def token_logprobs(
    hidden: Tensor, unembed: Tensor, targets: Tensor, temperature: float = 1.0, *, entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p (both (T), FP32), p = softmax(logits / temperature), in chunks of tokens.

    The backward pass computes each chunk's logits again. Without `entropy` the second result is zeros.
    """
    return _TokenLogprobs.apply(hidden, unembed, targets, temperature, entropy)


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Tokens whose logits are computed together: four times as many on a GPU, to fill it."""
    return max(1, CHUNK_ELEMENTS * (4 if device.type == "cuda" else 1) // vocab)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, unembed: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=_sums(hidden), device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        normalisers = torch.empty_like(logprobs)  # of z, used on the GPU alone
        weight, rows = unembed.to(hidden.dtype), chunk_rows(len(unembed), hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            scores = logits(hidden[part], weight)
            if hidden.is_cuda:
                from palestra.lm.kernels import softmax_rows

                logprobs[part], normalisers[part], entropies[part] = softmax_rows(scores, targets[part], temperature)
                continue
            log_p = _log_softmax(scores, temperature)
            logprobs[part] = log_p.gather(1, targets[part, None])[:, 0]
            if entropy:
                entropies[part] = log_p.exp().mul_(log_p).sum(-1).neg_()
        ctx.save_for_backward(hidden, unembed, targets, entropies, normalisers)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, unembed, targets, entropies, normalisers = ctx.saved_tensors
        of_logprob, of_entropy = grads  # none where a result was not used
        of_logprob = torch.zeros_like(entropies) if of_logprob is None else of_logprob
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_unembed = torch.zeros_like(unembed, dtype=_sums(hidden)) if ctx.needs_input_grad[1] else None
        weight, rows = unembed.to(hidden.dtype), chunk_rows(len(unembed), hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            scores = logits(hidden[part], weight)
            of_h = None if of_entropy is None else of_entropy[part]
            if hidden.is_cuda:
                from palestra.lm.kernels import softmax_rows_backward

                saved = (targets[part], normalisers[part], entropies[part])
                to_logits = softmax_rows_backward(scores, *saved, of_logprob[part], of_h, ctx.temperature, hidden.dtype)
            else:
                to_logits = _to_logits(scores, targets[part], entropies[part], of_logprob[part], of_h, ctx.temperature)
                to_logits = to_logits.to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[part] = to_logits @ weight
            if to_unembed is not None:
                _add_product(to_unembed, to_logits, hidden[part])
        grad = None if to_unembed is None else to_unembed.to(unembed.dtype)
        return to_hidden, grad, None, None, None


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
    found = log_p.exp_().mul_(factor)
    return found.scatter_add_(1, targets[:, None], of_logprob[:, None]).div_(temperature)


def _sums(hidden: Tensor) -> torch.dtype:
    """The precision of sums over the vocabulary and over chunks: FP32 but for FP64."""
    return torch.promote_types(hidden.dtype, torch.float32)


def _add_product(total: Tensor, to_logits: Tensor, hidden: Tensor) -> None:
    """`total` (V, D, FP32) += to_logitsᵀ · hidden; the sum over chunks stays in FP32."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        total.add_(torch.mm(to_logits.t(), hidden, out_dtype=torch.float32))
    else:
        total.add_(torch.mm(to_logits.t(), hidden))
