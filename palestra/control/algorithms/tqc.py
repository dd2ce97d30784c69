"""Truncated quantile critics (Kuznetsov et al. 2020): SAC against overestimation.

What it stores: transitions, in a replay memory.
How it acts: as SAC.
How it learns: as SAC, but each critic predicts quantiles of the return. Targets are the quantiles of both together
without the highest `drop` for each critic, in place of the smaller of two means; the policy maximizes the mean of all.
"""

import torch
from torch import Tensor

from palestra.control.algorithms.sac import SAC
from palestra.control.memory.replay import ReplayBatch
from palestra.rl.losses import quantile_loss, td_target, truncated


class TQC(SAC):
    """The learner."""

    supports = ("box",)

    def value(self, q: Tensor, logprobs: Tensor, alpha: Tensor) -> Tensor:
        """The soft value of what was sampled by the mean of all quantiles, (2, B, N), (B,)."""
        return q.mean(dim=(0, 2)) - alpha * logprobs

    def next_value(self, q: Tensor, logprobs: Tensor, alpha: Tensor) -> Tensor:
        """Samples of the soft return of the successor, (B, 2 (N - drop))."""
        return truncated(q, self.spec.drop) - (alpha * logprobs)[:, None]

    @staticmethod
    def critic_loss(q: Tensor, batch: ReplayBatch, next_values: Tensor) -> tuple[Tensor, Tensor]:
        """The quantile loss of both critics, (2, B, N), towards these samples; this loss and the mean value."""
        targets = td_target(batch.rewards[:, None], batch.discounts[:, None], next_values)
        error = quantile_loss(q.flatten(0, 1), targets.repeat(2, 1)).view(2, -1).mean(dim=1).sum()
        return error, torch.stack([error.detach(), q.detach().mean()])
