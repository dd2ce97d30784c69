"""Losses of preferences between two answers, pair by pair: DPO and its relatives, and reward models."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DpoLoss = Literal["sigmoid", "ipo", "hinge"]


class DpoTerms(NamedTuple):
    """Per-pair terms of a DPO loss; all but `loss` are detached."""

    loss: Tensor
    chosen_reward: Tensor
    """β · log(π / reference) of the chosen answer: the reward for which π would be optimal, up to the prompt's own."""
    rejected_reward: Tensor
    margin: Tensor
    """chosen_reward - rejected_reward."""
    accuracy: Tensor
    """1 where the margin is positive, 0 where it is negative, ½ where it is 0, as it is before training."""


class RewardTerms(NamedTuple):
    """Per-pair terms of a reward model's loss; all but `loss` are detached."""

    loss: Tensor
    margin: Tensor
    """Score of the chosen answer minus that of the rejected one."""
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
    """Direct preference optimization, of the answers' log-probabilities under the policy and under the reference.

    With Δ = log(π / reference) of the chosen answer minus that of the rejected one:

    - sigmoid: -(1 - ε)·log σ(βΔ) - ε·log σ(-βΔ), ε being `label_smoothing`, how often a label is taken to be wrong
      (Rafailov et al. 2023, eq. 7; with ε > 0 conservative DPO, Mitchell 2023).
    - ipo: (Δ - 1/(2β))² (Azar et al. 2023, eq. 17). Δ grows with the length of answers, its aim does not: means over
      tokens, given in place of sums, make it independent of that.
    - hinge: max(0, 1 - βΔ) (SLiC, Zhao et al. 2023, with the reference as in Liu et al. 2024).
    """
    if label_smoothing and loss != "sigmoid":
        raise ValueError(f"label_smoothing belongs to the sigmoid loss, not to {loss!r}")
    chosen_ratio, rejected_ratio = chosen - reference_chosen, rejected - reference_rejected
    delta = chosen_ratio - rejected_ratio
    if loss == "sigmoid":
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * delta) - label_smoothing * F.logsigmoid(-beta * delta)
    elif loss == "ipo":
        losses = (delta - 1 / (2 * beta)).square()
    elif loss == "hinge":
        losses = F.relu(1 - beta * delta)
    else:
        raise ValueError(f"no DPO loss is called {loss!r}: sigmoid, ipo or hinge")
    margin = beta * delta.detach()
    return DpoTerms(
        loss=losses,
        chosen_reward=beta * chosen_ratio.detach(),
        rejected_reward=beta * rejected_ratio.detach(),
        margin=margin,
        accuracy=_accuracy(margin),
    )


def reward_terms(chosen: Tensor, rejected: Tensor, *, margin: float | Tensor = 0.0, center: float = 0.0) -> RewardTerms:
    """Bradley and Terry's -log σ(chosen - rejected - margin) + center·(chosen + rejected)², of two answers' scores.

    `margin` is by how much the chosen answer should lead (Llama 2, eq. 2). The loss without `center` does not change
    when all scores move together; `center` holds them around 0 (Eisenstein et al. 2023, arXiv 2312.09244, eq. 2).
    """
    lead = chosen - rejected
    loss = -F.logsigmoid(lead - margin) + center * (chosen + rejected).square()
    return RewardTerms(loss=loss, margin=lead.detach(), accuracy=_accuracy(lead.detach()))


def _accuracy(margin: Tensor) -> Tensor:
    return (1 + torch.sign(margin)) / 2
