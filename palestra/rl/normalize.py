"""Normalization: running statistics, reward scale; batch, group and leave-one-out baselines."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from palestra.rl.returns import reverse_scan


class Moments(NamedTuple):
    """Mean and variance of everything seen so far, in float64 (Chan et al. 1979, parallel merge)."""

    mean: Tensor
    var: Tensor
    count: Tensor

    @classmethod
    def start(cls, shape: Sequence[int] = (), device: torch.device | str | None = None) -> "Moments":
        """Mean 0 and variance 1 before the first batch."""
        mean = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        return cls(mean, torch.ones_like(mean), torch.zeros((), dtype=torch.float64, device=device))

    def merged(self, batch: Tensor, mask: Tensor | None = None) -> "Moments":
        """With a batch `(..., *shape)` added; rows where `mask` `(...)` is False do not count."""
        rows = batch[mask] if mask is not None else batch.reshape(-1, *self.mean.shape)
        if rows.shape[0] == 0:
            return self
        var, mean = torch.var_mean(rows.to(torch.float64), dim=0, correction=0)
        total = self.count + rows.shape[0]
        delta = mean - self.mean
        # The first batch has weight 1, so the initial mean 0 and variance 1 leave no trace.
        weight = rows.shape[0] / total
        var = (1.0 - weight) * self.var + weight * var + delta.square() * weight * (1.0 - weight)
        return Moments(self.mean + delta * weight, var, total)


class RewardScale:
    """Divides rewards by the running standard deviation of the discounted return (Engstrom et al. 2020, §3).

    The mean is never subtracted, which would change what is optimal. Each environment's running return
    R_t = γ·R_{t-1} + r_t restarts at 0 after an episode's end; γ is the agent's.
    """

    def __init__(self, num_envs: int, gamma: float, device: torch.device | str | None = None):
        self.gamma = gamma
        self.running = torch.zeros(num_envs, dtype=torch.float64, device=device)
        self.moments = Moments.start(device=device)

    def update(self, rewards: Tensor, ended: Tensor, valid: Tensor | None = None) -> None:
        """Add a block of raw rewards `(T, N)`, with the ends of episodes; rows with `valid=False` do not count."""
        rewards = rewards.to(torch.float64)
        passes = ~ended
        if valid is not None:
            rewards, passes = torch.where(valid, rewards, 0.0), passes & valid
        passes = passes.to(torch.float64)
        first = rewards[:1] + self.gamma * self.running
        decay = self.gamma * torch.cat((torch.zeros_like(passes[:1]), passes[:-1]))
        # The recurrence runs forwards in time: solve it on the reversed block.
        returns = reverse_scan(torch.cat((first, rewards[1:])).flip(0), decay.flip(0)).flip(0)
        self.running = returns[-1] * passes[-1]
        self.moments = self.moments.merged(returns, valid)

    def scale(self, rewards: Tensor, clip: float | None = None, eps: float = 1e-8) -> Tensor:
        """Rewards / √(var + eps), held within ±clip, in their own precision."""
        scaled = rewards / torch.sqrt(self.moments.var + eps)
        return (scaled if clip is None else scaled.clamp(-clip, clip)).to(rewards.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """The running returns and their moments; `update` makes new tensors, so these stay as they are."""
        return {"running": self.running, **self.moments._asdict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from `state`."""
        self.running = state["running"].to(self.running)
        self.moments = Moments(*(state[name].to(self.running) for name in Moments._fields))


def batch_normalize(x: Tensor, mask: Tensor | None = None, eps: float = 1e-8, correction: int = 0) -> Tensor:
    """(x - mean) / (std + eps) over all elements where `mask` is True, 0 elsewhere.

    The std is the population's, or with `correction=1` the sample's (n - 1). Equal values, and a single one, give
    exactly 0, so that the rounding error of their mean, divided by a std as small, cannot pass for a signal.
    """
    if mask is None:
        # Welford's: exact for equal values. A sample of one has no deviation: NaN without the bound.
        std, mean = torch.std_mean(x, correction=min(correction, x.numel() - 1))
        return (x - mean) / (std + eps)
    # A sum of equal values is not exact: subtract the smallest first, which leaves zeros to add up.
    smallest = torch.where(mask, x, torch.inf).amin()
    shifted = torch.where(mask, x - smallest, 0.0)
    count = mask.sum().clamp_min(1)
    centered = torch.where(mask, shifted - shifted.sum() / count, 0.0)
    return centered / ((centered.square().sum() / (count - correction).clamp_min(1)).sqrt() + eps)


def _centre(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean (float64), the group of each (0..G-1) and its group's size."""
    groups, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    zeros = torch.zeros(groups.shape[0], dtype=torch.float64, device=rewards.device)
    # As in `batch_normalize`: less the smallest first, so that equal rewards give exactly 0.
    smallest = zeros.scatter_reduce(0, group, rewards.to(torch.float64), "amin", include_self=False)
    shifted = rewards.to(torch.float64) - smallest[group]
    means = zeros.index_add(0, group, shifted) / sizes
    return shifted - means[group], group, sizes[group]


def group_std(rewards: Tensor, group_ids: Tensor, *, correction: int = 0) -> Tensor:
    """The standard deviation of each reward's group `(B,)`: the population's, or with `correction=1` the sample's.

    A group of one, and one of equal rewards, has 0.
    """
    centered, group, sizes = _centre(rewards, group_ids)
    squares = torch.zeros_like(centered).index_add(0, group, centered.square())
    return (squares[group] / (sizes - correction).clamp_min(1)).sqrt().to(rewards.dtype)


def group_normalize(
    rewards: Tensor, group_ids: Tensor, *, scale: Literal["none", "std"] = "std", correction: int = 0, eps: float = 1e-6
) -> Tensor:
    """Rewards `(B,)` less their group's mean, and with "std" divided by (`group_std` + eps) of their group.

    "std" is GRPO (Shao et al. 2024), "none" is Dr. GRPO (Liu et al. 2025). Groups are identified by id, in any order
    and of any size; a group of one, and one of equal rewards, gets 0.
    """
    centered = _centre(rewards, group_ids)[0].to(rewards.dtype)
    return centered if scale == "none" else centered / (group_std(rewards, group_ids, correction=correction) + eps)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards `(B,)` less the mean of the *others* in their group (RLOO, Ahmadian et al. 2024); a group of one gets 0.

    r_i - (Σr - r_i) / (n - 1) = (r_i - mean)·n / (n - 1).
    """
    centered, _, sizes = _centre(rewards, group_ids)
    return (centered * sizes / (sizes - 1).clamp_min(1)).to(rewards.dtype)
