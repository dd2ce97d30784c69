"""Synchronous advantage actor-critic (Mnih et al. 2016).

What it stores: one rollout of T steps in N environments, discarded after the update.
How it acts: it samples from the policy; the noise of a whole rollout is generated at once.
How it learns: one gradient step on the whole rollout, with advantages of GAE, or with n-step returns up to the end of
the rollout less the values (which is GAE with λ = 1).
"""

from typing import Any

import torch
from torch import Tensor

from palestra.control.algorithms.on_policy import OnPolicy, Rates, RolloutBatch
from palestra.control.collector import Rollout
from palestra.rl.losses import masked_mean
from palestra.rl.normalize import batch_normalize
from palestra.spec.kinds.control import A2CSpec

METRICS = ("policy_loss", "value_loss", "entropy", "grad_norm")


class A2C(OnPolicy):
    """The learner."""

    spec: A2CSpec

    @torch.no_grad()
    def prepare(self, rollout: Rollout, progress: float = 0.0) -> RolloutBatch:
        batch = self.batch(rollout, 1.0 if self.spec.lam is None else self.spec.lam)
        if self.spec.normalize_advantages:
            return batch._replace(advantages=batch_normalize(batch.advantages, batch.valid))
        return batch

    def learn(self, batch: RolloutBatch, progress: float) -> dict[str, float]:
        rates = self.rates(progress)
        return dict(zip(METRICS, self.gradient_step(batch, rates).tolist(), strict=True)) | {"lr": float(rates.lr)}

    def loss(self, net: Any, batch: RolloutBatch, rates: Rates) -> tuple[Tensor, Tensor]:
        """-log π · advantage + value_coef · (V - return)² - entropy · H."""
        distribution, values = batch.outputs(net)
        policy = -masked_mean(distribution.log_prob(batch.actions) * batch.advantages, batch.valid)
        value = masked_mean((values - batch.returns).square(), batch.valid)
        entropy = masked_mean(distribution.entropy(), batch.valid)
        total = policy + self.spec.value_coef * value - rates.entropy * entropy
        return total, torch.stack([part.detach() for part in (policy, value, entropy)])
