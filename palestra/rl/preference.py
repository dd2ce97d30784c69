"""Preference losses, one per pair of completions: DPO and its variants, and reward models."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
    return DpoTerms(
        loss=losses,
        chosen_reward=beta * chosen_ratio.detach(),
        rejected_reward=beta * rejected_ratio.detach(),
        margin=margin,
        accuracy=_accuracy(margin),
    )


def reward_terms(chosen: Tensor, rejected: Tensor, *, margin: float | Tensor = 0.0, center: float = 0.0) -> RewardTerms:
    """Bradley and Terry's -log σ(chosen - rejected - margin) + center·(chosen + rejected)², of two completions' scores.

    `margin` is the lead that the chosen completion should have (Llama 2, eq. 2). Without `center` the loss is invariant
    to a common shift of all scores; `center` holds them around 0 (Eisenstein et al. 2023, arXiv 2312.09244, eq. 2).
    """
    lead = chosen - rejected
    loss = -F.logsigmoid(lead - margin) + center * (chosen + rejected).square()
    return RewardTerms(loss=loss, margin=lead.detach(), accuracy=_accuracy(lead.detach()))


def _accuracy(margin: Tensor) -> Tensor:
    return (1 + torch.sign(margin)) / 2
