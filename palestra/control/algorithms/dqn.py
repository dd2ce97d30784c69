"""Deep Q-learning (Mnih et al. 2015) with its extensions: the parts of Rainbow, each a field.

What it stores: transitions in a replay memory; prioritized, those with large TD errors are sampled more often.
How it acts: ε-greedily, independently in each environment, or by a softmax of the values, which may come from noisy
layers; at random until `start`.
How it learns: Q(s, a) towards r + γ^k · Q_target(s', a'), where a' is the best action of the target network or, double,
of the learning one. The loss is Huber's with δ = 1: beyond an error of 1 its gradient grows no more. Of a distribution
of returns it learns quantiles, or probabilities of fixed atoms towards the target's, projected on them.
"""

import math
from collections.abc import Mapping
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import OffPolicy
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.one_row import OneRow
from palestra.control.nets.values import Exploration, ExplorationNoise, QNet, forbid
from palestra.control.optim import FlatNet, Trained, clip_norm, copied, pace, restore, together
from palestra.control.scaling import obs_scale
from palestra.rl.losses import atoms_loss, projected, quantile_loss
from palestra.rl.schedules import value
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.off_policy import DQNSpec
from palestra.spec.schedule import in_fractions


class DQN(OffPolicy):
    """The learner."""

    supports = ("discrete",)
    network = QNet
    metrics = ("loss", "q", "td_error", "grad_norm")
    net: QNet
    spec: DQNSpec

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        prioritized = self.spec.prioritized
        self.beta = None if prioritized is None else in_fractions(prioritized, parts.spec.steps).beta
        self.exploration = Exploration(self.net, self.generator, self.spec.epsilon, self.spec.temperature)
        self.flat = FlatNet(self.net)
        self.one_row = OneRow.of(self.net, parts.spec.net, self._shown, parts.device)
        # An equal copy, with a vector of its own.
        twin = self.actor(parts.spec, parts.obs_shape, parts.head).to(parts.device).requires_grad_(False)
        twin.load_state_dict(self.net.state_dict())
        self.target = FlatNet(twin)
        self.trained = Trained.of(self.flat.vector)
        # Updates in one graph: a divisor of those made at once, and of those between two copies of the network.
        most, made = together(parts.spec), self.spec.updates_at_once(self.episodes.num_envs)
        self.together = math.gcd(most, made, self.spec.target_every or most) if parts.compiles else 1
        self._update = parts.compiled(self.update)

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> Any:
        assert isinstance(spec.algorithm, DQNSpec)
        return cls.network(obs_shape, head, spec.net, obs_scale(spec.env, obs_shape), spec.algorithm)

    def layer_noise(self, *shape: int) -> Tensor | None:
        """Noise of the noisy layers, (*shape, ...): sign(x) √|x| of normal x; None where there are none."""
        if not self.net.noise_sizes:
            return None
        normal = torch.randn(*shape, sum(self.net.noise_sizes), generator=self.generator)
        return (normal.sign() * normal.abs().sqrt()).to(self.device)

    def explore(self, horizon: int) -> ExplorationNoise:
        layers = self.layer_noise(horizon, self.episodes.num_envs)
        return self.exploration.noise(horizon, self.episodes.num_envs)._replace(layers=layers)

    def act(self, obs: Tensor, noise: ExplorationNoise, t: int, progress: float) -> Tensor:
        layers = None if noise.layers is None else noise.layers[t]
        quick = self.one_row
        q = (lambda: self.net.q(obs, layers)) if quick is None else (lambda: quick(obs.numpy()))
        return self.exploration.chosen(q, noise, t, progress, self.episodes.mask)

    @torch.no_grad()
    def learn(self, updates: int, progress: float) -> Tensor:
        """Gradient steps, updates of the target network, and new priorities."""
        spec = self.spec
        lr = value(progress=progress, **spec.lr.arguments())
        paces = [pace(lr, spec.adam_eps, n, self.rule) for n in range(self.updates + 1, self.updates + updates + 1)]
        rates = iter(torch.tensor(paces).to(self.device).split(self.together))
        noise = self.layer_noise(updates, 3)
        noises = repeat(None) if noise is None else iter(noise.split(self.together))
        beta = None if self.beta is None else value(progress=progress, **self.beta.arguments())
        totals = torch.zeros(len(self.metrics), device=self.device)
        if self.obs_scale is not None:  # its statistics are buffers: the target network's follow
            for buffer, now in zip(self.target.net.buffers(), self.net.buffers(), strict=True):
                buffer.copy_(now)
        for batches in self.batches(updates, beta):
            errors = []
            for at in range(0, len(batches), self.together):
                errors.append(self._update(batches[at : at + self.together], next(rates), totals, next(noises)))
                self.updates += self.together
                if spec.target_every is not None and self.updates % spec.target_every == 0:
                    self.target.vector.copy_(self.flat.vector)
            if beta is not None:
                self.memory.update_priorities(torch.cat([batch.rows for batch in batches]), torch.cat(errors))
        return totals

    def update(self, batches: list[ReplayBatch], rates: Tensor, totals: Tensor, noise: Tensor | None = None) -> Tensor:
        """A gradient step on each, eager or all one graph; the TD errors, which become priorities."""
        errors = []
        noises = (None,) * len(batches) if noise is None else noise.unbind(0)
        for batch, rate, each in zip(batches, rates.unbind(0), noises, strict=True):
            errors.append(self.update_once(batch, rate, totals, each))
            if self.spec.target_every is None:
                self.target.vector.lerp_(self.flat.vector, self.spec.tau)
        return torch.cat(errors)

    def update_once(self, batch: ReplayBatch, rate: Tensor, totals: Tensor, noise: Tensor | None) -> Tensor:
        """One gradient step; the TD errors, (B,). What is learned, targets and their choice differ in noise."""
        learns, *others = (None, None, None) if noise is None else noise.unbind(0)
        targets = self.targets(batch, others)
        gradient, (errors, metrics) = self.flat.gradient(lambda net: self.loss(net, batch, targets, learns))
        gradient, norm = clip_norm(gradient, self.spec.max_grad_norm)
        self.trained.step(gradient, rate, rule=self.rule)
        totals.add_(torch.cat([metrics, norm.reshape(1)]))
        return errors

    def targets(self, batch: ReplayBatch, noise: Any = (None, None)) -> Tensor:
        """The TD targets, (B, outputs), without gradient."""
        following = self.target(self.target.vector)(batch.next_obs, noise[0])  # (B, A, outputs)
        chooses = self.flat(self.flat.vector)(batch.next_obs, noise[1]) if self.spec.double else following
        return self.backed_up(batch, following, chooses)

    def backed_up(self, rows: ReplayBatch, following: Tensor, chooses: Tensor) -> Tensor:
        """The targets of the successor's action that is best by `chooses`, both (B, A, outputs)."""
        best = forbid(self.net.expected(chooses), rows.next_masks).argmax(dim=1)
        chosen, support = _of_action(following, best), self.net.support
        rewards, discounts = rows.rewards[:, None], rows.discounts[:, None]
        if support is None:
            return (rewards + discounts * chosen).detach()
        return projected(chosen.softmax(dim=1), rewards + discounts * support, support).detach()

    def loss(self, net: Any, batch: ReplayBatch, targets: Tensor, noise: Tensor | None = None) -> Any:
        """Weighted mean of the Huber or quantile loss, or KL of the atoms; TD errors and metrics."""
        outputs, support = _of_action(net(batch.obs, noise), batch.actions), self.net.support  # (B, outputs)
        if self.spec.distributional is None:
            each = F.smooth_l1_loss(outputs, targets, reduction="none").squeeze(1)
        else:
            each = quantile_loss(outputs, targets) if support is None else atoms_loss(outputs, targets)
        loss = each.mean() if batch.weights is None else (batch.weights * each).mean()
        values = self.net.expected(outputs.detach())
        errors = (values - (targets.mean(dim=1) if support is None else targets @ support)).abs()
        if self.spec.distributional is not None and self.spec.prioritized is not None:
            errors = each.detach()  # equal means may hide different distributions
        metrics = torch.stack([loss.detach(), values.mean(), errors.mean()])
        return loss, (errors, metrics)

    def begin_from(self, given: Mapping[str, Any]) -> None:
        super().begin_from(given)
        self.target.net.load_state_dict(given.get("target", given["policy"]))

    def state(self) -> dict[str, Any]:
        target = self.target.vector.to("cpu", copy=True)
        return super().state() | {"trained": copied(self.trained), "target": target}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        restore(self.trained, state["trained"])
        self.target.vector.copy_(state["target"])


def _of_action(values: Tensor, actions: Tensor) -> Tensor:
    """Of (B, A, outputs), the rows of the given actions, (B, outputs)."""
    return values.gather(1, actions[:, None, None].expand(-1, 1, values.shape[2])).squeeze(1)
