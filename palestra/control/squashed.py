"""The policies of SAC, TD3 and CrossQ: a squashed Gaussian, a softmax, or one action for each observation."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from palestra.control.actions import ActionHead
from palestra.control.actors import Actor
from palestra.control.layers import affine, linear
from palestra.control.trunks import make_trunk
from palestra.errors import UsageError
from palestra.rl.distributions import Categorical, SquashedGaussian
from palestra.spec.control.net import NetSpec

LOG_STD_BOUNDS = (-20.0, 2.0)  # of Haarnoja's code: beyond them log-densities overflow or nothing is learned


def check_bounds(head: ActionHead, algorithm: str) -> None:
    """Refuse a Box without bounds: actions within −1..1 are units of half of its range."""
    if not head.continuous:
        return
    low, high = head.description["low"], head.description["high"]
    if not (np.isfinite(low) & np.isfinite(high)).all():
        raise UsageError(
            f"{algorithm} acts within the bounds of the action space, and {low} to {high} has none in some part: "
            "wrap the environment in gymnasium.wrappers.ClipAction or RescaleAction with finite bounds, or use ppo"
        )


class SoftActor(Actor):
    """Draws its actions: from a squashed Gaussian for a Box, by softmax for Discrete."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        self.trunk = make_trunk(obs_shape, spec, obs_scale=obs_scale)
        outputs = head.outputs
        gain = 0.01 if spec.orthogonal else None  # the first policy is almost the same whatever the observation
        self.policy_head = linear(self.trunk.size, 2 * outputs if head.continuous else outputs, gain)
        if head.continuous:
            with torch.no_grad():
                self.policy_head.bias[outputs:] = spec.log_std

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> SquashedGaussian | Categorical:
        """The distribution over actions in `obs`, (B, ...); `mask`, (B, A), is True for Discrete ones allowed."""
        outputs = affine(self.trunk.forward(obs), self.policy_head.weight, self.policy_head.bias)
        if not self.head.continuous:
            return Categorical(outputs, mask)
        mean, log_std = outputs.chunk(2, dim=-1)
        return SquashedGaussian(mean, log_std.clamp(*LOG_STD_BOUNDS))

    def greedy(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The most likely actions; the middle of the squashed Gaussian."""
        return self.forward(obs, mask).mode()

    def drawn(self, obs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        """Actions drawn from the policy."""
        return self.forward(obs, mask).sample(self.head.noise(generator, len(obs)).to(obs.device))


class DeterministicActor(Actor):
    """One action of a Box for each observation: what TD3 learns."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        self.trunk = make_trunk(obs_shape, spec, obs_scale=obs_scale)
        self.policy_head = linear(self.trunk.size, head.outputs, 0.01 if spec.orthogonal else None)

    def forward(self, obs: Tensor) -> Tensor:
        """Actions within −1..1, (B, D)."""
        return torch.tanh(affine(self.trunk.forward(obs), self.policy_head.weight, self.policy_head.bias))

    def greedy(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same: it draws nothing, and a Box has no mask."""
        return self.forward(obs)
