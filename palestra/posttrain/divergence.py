"""Divergences of a teacher and a student at every token, without ever holding `[tokens, vocab]`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.lm.head import chunk_rows, logits
from palestra.rl import divergence
from palestra.spec.kinds.distill import DivergenceSpec, ForwardKlSpec, ReverseKlSpec

Of = Callable[[Tensor, Tensor], Tensor]
"""Of log-probabilities (T, V) of the student and of the teacher."""


class Measure(NamedTuple):
    """A divergence (T) and its slope (T, V) in the student's logits."""

    value: Of
    slope: Of


def measure_of(spec: DivergenceSpec) -> Measure:
    """The divergence that a spec names."""
    if isinstance(spec, ForwardKlSpec):
        return Measure(divergence.forward_kl, divergence.forward_kl_slope)
    if isinstance(spec, ReverseKlSpec):
        return Measure(divergence.reverse_kl, divergence.reverse_kl_slope)
    beta = spec.beta
    return Measure(
        lambda student, teacher: divergence.jensen_shannon(student, teacher, beta),
        lambda student, teacher: divergence.jensen_shannon_slope(student, teacher, beta),
    )


def token_divergences(
    student: Tensor,
    student_unembed: Tensor,
    teacher: Tensor,
    teacher_unembed: Tensor,
    measure: Measure,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Divergences with a gradient and the student's entropies without one, both (T) in FP32, in chunks of tokens.

    Given are hidden states (T, D) and unembeddings (V, D), each model with a width of its own. Both distributions are
    softmax(logits / temperature) over the tokens that both models have rows for. The backward pass computes each
    chunk's logits again, and sends nothing to the teacher.
    """
    common = min(len(student_unembed), len(teacher_unembed))
    return _TokenDivergences.apply(
        student, student_unembed[:common], teacher.detach(), teacher_unembed[:common].detach(), measure, temperature
    )


class _TokenDivergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, unembed: Tensor, taught: Tensor, teacher: Tensor, measure: Measure, temperature: float
    ) -> tuple[Tensor, Tensor]:
        values = torch.empty(len(hidden), dtype=_sums(hidden), device=hidden.device)
        entropies = torch.empty_like(values)
        own, theirs = _kept(unembed, hidden), _kept(teacher, taught)
        for part in _parts(hidden, unembed):
            log_p = _log_softmax(hidden[part], own, temperature)
            log_q = _log_softmax(taught[part], theirs, temperature)
            values[part] = measure.value(log_p, log_q)
            entropies[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, unembed, taught, teacher)
        ctx.measure, ctx.temperature = measure, temperature
        ctx.mark_non_differentiable(entropies)
        return values, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, unembed, taught, teacher = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_unembed = torch.zeros_like(unembed, dtype=_sums(hidden)) if ctx.needs_input_grad[1] else None
        own, theirs = _kept(unembed, hidden), _kept(teacher, taught)
        for part in _parts(hidden, unembed):
            log_p = _log_softmax(hidden[part], own, ctx.temperature)
            log_q = _log_softmax(taught[part], theirs, ctx.temperature)
            slope = ctx.measure.slope(log_p, log_q) * (grads[0][part, None] / ctx.temperature)
            slope = slope.to(hidden.dtype)
            # `logits` is a product with the second matrix turned, in the precision that scores have.
            if to_hidden is not None:
                to_hidden[part] = logits(slope, own.t())
            if to_unembed is not None:
                to_unembed += logits(slope.t(), hidden[part].t())  # the sum over chunks stays in FP32
        grad = None if to_unembed is None else to_unembed.to(unembed.dtype)
        return to_hidden, grad, None, None, None, None


def _parts(hidden: Tensor, unembed: Tensor) -> list[slice]:
    """Tokens whose logits, of both models, exist at one time."""
    rows = max(1, chunk_rows(len(unembed), hidden.device) // 2)
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def _kept(unembed: Tensor, hidden: Tensor) -> Tensor:
    """The matrix in the precision that a GPU multiplies in, made once for all chunks."""
    return unembed.to(hidden.dtype) if hidden.is_cuda else unembed


def _log_softmax(hidden: Tensor, unembed: Tensor, temperature: float) -> Tensor:
    return (logits(hidden, unembed) / temperature).log_softmax(-1)


def _sums(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)
