"""Losses per element: PPO, soft actor-critic, quantile regression, trust regions, preferences.

Control takes masked means; language models take masked sums and divide once by the global denominator. Both compose
the same per-element terms. Everything traces as one graph; clip ranges may be 0-dim tensors, so that a schedule
changes them without compiling again.

Twin critics are on dimension 0: `(2, B)` for the actions taken, `(2, B, A)` for all of a Discrete space.

`ratio` is π / anchor with a gradient, A the advantage. Where a policy gradient has -A·log π, each of these has a loss
with the same gradient at ratio 1 and less of it, or none, further away.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.rl import kl

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within ±20: exp overflows at 88, and inf times a clipped branch's zero gradient is NaN."""


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of the elements where `mask` is True, whatever the others hold, even NaN; 0 where there are none."""
    if mask is None:
        return x.mean()
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp_min(1)


class PolicyTerms(NamedTuple):
    """Per-element terms of the clipped policy loss; all but `loss` are detached."""

    loss: Tensor
    ratio: Tensor
    approx_kl: Tensor
    clipped: Tensor


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


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float | Tensor | None = None
) -> Tensor:
    """(V - return)² per element, without the ½ of some implementations: coefficients are Stable-Baselines3's.

    With `clip`, the larger of that and the loss of `old_values + clip(V - old_values, ±clip)`, as in OpenAI's PPO.
    """
    squared = (values - returns).square()
    if clip is not None:
        if old_values is None:
            raise ValueError("a clipped value loss needs the old values")
        # pyrefly: ignore[no-matching-overload]  # both bounds are floats, or both are tensors
        moved = old_values + (values - old_values).clamp(-clip, clip)
        squared = torch.maximum(squared, (moved - returns).square())
    return squared


def quantile_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Quantile Huber loss with κ = 1 (Dabney et al. 2018, eq. 10), (B,): a sum over quantiles, a mean over targets.

    `values` (B, N) are the quantiles at (2i + 1) / 2N of one distribution a row, `targets` (B, M) samples of another.
    """
    number = values.shape[1]
    levels = (torch.arange(number, device=values.device, dtype=values.dtype) * 2 + 1) / (2 * number)
    over = targets[:, None, :] - values[:, :, None]  # (B, N, M)
    huber = F.smooth_l1_loss(over, torch.zeros_like(over), reduction="none")
    return ((levels[:, None] - (over.detach() < 0).to(values.dtype)).abs() * huber).mean(dim=2).sum(dim=1)


def projected(probs: Tensor, returns: Tensor, support: Tensor) -> Tensor:
    """A distribution with `probs` at `returns`, both (B, M), on the atoms `support`, (N,): probabilities, (B, N).

    A return between two atoms is shared by them, the nearer gets more; outside of them it counts as the outermost
    (Bellemare et al. 2017, eq. 7). By distances to all atoms: sums in a fixed order, where scattering has none.
    """
    low, high = support[0], support[-1]
    inside = torch.minimum(torch.maximum(returns, low), high)
    steps = (inside[:, None, :] - support[:, None]).abs() * ((len(support) - 1) / (high - low))  # (B, N, M)
    return (probs[:, None, :] * (1 - steps).clamp_min(0)).sum(dim=2)


def truncated(quantiles: Tensor, drop: int) -> Tensor:
    """Quantiles of all critics, (critics, B, N), as one sample a row without the highest `drop` for each critic.

    (B, critics · (N - drop)), in ascending order (Kuznetsov et al. 2020, eq. 11).
    """
    critics, _, number = quantiles.shape
    return quantiles.movedim(0, 1).flatten(1).sort(dim=1).values[:, : critics * (number - drop)]


def atoms_loss(logits: Tensor, probs: Tensor) -> Tensor:
    """KL of the softmax of `logits` (B, N) from `probs` (B, N), (B,); its gradient is that of the cross-entropy."""
    return (torch.xlogy(probs, probs) - probs * logits.log_softmax(dim=1)).sum(dim=1).clamp_min(0)


DISCRETE_TARGET = 0.6  # of log |A|; near 1 (0.98 in Christodoulou 2019) α grows without bound


def target_entropy(actions: int, *, discrete: bool) -> float:
    """The default target entropy in nats: -dim(A) in units of half the range, or 0.6 · log |A|."""
    return DISCRETE_TARGET * math.log(actions) if discrete else -float(actions)


def allowed_entropy(target: float, masks: Tensor) -> Tensor:
    """The target entropy where `masks` `(B, A)` allow some of A actions: the same share of the log of their number."""
    return target * masks.sum(dim=-1).log().mean() / max(math.log(masks.shape[-1]), 1e-12)


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
    """Half the squared error of each twin `(2, B)`: mean over the batch, sum over the twins."""
    return 0.5 * (q - targets).square().mean(dim=1).sum()


