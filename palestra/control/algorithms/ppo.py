"""Proximal policy optimisation (Schulman et al. 2017), with the details that matter said at their line.

What it stores: one rollout of T steps in N environments, thrown away after it was learned from.
How it acts: it samples from the policy; the noise of a whole rollout is drawn at once.
How it learns: GAE, then some epochs of minibatches on the clipped surrogate, the value loss and the entropy bonus.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.actions import ActionHead
from palestra.control.adam import Adam, adam_step, clip_norm
from palestra.control.algorithms.base import Algorithm, Parts
from palestra.control.collector import Collector, Rollout
from palestra.control.compiling import compiled
from palestra.control.episodes import Episodes
from palestra.control.nets import ActorCritic, Flat
from palestra.control.policy import Policy
from palestra.control.schedule import scheduled
from palestra.rl.advantages import gae
from palestra.rl.losses import masked_mean, ppo_policy_loss, value_loss
from palestra.rl.normalise import batch_normalise
from palestra.spec.control.on_policy import PPOSpec
from palestra.spec.kinds.control import ControlSpec

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")


class Batch(NamedTuple):
    """Transitions to learn from, one a row."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    valid: Tensor | None  # None: every row is a real transition

    def rows(self, which: Tensor | slice) -> "Batch":
        """Some of the rows."""
        return Batch(*(None if column is None else column[which] for column in self))  # pyrefly: ignore


class Rates(NamedTuple):
    """What schedules move; tensors, so that a compiled update sees their new values."""

    lr: Tensor
    clip: Tensor
    entropy: Tensor


class PPO(Algorithm):
    """The learner: `step()` is one policy improvement."""

    supports = ("discrete", "multi_discrete", "multi_binary", "box")

    def __init__(self, parts: Parts):
        super().__init__(parts)
        assert isinstance(parts.spec.algorithm, PPOSpec)
        self.spec = parts.spec.algorithm
        self.net = self.actor(parts.spec, parts.obs_shape, parts.head)
        self.policy = Policy(parts.obs_shape, self.net, parts.device)
        self.episodes = Episodes(parts.stepper)
        self.collector = Collector(self.episodes, self.spec.horizon, parts.head.shape, parts.head.dtype)
        self.flat = Flat(self.net)
        self.adam = Adam.zeros(self.flat.vector)
        self._update = compiled(self.update) if parts.compile else self.update

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> ActorCritic:
        """Policy and value."""
        return ActorCritic(obs_shape, head, spec.net)

    def step(self, progress: float) -> dict[str, float]:
        """Collect one rollout and learn from it; `progress` in [0, 1] drives the schedules."""
        with self.span("collect"):
            rollout = self.collect()
        with self.span("learn"):
            return self.learn(self.prepare(rollout), progress)

    def collect(self) -> Rollout:
        """T steps of the sampling policy in all environments."""
        device, head = self.policy.device, self.policy.head
        noise = head.noise(self.generator, self.collector.horizon, self.episodes.num_envs).to(device)
        return self.collector.collect(lambda obs, n: self.net.policy(obs.to(device)).sample(n), noise, head.to_env)

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> Batch:
        """Log-probabilities, values and advantages of a rollout, under the weights that collected it, shuffled."""
        net, rollout = self.net, rollout.to(self.policy.device)
        values, next_values = rollout.next_values(net.value)
        # By the kind of environment, not by what this rollout holds: see `compiled`.
        valid = rollout.valid if self.episodes.stepper.has_dummy_steps else None
        advantages, returns = gae(
            rollout.rewards,
            values,
            next_values,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            valid=valid,
            gamma=self.spec.gamma,
            lam=self.spec.lam,
        )
        order = self.order(rollout.rewards.numel())

        def shuffled(column: Tensor) -> Tensor:
            return column.flatten(0, 1)[order]

        obs, actions = shuffled(rollout.obs), shuffled(rollout.actions)
        # The weights have not changed since acting, so the log-probabilities that the actions were sampled with can be
        # computed now. A matrix product rounds differently with the number of rows, so it is done for the very
        # minibatches of the first epoch: the first ratio is exactly 1.
        pairs = zip(obs.split(self.spec.minibatch), actions.split(self.spec.minibatch), strict=True)
        logprobs = torch.cat([net.policy(o).log_prob(a) for o, a in pairs])
        return Batch(
            obs,
            actions,
            logprobs,
            shuffled(advantages),
            shuffled(returns),
            shuffled(values),
            None if valid is None else shuffled(valid),
        )

    def order(self, rows: int) -> Tensor:
        """Every row once, in a new order."""
        return torch.randperm(rows, generator=self.generator).to(self.policy.device)

    def learn(self, batch: Batch, progress: float) -> dict[str, float]:
        """Epochs of minibatches; the means of the losses and diagnostics over all updates."""
        spec, rows = self.spec, len(batch.obs)
        rates = Rates(*(scheduled(s, progress).to(batch.obs.device) for s in (spec.lr, spec.clip, spec.entropy)))
        totals = torch.zeros(len(METRICS), device=self.policy.device)
        before = self.updates
        for number in range(spec.epochs):
            if number > 0:  # `prepare` shuffled for the first
                batch = batch.rows(self.order(rows))
            epoch = torch.zeros_like(totals)
            for i in range(rows // spec.minibatch):
                minibatch = batch.rows(slice(i * spec.minibatch, (i + 1) * spec.minibatch))
                vector, self.adam, metrics = self._update(self.adam, minibatch, rates)
                self.flat.vector.copy_(vector)
                epoch += metrics
                self.updates += 1
            totals += epoch
            # The mean over the epoch, not the last minibatch's KL: that one is stale by the time it is seen.
            if spec.target_kl is not None and epoch[3] / (rows // spec.minibatch) > spec.target_kl:
                break
        return dict(zip(METRICS, (totals / (self.updates - before)).tolist(), strict=True)) | {
            "updates": self.updates,
            "lr": float(rates.lr),
        }

    def update(self, adam: Adam, batch: Batch, rates: Rates) -> tuple[Tensor, Adam, Tensor]:
        """One gradient step: new parameters, new optimizer memory, metrics. A pure function, eager or one graph."""
        gradient, metrics = self.flat.gradient(lambda net: self.loss(net, batch, rates))
        # One global norm over policy and value together, clipped before Adam sees it.
        gradient, norm = clip_norm(gradient, self.spec.max_grad_norm)
        vector, adam = adam_step(self.flat.vector, gradient, adam, rates.lr, self.spec.adam_eps)
        return vector, adam, torch.cat([metrics, norm.detach().reshape(1)])

    def loss(self, net: Any, batch: Batch, rates: Rates) -> tuple[Tensor, Tensor]:
        """Clipped surrogate + value_coef · (V - return)² - entropy · H."""
        distribution, values = net(batch.obs)
        advantages = batch.advantages
        if self.spec.normalise_advantages:  # per minibatch, as in the first code of PPO
            advantages = batch_normalise(advantages, batch.valid)
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

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return {
            "policy": self.policy.state(),
            "adam": dict(self.adam._asdict()),
            "updates": self.updates,
            "episodes": self.episodes.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.policy.load_state(state["policy"])
        self.updates = state["updates"]
        self.adam = Adam(**{name: value.to(self.policy.device) for name, value in state["adam"].items()})
        self.episodes.load_state(state["episodes"])
