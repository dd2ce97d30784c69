"""KL(p‖q): the estimators k1, k2, k3 from samples of p (Schulman 2020), exact ones, and distillation's divergences.

The action must have been sampled from p. As values, with x = log q(a) - log p(a):

| estimator | formula        | expectation under p | range | expected gradient in p's parameters, a held fixed |
|-----------|----------------|---------------------|-------|---------------------------------------------------|
| k1        | -x             | KL(p‖q)             | ℝ     | 0: k1 is useless as a loss                        |
| k2        | x² / 2         | biased, O(x³)       | ≥ 0   | ∇KL(p‖q)                                          |
| k3        | exp(x) - 1 - x | KL(p‖q)             | ≥ 0   | ∇KL(q‖p), the other direction                     |

So use k1 or k3 as a number (in the reward, in a log) and k2 as a loss, unless k3's forward-KL pull is what is wanted.
`clamp` limits x to ±clamp (20 is common for language models), outside of which the gradient is 0; with None the
formula holds as it stands, and k3 is infinite in float32 above x = 88.

Both are given as log-probabilities (..., K) that are normalized over the same K; p is the student's, q the teacher's.
Generalized knowledge distillation (Agarwal et al. 2024, arXiv 2306.13649) takes one of three:

| divergence | formula                                            | what the student learns                   |
|------------|----------------------------------------------------|-------------------------------------------|
| forward KL | KL(q‖p) = Σ q (log q - log p)                      | covers all modes of the teacher           |
| reverse KL | KL(p‖q) = Σ p (log p - log q)                      | stays within the teacher's modes          |
| JSD(β)     | β KL(q‖m) + (1-β) KL(p‖m), with m = β q + (1-β) p  | between the two; never above log 2        |

JSD(β) / β becomes the forward KL as β goes to 0, and JSD(β) / (1-β) the reverse KL as β goes to 1. A probability of 0
adds nothing, whatever its logarithm. The mixture is computed in log space, where small probabilities do not round to 0.
"""

import math

import torch
from torch import Tensor


def _log_ratio(logprobs_p: Tensor, logprobs_q: Tensor, clamp: float | None) -> Tensor:
    x = logprobs_q - logprobs_p
    return x if clamp is None else x.clamp(-clamp, clamp)


def k1(logprobs_p: Tensor, logprobs_q: Tensor, *, clamp: float | None = None) -> Tensor:
    """Unbiased, high variance, of either sign."""
    return -_log_ratio(logprobs_p, logprobs_q, clamp)


def k2(logprobs_p: Tensor, logprobs_q: Tensor, *, clamp: float | None = None) -> Tensor:
    """Biased, low variance, never negative; its gradient is the right one for a loss."""
    return 0.5 * _log_ratio(logprobs_p, logprobs_q, clamp).square()


def k3(logprobs_p: Tensor, logprobs_q: Tensor, *, clamp: float | None = None) -> Tensor:
    """Unbiased, low variance, never negative."""
    x = _log_ratio(logprobs_p, logprobs_q, clamp)
    # expm1 keeps the digits that exp(x) - 1 loses near x = 0, where that would also fall below 0.
    return torch.expm1(x) - x


def binary_kl(logprobs_p: Tensor, logprobs_q: Tensor) -> Tensor:
    """KL between Bernoulli variables, "this token or another", given by its log-probabilities: a lower bound of the KL.

    Probabilities are held within [1e-6, 1 - 1e-6], so that a certain token gives a number.
    """
    p, q = (logprobs.double().exp().clamp(1e-6, 1 - 1e-6) for logprobs in (logprobs_p, logprobs_q))
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(q‖p) (...), in nats."""
    return _terms(teacher.exp(), teacher, student).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p‖q) (...), in nats; infinite where the student allows what the teacher gives probability 0."""
    return _terms(student.exp(), student, teacher).sum(-1)


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """JSD(β) (...), in nats, 0 < β < 1."""
    mixture = log_mixture(student, teacher, beta)
    return beta * forward_kl(mixture, teacher) + (1 - beta) * reverse_kl(student, mixture)


def forward_kl_slope(student: Tensor, teacher: Tensor) -> Tensor:
    """∂ KL(q‖p) / ∂z = p - q (..., K), z being the logits of p."""
    return student.exp() - teacher.exp()


def reverse_kl_slope(student: Tensor, teacher: Tensor) -> Tensor:
    """∂ KL(p‖q) / ∂z = p (log p - log q - KL(p‖q)), which add up to 0."""
    p = student.exp()
    terms = _terms(p, student, teacher)
    return terms - p * terms.sum(-1, keepdim=True)


def jensen_shannon_slope(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """∂ JSD(β) / ∂z = (1-β) p (log p - log m - KL(p‖m)): what m changes by cancels."""
    return (1 - beta) * reverse_kl_slope(student, log_mixture(student, teacher, beta))


def log_mixture(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """log m (..., K) of m = β q + (1-β) p."""
    if not 0 < beta < 1:
        raise ValueError(f"expected a β between 0 and 1, where the mixture has both in it; got {beta}")
    return torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))


def _terms(probabilities: Tensor, above: Tensor, below: Tensor) -> Tensor:
    # 0 · (-inf - -inf) would be NaN.
    return torch.where(probabilities > 0, probabilities * (above - below), 0.0)
