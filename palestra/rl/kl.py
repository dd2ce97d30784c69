"""KL(p‖q): the estimators k1, k2, k3 from samples of p (Schulman 2020, "Approximating KL divergence"), and exactly.

The action must have been sampled from p. As values, with x = log q(a) - log p(a):

| estimator | formula        | expectation under p | range | expected gradient in p's parameters, a held fixed |
|-----------|----------------|---------------------|-------|---------------------------------------------------|
| k1        | -x             | KL(p‖q)             | ℝ     | 0: a loss of k1 teaches nothing                   |
| k2        | x² / 2         | biased, O(x³)       | ≥ 0   | ∇KL(p‖q)                                          |
| k3        | exp(x) - 1 - x | KL(p‖q)             | ≥ 0   | ∇KL(q‖p), the other direction                     |

So use k1 or k3 as a number (in the reward, in a log) and k2 as a loss, unless k3's forward-KL pull is what is wanted.
`clamp` limits x to ±clamp (20 is common for language models), outside of which the gradient is 0; with None the
formula holds as it stands, and k3 is infinite in float32 above x = 88.
"""

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


def categorical_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """Exact KL between categoricals given by logits `(..., K)`, `(...)`."""
    logprobs_p, logprobs_q = torch.log_softmax(logits_p, dim=-1), torch.log_softmax(logits_q, dim=-1)
    return (logprobs_p.exp() * (logprobs_p - logprobs_q)).sum(dim=-1)
