"""What holds a policy near the one that acted, element by element: clips, masks and gates of the ratio between them.

`ratio` is π / anchor with a gradient, A the advantage. Where a policy gradient has -A·log π, each of these has a loss
with the same gradient at ratio 1 and less of it, or none, further away.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TrustTerms(NamedTuple):
    """Per-element terms; all but `loss` are detached."""

    loss: Tensor
    low: Tensor
    """True where the lower bound holds: a ratio far below 1 that is pushed down, or a weight that was raised."""
    high: Tensor
    """True where the upper bound holds: a ratio far above 1 that is pushed up, or a weight that was lowered."""


def unlimited(ratio: Tensor, advantages: Tensor) -> TrustTerms:
    """-r·A: importance sampling without a trust region."""
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return TrustTerms(-advantages * ratio, nowhere, nowhere)


def clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None) -> TrustTerms:
    """-min(r·A, clip(r, 1 - low, 1 + high)·A) (Schulman et al. 2017, eq. 7; DAPO has high > low).

    With `dual` the loss of a negative advantage is at most dual·|A| (Ye et al. 2020): a ratio beyond that has no
    gradient and counts as `high` too.
    """
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high))
    held = ratio.detach()
    above = (advantages > 0) & (held > 1.0 + high)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
        above = above | ((advantages < 0) & (held > dual))
    return TrustTerms(loss, (advantages < 0) & (held < 1.0 - low), above)


def clipped_weight(logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> TrustTerms:
    """-clip(r, low, high)·A·log π, the weight a constant (CISPO, MiniMax 2025): none loses its gradient."""
    held = ratio.detach()
    return TrustTerms(-held.clamp(low, high) * advantages * logprobs, held < low, held > high)


def soft_gate(ratio: Tensor, advantages: Tensor, *, positive: float, negative: float) -> TrustTerms:
    """-(4/τ)·σ(τ·(r - 1))·A, τ by the advantage's sign (SAPO, 2025). At r = 1 its slope in r is -A."""
    temperature = torch.where(advantages > 0, torch.full_like(advantages, positive), negative)
    gate = torch.sigmoid(temperature * (ratio - 1.0)) * (4.0 / temperature)
    nowhere = torch.zeros_like(advantages, dtype=torch.bool)
    return TrustTerms(-gate * advantages, nowhere, nowhere)


def tv_mask(
    logprobs: Tensor, anchor_logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, threshold: float
) -> TrustTerms:
    """-r·A where the probability itself has not moved by more than `threshold` the way A pushes (DPPO, 2026).

    |π - anchor| of the drawn token is a lower bound of the total variation. A rare token's ratio may be large while
    hardly any probability has moved: a clip of the ratio would stop it, this does not.
    """
    moved = (logprobs.exp() - anchor_logprobs.exp()).detach()
    low, high = (advantages < 0) & (moved < -threshold), (advantages > 0) & (moved > threshold)
    return TrustTerms(torch.where(low | high, 0.0, -advantages * ratio), low, high)


def second_moment_mask(log_ratios: Tensor, *, threshold: float) -> Tensor:
    """True `(N,)` for the elements that stay when the largest (log r)² are dropped until their mean is ≤ threshold.

    M2PO (Zheng et al. 2025). It is a statement about all elements at once, so a batch must be given whole.
    The smallest always stays.
    """
    squares = log_ratios.double().square()
    ascending, order = squares.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    # Means of ever larger elements never fall, so those that pass come first.
    stays = means <= threshold
    stays[:1] = True
    return torch.zeros_like(stays).scatter(0, order, stays)
