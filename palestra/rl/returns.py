"""What followed a step: discounted, n-step and λ-returns, with terminations, truncations and dummy rows.

`next_values[t]` is the value of the true successor of step t (see `palestra.rl.advantages`). A return bootstraps from
it where the episode was truncated and where the block ends, never where the episode terminated.
"""

import torch
from torch import Tensor

from palestra.rl.episodes import continues, full_precision
from palestra.rl.scan import reverse_scan


@torch.no_grad()
def lambda_returns(
    rewards: Tensor,
    next_values: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None = None,
    gamma: float,
    lam: float,
) -> Tensor:
    """TD(λ) returns (Sutton & Barto 2018, eq. 12.20): G_t = r_t + γ·[(1 - λ)·V(s'_t) + λ·G_{t+1}], `(T, N)`.

    λ = 0 is the one-step target; λ = 1 is the discounted return. Equal to GAE's returns where values and next values
    come from the same critic.
    """
    passes_on = continues(terminated, truncated, valid)
    rewards, next_values = full_precision(rewards), full_precision(next_values)
    trace = passes_on.to(rewards.dtype) * lam
    targets = rewards + gamma * torch.where(terminated, 0.0, next_values) * (1.0 - trace)
    if valid is not None:
        targets = torch.where(valid, targets, 0.0)
    return reverse_scan(targets, gamma * trace)


def discounted_returns(
    rewards: Tensor,
    next_values: Tensor | None = None,
    *,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None = None,
    gamma: float,
) -> Tensor:
    """Σ_k γ^k r_{t+k} to the end of the episode or block, `(T, N)`.

    With `next_values` the part cut off by a truncation or by the block's end is bootstrapped; without them it counts
    as 0 (plain Monte Carlo).
    """
    if next_values is None:
        next_values = torch.zeros_like(rewards)
    return lambda_returns(
        rewards, next_values, terminated=terminated, truncated=truncated, valid=valid, gamma=gamma, lam=1.0
    )


@torch.no_grad()
def n_step_returns(
    rewards: Tensor,
    next_values: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None = None,
    gamma: float,
    n: int,
) -> Tensor:
    """G_t = Σ_{k<m} γ^k r_{t+k} + γ^m V(s'_{t+m-1}), `(T, N)`, m = n or fewer where the episode or the block ends.

    n rounds over the whole block: the m-step return of t is the reward plus the (m-1)-step return of t + 1.
    """
    if n < 1:
        raise ValueError(f"n-step returns need n of at least 1, not {n}")
    passes_on = continues(terminated, truncated, valid)
    rewards, next_values = full_precision(rewards), full_precision(next_values)
    one_step = rewards + gamma * torch.where(terminated, 0.0, next_values)
    if valid is not None:
        rewards, one_step = torch.where(valid, rewards, 0.0), torch.where(valid, one_step, 0.0)
    returns = one_step
    for _ in range(min(n, rewards.shape[0]) - 1):
        longer = rewards[:-1] + gamma * returns[1:]
        returns = torch.cat((torch.where(passes_on[:-1], longer, one_step[:-1]), one_step[-1:]))
    return returns
