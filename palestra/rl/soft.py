"""Maximum-entropy RL (Haarnoja et al. 2018): soft values, the policy's loss and the loss of the entropy's weight.

Twin critics are on dimension 0: `(2, B)` for the actions taken, `(2, B, A)` for all of a Discrete space.
"""

import math

import torch
from torch import Tensor

DISCRETE_TARGET = 0.6  # of log |A|; near 1 (as first published, 0.98) the weight of the entropy grows without end


def target_entropy(actions: int, *, discrete: bool) -> float:
    """The entropy in nats aimed at where none is given: -dim(A) in units of half the range, or 0.6 · log |A|."""
    return DISCRETE_TARGET * math.log(actions) if discrete else -float(actions)


def soft_value(q: Tensor, logprobs: Tensor, alpha: Tensor) -> Tensor:
    """V of sampled actions, `(B,)`: the smaller of the twins `(2, B)` less α times their log-density `(B,)`."""
    return q.amin(dim=0) - alpha * logprobs


def expected_soft_value(q: Tensor, logprobs: Tensor, alpha: Tensor) -> Tensor:
    """V as the exact expectation over `(B, A)` actions, `(B,)`, with the smaller of the twins `(2, B, A)`."""
    return (logprobs.exp() * (q.amin(dim=0) - alpha * logprobs)).sum(dim=-1)


def td_target(rewards: Tensor, discounts: Tensor, next_values: Tensor) -> Tensor:
    """r + discount · V(s'), without gradient; the discount is γ^k, and 0 where the episode terminated."""
    return (rewards + discounts * next_values).detach()


def twin_loss(q: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error of each twin `(2, B)`, averaged over the batch and added up over the twins."""
    return 0.5 * (q - targets).square().mean(dim=1).sum()


def alpha_slope(log_alpha: Tensor, entropy: Tensor, target: float) -> Tensor:
    """The gradient by log α of α · (H - H̄): above 0, so that α falls, where the entropy is above the target."""
    return log_alpha.exp() * (entropy - target)


def polyak(target: Tensor, learned: Tensor, tau: float) -> Tensor:
    """The target moved towards the learned parameters: τ = 1 copies them, τ = 0 would leave it."""
    return torch.lerp(target, learned.detach(), tau)
