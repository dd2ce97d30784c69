"""Learning from a file alone: behavior cloning, TD3+BC (Fujimoto & Gu 2021) and IQL (Kostrikov et al. 2022).

What they store: nothing; the file is read once and sampled uniformly. The environment only evaluates.
How they learn: BC raises the likelihood of the file's actions. TD3+BC is TD3 whose policy also stays near them. IQL
learns V as an expectile of Q over them, Q from V of the successor, so that no action outside of the file is valued,
and a policy by the likelihood of the file's actions weighted by exp(β · advantage).
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import Inputs, OffPolicy, TwinCritics, critic_loss
from palestra.control.algorithms.td3 import TD3
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.actor_critic import PolicyNet
from palestra.control.nets.trunks import Trunk, linear
from palestra.control.nets.values import Critics
from palestra.control.optim import FlatNet, FunctionalNet, Trained, copied, no_denormals, pace, restore
from palestra.control.transitions import Transitions
from palestra.rl.losses import expectile_loss, polyak
from palestra.rl.schedules import value


class Offline(OffPolicy):
    """A learner whose memory is a file; each gradient step counts as a frame."""

    memory: Transitions

    def make_memory(self, parts: AlgorithmParts) -> Any:
        return Transitions(Path(self.spec.data), parts.head, parts.obs_shape, self.spec.gamma, parts.device)

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        if self.obs_scale is not None:
            self.obs_scale.update(self.memory.obs)  # once: the file does not change
        self.memory.rewards = self.rewards.storable(self.memory.rewards)

    def step(self, progress: float) -> dict[str, float]:
        """`horizon` gradient steps."""
        with self.span("learn"), no_denormals():
            totals = self.learn(self.spec.horizon, progress)
        self.episodes.frame += self.spec.horizon
        means = (totals / self.spec.horizon).tolist()
        return dict(zip(self.metrics, means, strict=True)) | {"updates": self.updates}

    def explore(self, horizon: int) -> Any:
        raise NotImplementedError("an offline algorithm does not act while it learns")

    def act(self, obs: Tensor, noise: Any, t: int, progress: float) -> Tensor:
        raise NotImplementedError("an offline algorithm does not act while it learns")

    def cut(self, rows: Any) -> None:
        """Environments that restarted matter to nothing here."""


class BC(Offline):
    """Behavior cloning."""

    supports = ("discrete", "multi_discrete", "multi_binary", "box")
    network = PolicyNet
    metrics = ("loss",)

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        self.flat = FlatNet(self.net)
        self.trained = Trained.of(self.flat.vector)
        self._update = parts.compiled(self.update)

    @torch.no_grad()
    def learn(self, updates: int, progress: float) -> Tensor:
        lr, totals = value(progress=progress, **self.spec.lr.arguments()), torch.zeros(1, device=self.device)
        for batch in (batch for group in self.batches(updates) for batch in group):
            self.updates += 1
            rate = torch.tensor(pace(lr, self.spec.adam_eps, self.updates, self.rule), device=self.device)
            totals += self._update(batch, rate)
        return totals

    def update(self, batch: ReplayBatch, rate: Tensor) -> Tensor:
        """One gradient step; the loss, (1,)."""

        def loss(net: Any) -> tuple[Tensor, Tensor]:
            total = -net(batch.obs).log_prob(batch.actions).mean()
            return total, total.detach()[None]

        gradient, seen = self.flat.gradient(loss)
        self.trained.step(gradient, rate, self.spec.max_grad_norm, self.rule)
        return seen

    def state(self) -> dict[str, Any]:
        return super().state() | {"trained": copied(self.trained)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        restore(self.trained, state["trained"])


class TD3BC(Offline, TD3):
    """TD3+BC."""

    def step_policy(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> None:
        """One gradient step of the policy near the file's actions; both targets follow."""
        critics = self.critics(learned.critics.vector)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            actions = self.actors(vector)(batch.obs)
            q = critics(batch.obs, actions, 1)
            near = (actions - batch.actions).square().mean()
            total = near - self.spec.alpha * q.mean() / q.detach().abs().mean()
            return total, total.detach()[None]

        learned.seen.copy_(learned.actor.descend(loss, inputs.rates[1], self.spec.max_grad_norm, self.rule))
        learned.actor_target.copy_(polyak(learned.actor_target, learned.actor.vector, self.spec.tau))
        learned.critic_target.copy_(polyak(learned.critic_target, learned.critics.vector, self.spec.tau))


