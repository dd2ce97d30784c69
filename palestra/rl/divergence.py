"""Divergences between the whole distributions of a teacher and a student, and their slopes in the student's logits.

Both are given as log-probabilities (..., K) that are normalised over the same K; p is the student's, q the teacher's.
Generalised knowledge distillation (Agarwal et al. 2024, arXiv 2306.13649) takes one of three:

| divergence | formula                                            | what the student does                     |
|------------|----------------------------------------------------|-------------------------------------------|
| forward KL | KL(q‖p) = Σ q (log q - log p)                      | covers all that the teacher may say       |
| reverse KL | KL(p‖q) = Σ p (log p - log q)                      | says only what the teacher may say        |
| JSD(β)     | β KL(q‖m) + (1-β) KL(p‖m), with m = β q + (1-β) p  | between them, and never above log 2       |

JSD(β) / β becomes the forward KL as β goes to 0, and JSD(β) / (1-β) the reverse KL as β goes to 1. A probability of 0
adds nothing, whatever its logarithm. The mixture is added up in logarithms: probabilities that round to 0 have none.
"""

import math

import torch
from torch import Tensor


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(q‖p) (...), in nats."""
    return _expected(teacher, teacher, student)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p‖q) (...), in nats; infinite where the student may say what the teacher never does."""
    return _expected(student, student, teacher)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """JSD(β) (...), in nats, 0 < β < 1."""
    mixture = log_mixture(student, teacher, beta)
    return beta * _expected(teacher, teacher, mixture) + (1 - beta) * _expected(student, student, mixture)


def forward_kl_slope(student: Tensor, teacher: Tensor) -> Tensor:
    """∂ KL(q‖p) / ∂z = p - q (..., K), z being the logits of p."""
    return student.exp() - teacher.exp()


def reverse_kl_slope(student: Tensor, teacher: Tensor) -> Tensor:
    """∂ KL(p‖q) / ∂z = p (log p - log q - KL(p‖q))."""
    return _centred(student, teacher)


def jensen_shannon_slope(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """∂ JSD(β) / ∂z = (1-β) p (log p - log m - KL(p‖m)): what m changes by cancels."""
    return (1 - beta) * _centred(student, log_mixture(student, teacher, beta))


def log_mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log m (..., K) of m = β q + (1-β) p."""
    if not 0 < beta < 1:
        raise ValueError(f"expected a β between 0 and 1, where the mixture has both in it; got {beta}")
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


def _expected(weights: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """Σ exp(weights) (above - below)."""
    return _terms(weights.exp(), above, below).sum(-1)


def _centred(student: Tensor, other: Tensor) -> Tensor:
    """p (log p - log o - KL(p‖o)): a function of p's logits, so its slopes add up to 0."""
    p = student.exp()
    terms = _terms(p, student, other)
    return terms - p * terms.sum(-1, keepdim=True)


def _terms(probabilities: Tensor, above: Tensor, below: Tensor) -> Tensor:
    # 0 · (-inf - -inf) would be no number.
    return torch.where(probabilities > 0, probabilities * (above - below), 0.0)
