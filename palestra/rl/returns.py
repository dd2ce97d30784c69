"""Returns and advantages over (T, N) blocks: discounted and λ-returns, GAE, V-trace.

`next_values[t]` is the value of the true successor of step t: of the *final* observation where the episode ended,
never of the one after the reset. A return bootstraps from it where the episode was truncated and where the block ends,
never where the episode terminated; both kinds of end stop credit from flowing back. Rows with `valid=False` come out
as 0, whatever they hold, and pass nothing on.
"""

import torch
from torch import Tensor


def reverse_scan(x: Tensor, decay: Tensor) -> Tensor:
    """Solve `y[t] = x[t] + decay[t] · y[t+1]` backwards over dimension 0, with `y[T] = 0`.

    Hillis-Steele doubling: after a round with shift k, `y[t]` covers the window `x[t : t+2k]` and `a[t]` is the product
    of the 2k decays before the next window, so log2(T) rounds of whole-tensor operations replace T small ones. Only
    products of decays over a window occur, never a division by a cumulative product: with |decay| ≤ 1 nothing
    overflows, and a decay of 0 (an episode's end) cuts exactly.
    """
    steps = x.shape[0]
    y, a, shift = x, decay[:-1], 1
    while shift < steps:
        # Rows past T - shift already reach the end of time; `a` is kept only for the rows that do not.
        y = torch.cat((torch.addcmul(y[:-shift], a, y[shift:]), y[-shift:]))
        a = a[:-shift] * a[shift:]
        shift *= 2
    return y


def continues(terminated: Tensor, truncated: Tensor, valid: Tensor | None = None) -> Tensor:
    """Where the next row is the next step of the same episode, `(T, N)`, boolean; False in the block's last row.

    Rows with `valid=False` (dummy autoreset steps, padding) belong to no episode.
    """
    follows = ~(terminated | truncated)
    if valid is not None:
        follows &= valid
        follows[:-1] &= valid[1:]
    follows[-1] = False
    return follows


def full_precision(x: Tensor) -> Tensor:
    """At least float32: sums over an episode lose their small terms in bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


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

    With `next_values` a truncation and the block's end bootstrap; without them what follows counts as 0 (Monte Carlo).
    """
    if next_values is None:
        next_values = torch.zeros_like(rewards)
    return lambda_returns(
        rewards, next_values, terminated=terminated, truncated=truncated, valid=valid, gamma=gamma, lam=1.0
    )


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
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): `(advantages, returns)`, both `(T, N)`.

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
def stale_gae(
    ratio: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor | None = None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """GAE of actions that another policy μ took: `(advantages, returns)`, both `(T, N)`; `ratio` is π/μ, `(T, N)`.

    The returns are V-trace's with ρ̄ = c̄ = 1: return_t = V(s_t) + m_t·A_t with m = min(1, π/μ), and
    A_t = δ_t + γλ·m_{t+1}·(1 - ended_t)·A_{t+1}. The advantage does not carry the weight of its own action, for losses
    that multiply it by π/μ themselves. With ratios of 1 it is `gae`.
    """
    least = full_precision(ratio).clamp(max=1.0)
    following = torch.cat((least[1:], torch.ones_like(least[:1])))
    ends = {"terminated": terminated, "truncated": truncated, "valid": valid}
    advantages, _ = gae(rewards, values, next_values, **ends, gamma=gamma, lam=lam * following)
    values = full_precision(values) if valid is None else torch.where(valid, full_precision(values), 0.0)
    return advantages, values + least * advantages


@torch.no_grad()
def vtrace(
    behavior_logprobs: Tensor,
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
    ratio = torch.exp(full_precision(target_logprobs) - full_precision(behavior_logprobs))
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