def alpha_slope(log_alpha: Tensor, entropy: Tensor, target: float | Tensor) -> Tensor:
    """The gradient by log α of α · (H - H̄): above 0, so that α falls, where the entropy is above the target."""
    return log_alpha.exp() * (entropy - target)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """1 - Var(return - V) / Var(return): 1 for perfect values, 0 for a constant or equal returns."""
    if mask is not None:
        values, returns = values[mask], returns[mask]
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - values).var(correction=0) / variance, 0.0)


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """|τ - 1(u < 0)| · u² per element (Kostrikov et al. 2022, eq. 4); τ = ½ is half the squared error."""
    return torch.where(errors < 0, 1.0 - expectile, expectile) * errors.square()


def polyak(target: Tensor, learned: Tensor, tau: float) -> Tensor:
    """The target moved towards the learned parameters: τ = 1 copies them, τ = 0 would leave it."""
    return torch.lerp(target, learned.detach(), tau)


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
    ratio = ratio.detach()
    above = (advantages > 0) & (ratio > 1.0 + high)
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
        above = above | ((advantages < 0) & (ratio > dual))
    return TrustTerms(loss, (advantages < 0) & (ratio < 1.0 - low), above)


def clipped_weight(logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> TrustTerms:
    """-clip(r, low, high)·A·log π, the weight a constant (CISPO, MiniMax 2025): none loses its gradient."""
    ratio = ratio.detach()
    return TrustTerms(-ratio.clamp(low, high) * advantages * logprobs, ratio < low, ratio > high)


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

    |π - anchor| of the sampled token is a lower bound of the total variation. A rare token's ratio may be large while
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


DpoLoss = Literal["sigmoid", "ipo", "hinge"]


class DpoTerms(NamedTuple):
    """Per-pair terms of a DPO loss; all but `loss` are detached."""

    loss: Tensor
    chosen_reward: Tensor
    """β · log(π / reference) of the chosen completion: the implicit reward, up to a term of the prompt."""
    rejected_reward: Tensor
    margin: Tensor
    """chosen_reward - rejected_reward."""
    accuracy: Tensor
    """1 where the margin is positive, 0 where it is negative, ½ where it is 0, as it is before training."""


class RewardTerms(NamedTuple):
    """Per-pair terms of a reward model's loss; all but `loss` are detached."""

    loss: Tensor
    margin: Tensor
    """Score of the chosen completion minus that of the rejected one."""
    accuracy: Tensor
    """1 where the margin is positive, 0 where it is negative, ½ where it is 0."""


def dpo_terms(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    loss: DpoLoss = "sigmoid",
    label_smoothing: float = 0.0,
) -> DpoTerms:
    """Direct preference optimization, of the completions' log-probabilities under the policy and under the reference.

    With Δ = log(π / reference) of the chosen completion minus that of the rejected one:

    - sigmoid: -(1 - ε)·log σ(βΔ) - ε·log σ(-βΔ), ε being `label_smoothing`, how often a label is taken to be wrong
      (Rafailov et al. 2023, eq. 7; with ε > 0 conservative DPO, Mitchell 2023).
    - ipo: (Δ - 1/(2β))² (Azar et al. 2023, eq. 17). Δ grows with completion length, its target does not: pass means
      over tokens in place of sums to make it independent of length.
    - hinge: max(0, 1 - βΔ) (SLiC, Zhao et al. 2023, with the reference as in Liu et al. 2024).
    """
    chosen_ratio, rejected_ratio = chosen - reference_chosen, rejected - reference_rejected
    delta = chosen_ratio - rejected_ratio
    if loss == "sigmoid":
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * delta) - label_smoothing * F.logsigmoid(-beta * delta)
    elif loss == "ipo":
        losses = (delta - 1 / (2 * beta)).square()
    elif loss == "hinge":
        losses = F.relu(1 - beta * delta)
    else:
        raise ValueError(f"unknown DPO loss {loss!r}: expected sigmoid, ipo or hinge")
    margin = beta * delta.detach()
    rewards = (beta * chosen_ratio.detach(), beta * rejected_ratio.detach())
    return DpoTerms(losses, *rewards, margin, _accuracy(margin))


def reward_terms(chosen: Tensor, rejected: Tensor, *, margin: float | Tensor = 0.0, center: float = 0.0) -> RewardTerms:
    """Bradley and Terry's -log σ(chosen - rejected - margin) + center·(chosen + rejected)², of two completions' scores.

    `margin` is the lead that the chosen completion should have (Llama 2, eq. 2). Without `center` the loss is invariant
    to a common shift of all scores; `center` holds them around 0 (Eisenstein et al. 2023, arXiv 2312.09244, eq. 2).
    """
    lead = chosen - rejected
    loss = -F.logsigmoid(lead - margin) + center * (chosen + rejected).square()
    return RewardTerms(loss, lead.detach(), _accuracy(lead.detach()))


def _accuracy(margin: Tensor) -> Tensor:
    return (1 + torch.sign(margin)) / 2
