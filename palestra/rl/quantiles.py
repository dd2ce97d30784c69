"""Quantile regression of the distribution of returns (Dabney et al. 2018)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def quantile_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Huber's quantile loss with κ = 1 (eq. 10), (B,): summed over the quantiles, a mean over the targets.

    `values` (B, N) are the quantiles at (2i + 1) / 2N of one distribution a row, `targets` (B, M) samples of another.
    """
    number = values.shape[1]
    levels = (torch.arange(number, device=values.device, dtype=values.dtype) * 2 + 1) / (2 * number)
    over = targets[:, None, :] - values[:, :, None]  # (B, N, M)
    huber = F.smooth_l1_loss(over, torch.zeros_like(over), reduction="none")
    return ((levels[:, None] - (over.detach() < 0).to(values.dtype)).abs() * huber).mean(dim=2).sum(dim=1)
