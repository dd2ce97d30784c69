"""Soft actor-critic (Haarnoja et al. 2018): maximizes return plus entropy.

What it stores: transitions, in a replay memory.
How it acts: it samples from the policy, a squashed Gaussian or, for Discrete actions, a softmax; evenly before `start`.
How it learns: twin critics towards the soft value of what follows, whose smaller one the policy climbs; the weight α of
the entropy is tuned towards a target. With Discrete actions every expectation over them is exact (Christodoulou 2019),
with the smaller of the twins for each action there too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import Inputs, TwinCritics
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.actor_critic import Flat
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.values import Critics, SoftActor
from palestra.control.optim import BETA1, Shaped, Trained, gradient, pace
from palestra.control.scaling import obs_scale
from palestra.rl.losses import (
    alpha_slope,
    expected_soft_value,
    polyak,
    soft_value,
    target_entropy,
    td_target,
    twin_loss,
)
from palestra.spec.kinds.control import ControlSpec, CrossQSpec, SACSpec

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


class SacState(NamedTuple):
    """All that updates change."""

    actor: Trained
    critics: Trained
    target: Tensor
    alpha: Trained  # log α, (1,)
    seen: Tensor  # metrics of the policy's last update: it may have fewer than the critics


class SAC(TwinCritics):
    """The learner."""

    supports = ("discrete", "box")
    metrics = ("critic_loss", "q", "policy_loss", "entropy", "alpha")

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        self.soft = SoftPolicy(Shaped(self.net), self.head, self.spec, getattr(self.spec, "beta1", BETA1))
        self.learned = self.start(parts)

    def start(self, parts: AlgorithmParts) -> Any:
        """The critics, and all that updates change, before the first."""
        self.critics = Shaped(Critics(parts.obs_shape, self.head, parts.spec.net, self.scale).to(self.device))
        start = self.critics.start()
        return SacState(self.started_actor(), Trained.of(start), start.clone(), self.started_alpha(), self.unseen())

    def started_actor(self) -> Trained:
        """The parameters of the network that acts are views of its vector."""
        return Trained.of(Flat(self.net).vector)

    def started_alpha(self) -> Trained:
        return Trained.of(self.soft.log_alpha().to(self.device))

    def unseen(self) -> Tensor:
        return torch.zeros(3, device=self.device)

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> SoftActor:
        """The policy; the critics are not part of what acts."""
        return SoftActor(obs_shape, head, spec.net, obs_scale(spec.env, obs_shape))

    def act(self, obs: Tensor, noise: Tensor, t: int, progress: float) -> Tensor:
        """Actions sampled from the policy."""
        return self.net.forward(obs).sample(noise[t])

    def inputs(self, updates: int, progress: float) -> Inputs:
        """Noise for the critics' and the policy's actions; the paces of the critics, of the policy and of α."""
        lr, critic_lr, alpha_lr = (self.rate(name, progress) for name in ("lr", "critic_lr", "alpha_lr"))
        noise = self.soft.noise(self.generator, updates)
        return Inputs(noise, self.soft.rates(self.updates, updates, critic_lr, lr, alpha_lr))

    def step_critics(self, learned: Any, batch: ReplayBatch, given: Inputs) -> Tensor:
        """One gradient step of the critics, then the targets follow; the loss and the mean value."""
        actions, logprobs, _ = self.soft.drawn(learned.actor.vector, batch.next_obs, given.noise[0])
        following = self.critics(learned.target)(batch.next_obs, actions)
        values = self.soft.value(following, logprobs, learned.alpha.vector.exp())
        targets = td_target(batch.rewards, batch.discounts, values)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            q = self.chosen(self.critics(vector)(batch.obs, batch.actions), batch)
            error = twin_loss(q, targets)
            return error, torch.stack([error.detach(), q.detach().mean()])

        slope, seen = gradient(loss, learned.critics.vector)
        learned.critics.step(slope, given.rates[0], self.spec.max_grad_norm)
        learned.target.copy_(polyak(learned.target, learned.critics.vector, self.spec.tau))
        return seen

    def chosen(self, q: Tensor, batch: ReplayBatch) -> Tensor:
        """The values of the actions that were taken, (2, B)."""
        return q if self.head.continuous else q.gather(2, batch.actions.expand(2, -1)[..., None])[..., 0]

    def step_policy(self, learned: Any, obs: Tensor, given: Inputs) -> None:
        """One gradient step of the policy on what the critics say, which stay as they are, and one of α."""
        q = self.values_of(learned, obs)
        learned.seen.copy_(self.soft.step(learned.actor, learned.alpha, q, obs, given.noise[1], given.rates[1:]))

    def values_of(self, learned: Any, obs: Tensor) -> Q:
        """The critics as the policy sees them."""
        critics = self.critics(learned.critics.vector)
        return lambda actions: critics(obs, actions)
