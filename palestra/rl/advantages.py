"""How much better an action was than expected: GAE and V-trace, with terminations, truncations and dummy rows.

`next_values[t]` is the value of the true successor of step t: of the *final* observation where the episode ended,
never of the one after the reset. Termination switches it off, truncation does not; both stop credit from flowing
back. Rows with `valid=False` come out as 0, whatever they hold, and pass nothing on.
"""

import torch
from torch import Tensor

from palestra.rl.episodes import continues, full_precision
from palestra.rl.scan import reverse_scan


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None = None,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): `(advantages, returns)`, both `(T, N)`.

    λ is a number, or one of each step `(T, N)`.

    δ_t = r_t + γ·(1 - terminated_t)·V(s'_t) - V(s_t);  A_t = δ_t + γλ·(1 - ended_t)·A_{t+1};  return_t = A_t + V(s_t).
    """
    passes_on = continues(terminated, truncated, valid)
    rewards, values, next_values = full_precision(rewards), full_precision(values), full_precision(next_values)
    # `where`, not a product: the value after a termination and the content of a dummy row may be anything, even NaN.
    deltas = rewards - values + gamma * torch.where(terminated, 0.0, next_values)
    if valid is not None:
        deltas = torch.where(valid, deltas, 0.0)
        values = torch.where(valid, values, 0.0)
    advantages = reverse_scan(deltas, passes_on.to(deltas.dtype) * (gamma * lam))
    return advantages, advantages + values


@torch.no_grad()
def vtrace(
    behaviour_logprobs: Tensor,
    target_logprobs: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None = None,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al. 2018, eq. 1 and §4.2): `(vs, policy gradient advantages)`, both `(T, N)`.

    ρ_t = min(ρ̄, π/μ), c_t = λ·min(c̄, π/μ);  vs_t = V(s_t) + ρ_t δ_t + γ c_t (vs_{t+1} - V(s_{t+1}));
    the advantage is ρ_t (r_t + γ vs_{t+1} - V(s_t)), where vs_{t+1} is V(s'_t) at a truncation and at the block's end.
    The advantage already carries its importance weight ρ_t.
    """
    passes_on = continues(terminated, truncated, valid)
    rewards, values, next_values = full_precision(rewards), full_precision(values), full_precision(next_values)
    ratio = torch.exp(full_precision(target_logprobs) - full_precision(behaviour_logprobs))
    targets = rewards + gamma * torch.where(terminated, 0.0, next_values) - values
    if valid is not None:
        ratio = torch.where(valid, ratio, 0.0)
        targets = torch.where(valid, targets, 0.0)
        values = torch.where(valid, values, 0.0)
    rho = ratio.clamp(max=rho_bar)
    discount = passes_on.to(targets.dtype) * gamma
    corrections = reverse_scan(rho * targets, discount * (lam * ratio.clamp(max=c_bar)))
    next_corrections = torch.cat((corrections[1:], torch.zeros_like(corrections[:1])))
    return values + corrections, rho * (targets + discount * next_corrections)
