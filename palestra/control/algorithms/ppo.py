"""Proximal policy optimization (Schulman et al. 2017), with the details that matter commented at their line.

What it stores: one rollout of T steps in N environments, discarded after the update.
How it acts: it samples from the policy; the noise of a whole rollout is generated at once.
How it learns: GAE, then some epochs of minibatches on the clipped surrogate, the value loss and the entropy bonus.
A recurrent policy learns from minibatches of whole environments, unrolled from its memory before the rollout.
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from palestra.control.algorithms.on_policy import OnPolicy, Rates, RolloutBatch
from palestra.control.collector import Rollout
from palestra.rl.losses import masked_mean, ppo_policy_terms, value_loss
from palestra.rl.normalize import batch_normalize
from palestra.spec.kinds.control import PPOSpec

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


class PPO(OnPolicy):
    """The learner."""

    spec: PPOSpec

    @property
    def minibatch(self) -> int:
        """Rows of a minibatch; for a recurrent policy environments."""
        return self.spec.minibatch // (self.spec.horizon if self.recurrent else 1)

    @torch.no_grad()
    def prepare(self, rollout: Rollout, progress: float = 0.0) -> RolloutBatch:
        """The rollout's transitions with log-probabilities and advantages, shuffled for the first epoch."""
        batch = self.batch(rollout, self.spec.lam)
        batch = self.shuffled(batch)
        if batch.logprobs is not None:  # collected by an older policy: the ratio, and its clipping, are to that one
            return batch
        # The weights have not changed since acting, so the log-probabilities that the actions were sampled with can be
        # computed now. A matrix product rounds differently with the number of rows, so it is done for the very
        # minibatches of the first epoch: the first ratio is exactly 1.
        logprobs = []
        for part in self._minibatches(batch):
            distribution = part.outputs(self.net)[0] if self.recurrent else self.net.policy(part.obs, part.masks)
            logprobs.append(distribution.log_prob(part.actions))
        return batch._replace(logprobs=torch.cat(logprobs, dim=1 if self.recurrent else 0))

    def shuffled(self, batch: RolloutBatch) -> RolloutBatch:
        """Every row once, in a new order."""
        rows = batch.advantages.shape[1 if self.recurrent else 0]
        return batch.rows(torch.randperm(rows, generator=self.generator).to(self.device))

    def _minibatches(self, batch: RolloutBatch) -> list[RolloutBatch]:
        dim = 1 if self.recurrent else 0
        whole = batch.advantages.shape[dim] // self.minibatch
        columns = [(None,) * whole if column is None else column.split(self.minibatch, dim) for column in batch]
        return [RolloutBatch(*each) for each in islice(zip(*columns, strict=False), whole)]  # pyrefly: ignore

    def learn(self, batch: RolloutBatch, progress: float) -> dict[str, float]:
        """Epochs of minibatches; the means of the losses and diagnostics over all updates."""
        spec, rates, before = self.spec, self.rates(progress), self.updates
        totals = torch.zeros(len(METRICS), device=self.device)
        for number in range(spec.epochs):
            if number > 0:  # `prepare` shuffled for the first
                batch = self.shuffled(batch)
            epoch, minibatches = torch.zeros_like(totals), self._minibatches(batch)
            for minibatch in minibatches:
                epoch += self.gradient_step(minibatch, rates)
            totals += epoch
            # The mean over the epoch, not the last minibatch's KL: that one is stale by the time it is seen.
            if spec.target_kl is not None and epoch[3] / len(minibatches) > spec.target_kl:
                break
        means = dict(zip(METRICS, (totals / (self.updates - before)).tolist(), strict=True))
        return means | {"updates": self.updates, "lr": float(rates.lr)}

    def loss(self, net: Any, batch: RolloutBatch, rates: Rates) -> tuple[Tensor, Tensor]:
        """Clipped surrogate + value_coef · (V - return)² - entropy · H."""
        distribution, values = batch.outputs(net)
        advantages = batch.advantages
        if self.spec.normalize_advantages:  # per minibatch, as in OpenAI's PPO
            advantages = batch_normalize(advantages, batch.valid)
        logprobs, clips = distribution.log_prob(batch.actions), {"clip_low": rates.clip, "clip_high": rates.clip}
        terms = ppo_policy_terms(logprobs, batch.logprobs, advantages, **clips, mask=batch.valid)
        policy = masked_mean(terms.loss, batch.valid)
        value = masked_mean(value_loss(values, batch.returns, batch.values, self.spec.clip_value), batch.valid)
        entropy = masked_mean(distribution.entropy(), batch.valid)
        total = policy + self.spec.value_coef * value - rates.entropy * entropy
        approx_kl = masked_mean(terms.approx_kl, batch.valid)
        clip_fraction = masked_mean(terms.clipped.to(values.dtype), batch.valid)
        parts = (policy, value, entropy, approx_kl, clip_fraction)
        return total, torch.stack([part.detach() for part in parts])
