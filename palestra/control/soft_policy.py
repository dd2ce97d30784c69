"""What SAC and CrossQ share: soft values of drawn actions, the step of the policy and that of the entropy's weight."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.control.actions import ActionHead
from palestra.control.adam import BETA1
from palestra.control.vectors import Shaped, Trained, gradient, pace
from palestra.rl.soft import alpha_slope, expected_soft_value, soft_value, target_entropy
from palestra.spec.control.off_policy import CrossQSpec, SACSpec

Q = Callable[[Tensor | None], Tensor]
"""The critics in given observations: values of a Box's actions, (2, B); None: of every Discrete one, (2, B, A)."""


@dataclass(frozen=True)
class SoftPolicy:
    """A policy that is paid for its entropy as well, by a weight α that is tuned or fixed."""

    net: Shaped
    head: ActionHead
    spec: SACSpec | CrossQSpec
    beta1: float = BETA1

    def log_alpha(self) -> Tensor:
        """Before the first step, (1,)."""
        return torch.full((1,), 0.0 if self.spec.alpha == "auto" else math.log(self.spec.alpha))

    @property
    def aim(self) -> float:
        """The entropy that α is tuned towards."""
        given = self.spec.target_entropy
        return target_entropy(self.head.outputs, discrete=not self.head.continuous) if given == "auto" else given

    def noise(self, generator: torch.Generator, updates: int) -> Tensor:
        """What the actions of so many updates are drawn from, (updates, 2, B, D): the critics' and the policy's."""
        drawn = self.spec.batch if self.head.continuous else 0  # expectations over Discrete actions are exact
        return self.head.noise(generator, updates, 2, drawn)

    def rates(self, done: int, updates: int, critic_lr: float, lr: float, alpha_lr: float) -> Tensor:
        """The paces of the critics, of the policy and of α in the updates after `done`, (updates, 3, 2)."""
        delay, eps = self.spec.policy_delay, self.spec.adam_eps
        paces = []
        for n in range(done + 1, done + updates + 1):
            steps = max(1, n // delay)  # of the policy; before its first nobody looks at its pace
            paces.append(
                [pace(critic_lr, eps, n, self.beta1)] + [pace(r, eps, steps, self.beta1) for r in (lr, alpha_lr)]
            )
        return torch.tensor(paces)

    def drawn(self, vector: Tensor, obs: Tensor, noise: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Actions with their log-probabilities, (B,), and the entropy; None with those of all Discrete ones, (B, A)."""
        policy = self.net(vector)(obs)
        if not self.head.continuous:
            return None, policy.logprobs, policy.entropy()
        actions, logprobs = policy.sample_scored(noise)
        return actions, logprobs, -logprobs

    def value(self, q: Tensor, logprobs: Tensor, alpha: Tensor) -> Tensor:
        """V of what was drawn, (B,)."""
        return (soft_value if self.head.continuous else expected_soft_value)(q, logprobs, alpha)

    def step(self, actor: Trained, log_alpha: Trained, q: Q, obs: Tensor, noise: Tensor, rates: Tensor) -> Tensor:
        """One gradient step of the policy on what the critics say, which stay as they are, and one of α.

        `rates` (2, 2) are the paces of both. The policy's loss, its entropy and the α of before, (3,).
        """
        alpha = log_alpha.vector.exp()

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            actions, logprobs, entropy = self.drawn(vector, obs, noise)
            total = -self.value(q(actions), logprobs, alpha).mean()
            return total, torch.stack([total.detach(), entropy.detach().mean()])

        slope, seen = gradient(loss, actor.vector)
        actor.step(slope, rates[0], self.spec.max_grad_norm, self.beta1)
        if self.spec.alpha == "auto":
            log_alpha.step(alpha_slope(log_alpha.vector, seen[1], self.aim), rates[1], None, self.beta1)
        return torch.cat([seen, alpha])
