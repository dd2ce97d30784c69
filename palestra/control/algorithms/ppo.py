"""Proximal policy optimization (Schulman et al. 2017), with the details that matter said at their line.

What it stores: one rollout of T steps in N environments, thrown away after it was learned from.
How it acts: it samples from the policy; the noise of a whole rollout is drawn at once.
How it learns: GAE, then some epochs of minibatches on the clipped surrogate, the value loss and the entropy bonus.
A recurrent policy learns from minibatches of whole environments, unrolled from what it remembered before the rollout.
"""

from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.on_policy import OnPolicy, RolloutBatch, imitation
from palestra.control.collector import Rollout
from palestra.control.optim import scheduled
from palestra.rl.losses import masked_mean, ppo_policy_loss, value_loss
from palestra.rl.normalize import batch_normalize
from palestra.spec.kinds.control import PPOSpec

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


class PpoRates(NamedTuple):
    """What schedules move; tensors, so that a compiled update sees their new values."""

    lr: Tensor
    clip: Tensor
    entropy: Tensor


class PPO(OnPolicy):
    """The learner: `step()` is one policy improvement."""

    def __init__(self, parts: AlgorithmParts):
        assert isinstance(parts.spec.algorithm, PPOSpec)
        self.spec = parts.spec.algorithm
        super().__init__(parts, self.spec)
        self.minibatch = self.spec.minibatch // (self.spec.horizon if self.recurrent else 1)
        """Rows of a minibatch; of a recurrent policy environments."""
        self.imitation = imitation(self, self.spec.self_imitation, parts)

    def step(self, progress: float) -> dict[str, float]:
        """Collect one rollout and learn from it; `progress` in [0, 1] drives the schedules."""
        with self.span("collect"):
            rollout = self.collect().to(self.policy.device)
        with self.span("learn"):
            metrics = self.learn(self.prepare(rollout), progress)
            if self.imitation is not None:
                metrics |= self.imitation.learn(scheduled(self.spec.lr, progress).to(self.policy.device))
            self.observed(rollout)
            return metrics | {"updates": self.updates}

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> RolloutBatch:
        """Log-probabilities, values and advantages of a rollout, under the weights that collected it, shuffled."""
        rollout = rollout.to(self.policy.device)
        found = self.estimates(rollout, self.spec.gamma, self.spec.lam)
        if self.imitation is not None:
            self.imitation.add(rollout, found)
        batch = RolloutBatch(
            rollout.obs,
            rollout.actions,
            found.advantages,  # in the place of the log-probabilities, which come last
            found.advantages,
            found.returns,
            found.values,
            found.valid,
            rollout.masks,
        )
        if self.start is None:
            batch = RolloutBatch(*(None if column is None else column.flatten(0, 1) for column in batch))  # pyrefly: ignore
        else:
            batch = batch._replace(began=rollout.began, memory=self.start[None])
        batch = batch.rows(self.order(self._rows(batch)))
        # The weights have not changed since acting, so the log-probabilities that the actions were sampled with can be
        # computed now. A matrix product rounds differently with the number of rows, so it is done for the very
        # minibatches of the first epoch: the first ratio is exactly 1.
        logprobs = [minibatch.logprobs_by(self.net) for minibatch in self._minibatches(batch)]
        return batch._replace(logprobs=torch.cat(logprobs, dim=1 if self.recurrent else 0))

    def order(self, rows: int) -> Tensor:
        """Every row once, in a new order."""
        return torch.randperm(rows, generator=self.generator).to(self.policy.device)

    def _rows(self, batch: RolloutBatch) -> int:
        return batch.advantages.shape[1 if self.recurrent else 0]

    def _minibatches(self, batch: RolloutBatch) -> list[RolloutBatch]:
        whole, dim = self._rows(batch) // self.minibatch, 1 if self.recurrent else 0
        columns = [(None,) * whole if column is None else column.split(self.minibatch, dim) for column in batch]
        return [RolloutBatch(*each) for each in islice(zip(*columns, strict=False), whole)]  # pyrefly: ignore

    def learn(self, batch: RolloutBatch, progress: float) -> dict[str, float]:
        """Epochs of minibatches; the means of the losses and diagnostics over all updates."""
        spec, rows = self.spec, self._rows(batch)
        rates = PpoRates(*(scheduled(s, progress).to(batch.obs.device) for s in (spec.lr, spec.clip, spec.entropy)))
        totals = torch.zeros(len(METRICS), device=self.policy.device)
        before = self.updates
        for number in range(spec.epochs):
            if number > 0:  # `prepare` shuffled for the first
                batch = batch.rows(self.order(rows))
            epoch = torch.zeros_like(totals)
            for minibatch in self._minibatches(batch):
                vector, self.adam, metrics = self._update(self.adam, minibatch, rates)
                self.flat.vector.copy_(vector)
                epoch += metrics
                self.updates += 1
            totals += epoch
            # The mean over the epoch, not the last minibatch's KL: that one is stale by the time it is seen.
            if spec.target_kl is not None and epoch[3] / (rows // self.minibatch) > spec.target_kl:
                break
        return dict(zip(METRICS, (totals / (self.updates - before)).tolist(), strict=True)) | {
            "updates": self.updates,
            "lr": float(rates.lr),
        }

    def loss(self, net: Any, batch: RolloutBatch, rates: PpoRates) -> tuple[Tensor, Tensor]:
        """Clipped surrogate + value_coef · (V - return)² - entropy · H."""
        distribution, values = batch.outputs(net)
        advantages = batch.advantages
        if self.spec.normalize_advantages:  # per minibatch, as in the first code of PPO
            advantages = batch_normalize(advantages, batch.valid)
        policy = ppo_policy_loss(
            distribution.log_prob(batch.actions),
            batch.logprobs,
            advantages,
            clip_low=rates.clip,
            clip_high=rates.clip,
            mask=batch.valid,
        )
        value = masked_mean(value_loss(values, batch.returns, batch.values, self.spec.clip_value), batch.valid)
        entropy = masked_mean(distribution.entropy(), batch.valid)
        total = policy.loss + self.spec.value_coef * value - rates.entropy * entropy
        parts = (policy.loss, value, entropy, policy.approx_kl, policy.clip_fraction)
        return total, torch.stack([part.detach() for part in parts])
