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
from palestra.control.algorithms.off_policy import OffPolicy
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.actor_critic import Flat
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.values import Critics, SoftActor, check_bounds
from palestra.control.optim import BETA1, Shaped, Trained, compiled, gradient, pace, put_back, taken
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
from palestra.rl.schedules import value
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


class SAC(OffPolicy):
    """The learner."""

    supports = ("discrete", "box")
    metrics = ("critic_loss", "q", "policy_loss", "entropy", "alpha")

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        assert isinstance(parts.spec.algorithm, SACSpec)
        spec = self.spec = parts.spec.algorithm
        check_bounds(self.head, "sac")
        self.soft = SoftPolicy(Shaped(self.net), self.head, spec)
        self.critics = Shaped(Critics(parts.obs_shape, self.head, parts.spec.net, self.scale).to(self.device))
        start = self.critics.start()
        self.learned = SacState(
            Trained.of(Flat(self.net).vector),  # the parameters of the network that acts are views of it
            Trained.of(start),
            start.clone(),
            Trained.of(self.soft.log_alpha().to(self.device)),
            torch.zeros(3, device=self.device),
        )
        self._update, self._update_critics = self.update, self.update_critics
        if parts.compile:
            self._update, self._update_critics = compiled(self.update), compiled(self.update_critics)

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> SoftActor:
        """The policy; the critics are not part of what acts."""
        return SoftActor(obs_shape, head, spec.net, obs_scale(spec.env, obs_shape))

    def explore(self, horizon: int) -> Tensor:
        """The noise of a whole step."""
        return self.head.noise(self.generator, horizon, self.episodes.num_envs).to(self.device)

    def act(self, obs: Tensor, noise: Tensor, t: int, progress: float) -> Tensor:
        """Actions drawn from the policy."""
        return self.net.forward(obs).sample(noise[t])

    @torch.no_grad()
    def learn(self, updates: int, progress: float) -> Tensor:
        """Gradient steps of the critics, and every `policy_delay` of them one of the policy and of α."""
        spec = self.spec
        lr, critic_lr, alpha_lr = (
            value(progress=progress, **(rate or spec.lr).arguments())
            for rate in (spec.lr, spec.critic_lr, spec.alpha_lr)
        )
        noise = self.soft.noise(self.generator, updates).to(self.device)
        rates = self.soft.rates(self.updates, updates, critic_lr, lr, alpha_lr).to(self.device)
        totals = torch.zeros(len(self.metrics), device=self.device)
        for batch, drawn, rate in zip(self.batches(updates), noise, rates, strict=True):
            self.updates += 1
            both = self.updates % spec.policy_delay == 0
            (self._update if both else self._update_critics)(self.learned, batch, drawn, rate, totals)
        return totals

    def update(self, learned: SacState, batch: ReplayBatch, noise: Tensor, rates: Tensor, totals: Tensor) -> None:
        """One gradient step of the critics, then one of the policy and of α."""
        seen = self.step_critics(learned, batch, noise[0], rates[0])
        self.step_policy(learned, batch.obs, noise[1], rates[1:])
        totals.add_(torch.cat([seen, learned.seen]))

    def update_critics(
        self, learned: SacState, batch: ReplayBatch, noise: Tensor, rates: Tensor, totals: Tensor
    ) -> None:
        """One gradient step of the critics alone."""
        totals.add_(torch.cat([self.step_critics(learned, batch, noise[0], rates[0]), learned.seen]))

    def step_critics(self, learned: SacState, batch: ReplayBatch, noise: Tensor, rate: Tensor) -> Tensor:
        """One gradient step of the critics, then the targets follow; the loss and the mean value."""
        actions, logprobs, _ = self.soft.drawn(learned.actor.vector, batch.next_obs, noise)
        following = self.critics(learned.target)(batch.next_obs, actions)
        values = self.soft.value(following, logprobs, learned.alpha.vector.exp())
        targets = td_target(batch.rewards, batch.discounts, values)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            q = self.critics(vector)(batch.obs, batch.actions)
            if not self.head.continuous:
                q = q.gather(2, batch.actions.expand(2, -1)[..., None])[..., 0]
            error = twin_loss(q, targets)
            return error, torch.stack([error.detach(), q.detach().mean()])

        slope, seen = gradient(loss, learned.critics.vector)
        learned.critics.step(slope, rate, self.spec.max_grad_norm)
        learned.target.copy_(polyak(learned.target, learned.critics.vector, self.spec.tau))
        return seen

    def step_policy(self, learned: SacState, obs: Tensor, noise: Tensor, rates: Tensor) -> None:
        """One gradient step of the policy on what the critics say, which stay as they are, and one of α."""
        critics = self.critics(learned.critics.vector)
        seen = self.soft.step(learned.actor, learned.alpha, lambda actions: critics(obs, actions), obs, noise, rates)
        learned.seen.copy_(seen)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return super().state() | {"learned": taken(self.learned)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        super().load_state(state)
        put_back(self.learned, state["learned"])