class ValueNet(nn.Module):
    """V of observations, (B,)."""

    def __init__(self, parts: AlgorithmParts, obs_scale: nn.Module | None):
        super().__init__()
        net = parts.spec.net
        self.trunk = Trunk(parts.obs_shape, net, net.critic_hidden, obs_scale)
        self.head = linear(self.trunk.size, 1, 1.0 if net.orthogonal else None)

    def forward(self, obs: Tensor) -> Tensor:
        return self.head(self.trunk.forward(obs)).squeeze(-1)


class IqlState(NamedTuple):
    """All that updates change; saved by position, so the order of fields is part of checkpoints."""

    actor: Trained
    critics: Trained
    values: Trained
    target: Tensor
    seen: Tensor  # metrics of the last update


class IQL(Offline, TwinCritics):
    """Implicit Q-learning."""

    supports = ("discrete", "box")
    network = PolicyNet
    metrics = ("critic_loss", "q", "policy_loss", "value_loss", "weight")

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        critics = Critics(parts.obs_shape, self.head, parts.spec.net, self.obs_scale)
        self.critics = FunctionalNet(critics.to(self.device))
        self.values = FunctionalNet(ValueNet(parts, self.obs_scale).to(self.device))
        q, seen = self.critics.start(), torch.zeros(3, device=self.device)
        actor, critics, values = map(Trained.of, (self.actors.vector, q, self.values.start()))
        self.learned = IqlState(actor, critics, values, q.clone(), seen)

    def inputs(self, updates: int, progress: float) -> Inputs:
        """The paces of critics and values, and of the policy; nothing is sampled."""
        return Inputs(torch.zeros(updates, 1), self.rates(updates, progress, "lr"))

    def q(self, vector: Tensor, batch: ReplayBatch) -> Tensor:
        """Both critics' values of the file's actions, (2, B)."""
        q = self.critics(vector)(batch.obs, batch.actions)
        return q if self.head.continuous else q.gather(2, batch.actions.expand(2, -1)[..., None])[..., 0]

    def step_critics(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> Tensor:
        """One gradient step of V on the targets' smaller value (eq. 5), one of Q on V of the successor (eq. 6)."""
        smaller = self.q(learned.target, batch).amin(dim=0)

        def value_loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            loss = expectile_loss(smaller - self.values(vector)(batch.obs), self.spec.expectile).mean()
            return loss, loss.detach()[None]

        seen = learned.values.descend(value_loss, inputs.rates[0], self.spec.max_grad_norm, self.rule)
        following = self.values(learned.values.vector)(batch.next_obs)
        critics = learned.critics.descend(
            lambda vector: critic_loss(self.q(vector, batch), batch, following),
            inputs.rates[0],
            self.spec.max_grad_norm,
            self.rule,
        )
        learned.target.copy_(polyak(learned.target, learned.critics.vector, self.spec.tau))
        learned.seen[1:2].copy_(seen)
        return critics

    def step_policy(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> None:
        """One gradient step of the policy, by the weighted likelihood of the file's actions (eq. 7)."""
        advantage = self.q(learned.target, batch).amin(dim=0) - self.values(learned.values.vector)(batch.obs)
        weights = (self.spec.beta * advantage).exp().clamp(max=self.spec.max_weight)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            total = -(weights * self.actors(vector)(batch.obs).log_prob(batch.actions)).mean()
            return total, total.detach()[None]

        policy = learned.actor.descend(loss, inputs.rates[1], self.spec.max_grad_norm, self.rule)
        learned.seen.copy_(torch.cat([policy, learned.seen[1:2], weights.mean()[None]]))
