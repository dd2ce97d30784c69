"""PPO's policy and value losses, element by element, and the two ways to add elements up.

Control takes masked means; language models take masked sums and divide once by the global denominator. Both compose
the same per-element terms. Everything traces as one graph; clip ranges may be 0-dim tensors, so that a schedule
changes them without compiling again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from palestra.rl import kl

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within ±20: exp overflows at 88, and inf times a clipped branch's zero gradient is NaN."""


def masked_sum(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of the elements where `mask` is True; what stands elsewhere does not matter, not even NaN."""
    return x.sum() if mask is None else torch.where(mask, x, 0.0).sum()


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of the elements where `mask` is True; 0 where there are none."""
    if mask is None:
        return x.mean()
    return masked_sum(x, mask) / mask.sum().clamp_min(1)


class PolicyTerms(NamedTuple):
    """Per-element terms of the clipped policy loss; all but `loss` are detached."""

    loss: Tensor
    ratio: Tensor
    approx_kl: Tensor
    clipped: Tensor


class PolicyLoss(NamedTuple):
    """Masked means of the clipped policy loss; all but `loss` are detached."""

    loss: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor
    ratio_mean: Tensor


def ppo_policy_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    mask: Tensor | None = None,
) -> PolicyTerms:
    """The clipped surrogate -min(r·A, clip(r, 1 - low, 1 + high)·A) (Schulman et al. 2017, eq. 7), per element.

    r = π_new / π_old. `approx_kl` is k3 of KL(old‖new), `clipped` says where r lies outside the clip range (on either
    side, whatever the advantage's sign). Where `mask` is False the ratio is 1, the other terms and the gradient are 0.
    """
    if mask is not None:
        logprobs, old_logprobs, advantages = (torch.where(mask, x, 0.0) for x in (logprobs, old_logprobs, advantages))
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    # pyrefly: ignore[no-matching-overload]  # both bounds are floats, or both are tensors
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    approx_kl = kl.k3(old_logprobs, logprobs.detach(), clamp=LOG_RATIO_LIMIT)
    ratio = ratio.detach()
    return PolicyTerms(loss, ratio, approx_kl, (ratio < low) | (ratio > high))


def ppo_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | Tensor,
    clip_high: float | Tensor,
    mask: Tensor | None = None,
) -> PolicyLoss:
    """The mean of `ppo_policy_terms` over the elements where `mask` is True."""
    terms = ppo_policy_terms(logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, mask=mask)
    return PolicyLoss(
        loss=masked_mean(terms.loss, mask),
        approx_kl=masked_mean(terms.approx_kl, mask),
        clip_fraction=masked_mean(terms.clipped.to(terms.loss.dtype), mask),
        ratio_mean=masked_mean(terms.ratio, mask),
    )


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float | Tensor | None = None
) -> Tensor:
    """(V - return)² per element, without the ½ that some codes have: a coefficient means what Stable-Baselines3's does.

    With `clip`, the larger of that and the loss of `old_values + clip(V - old_values, ±clip)`, as in PPO's first code.
    """
    squared = (values - returns).square()
    if clip is not None:
        if old_values is None:
            raise ValueError("a clipped value loss needs the old values")
        # pyrefly: ignore[no-matching-overload]  # both bounds are floats, or both are tensors
        moved = old_values + (values - old_values).clamp(-clip, clip)
        squared = torch.maximum(squared, (moved - returns).square())
    return squared
