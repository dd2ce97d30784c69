"""Synchronous advantage actor-critic (Mnih et al. 2016).

What it stores: one rollout of T steps in N environments, thrown away after it was learned from.
How it acts: it samples from the policy; the noise of a whole rollout is drawn at once.
How it learns: one gradient step on the whole rollout, with advantages of GAE, or with n-step returns up to the end of
the rollout less the values (which is GAE with λ = 1).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.on_policy import OnPolicy, RolloutBatch, imitation
from palestra.control.collector import Rollout
from palestra.control.optim import scheduled
from palestra.rl.losses import masked_mean
from palestra.rl.normalize import batch_normalize
from palestra.spec.kinds.control import A2CSpec

METRICS = ("policy_loss", "value_loss", "entropy", "grad_norm")


class A2cRates(NamedTuple):
    """What schedules move; tensors, so that a compiled update sees their new values."""

    lr: Tensor
    entropy: Tensor


class A2C(OnPolicy):
    """The learner: `step()` is one policy improvement."""

    def __init__(self, parts: AlgorithmParts):
        assert isinstance(parts.spec.algorithm, A2CSpec)
        self.spec = parts.spec.algorithm
        super().__init__(parts, self.spec)
        self.imitation = imitation(self, self.spec.self_imitation, parts)

    def step(self, progress: float) -> dict[str, float]:
        """Collect one rollout and make one gradient step on it; `progress` in [0, 1] drives the schedules."""
        with self.span("collect"):
            rollout = self.collect().to(self.policy.device)
        with self.span("learn"):
            rates = A2cRates(
                *(scheduled(s, progress).to(rollout.obs.device) for s in (self.spec.lr, self.spec.entropy))
            )
            vector, self.adam, metrics = self._update(self.adam, self.prepare(rollout), rates)
            self.flat.vector.copy_(vector)
            self.updates += 1
            found = dict(zip(METRICS, metrics.tolist(), strict=True)) | {"lr": float(rates.lr)}
            if self.imitation is not None:
                found |= self.imitation.learn(rates.lr)
            self.observed(rollout)
            return found | {"updates": self.updates}

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> RolloutBatch:
        """Values and advantages of a rollout, under the weights that collected it."""
        rollout = rollout.to(self.policy.device)
        found = self.estimates(rollout, self.spec.gamma, 1.0 if self.spec.lam is None else self.spec.lam)
        if self.imitation is not None:
            self.imitation.add(rollout, found)
        advantages = found.advantages
        if self.spec.normalize_advantages:
            advantages = batch_normalize(advantages, found.valid)
        batch = RolloutBatch(
            rollout.obs,
            rollout.actions,
            advantages,  # log-probabilities are of no use: there is one step, and its ratio is 1
            advantages,
            found.returns,
            found.values,
            found.valid,
            rollout.masks,
        )
        if self.start is not None:
            return batch._replace(began=rollout.began, memory=self.start[None])
        return RolloutBatch(*(None if column is None else column.flatten(0, 1) for column in batch))  # pyrefly: ignore

    def loss(self, net: Any, batch: RolloutBatch, rates: A2cRates) -> tuple[Tensor, Tensor]:
        """-log π · advantage + value_coef · (V - return)² - entropy · H."""
        distribution, values = batch.outputs(net)
        policy = -masked_mean(distribution.log_prob(batch.actions) * batch.advantages, batch.valid)
        value = masked_mean((values - batch.returns).square(), batch.valid)
        entropy = masked_mean(distribution.entropy(), batch.valid)
        total = policy + self.spec.value_coef * value - rates.entropy * entropy
        return total, torch.stack([part.detach() for part in (policy, value, entropy)])
