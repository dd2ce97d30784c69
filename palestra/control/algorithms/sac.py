"""Soft actor-critic (Haarnoja et al. 2018): the policy that pays best while it stays as random as it may.

What it stores: transitions, in a replay memory.
How it acts: it samples from the policy, a squashed Gaussian or, for Discrete actions, a softmax; evenly before `start`.
How it learns: twin critics towards the soft value of what follows, whose smaller one the policy climbs; the weight α of
the entropy is tuned towards a target. With Discrete actions every expectation over them is exact (Christodoulou 2019),
with the smaller of the twins for each action there too.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.actions import ActionHead
from palestra.control.algorithms.base import Parts
from palestra.control.algorithms.off_policy import OffPolicy
from palestra.control.compiling import compiled
from palestra.control.critics import Critics
from palestra.control.memory.replay import Batch
from palestra.control.nets import Flat
from palestra.control.scaling import obs_scale
from palestra.control.squashed import SoftActor, check_bounds
from palestra.control.vectors import Shaped, Trained, gradient, pace, put_back, taken
from palestra.rl.schedules import value
from palestra.rl.soft import (
    alpha_slope,
    expected_soft_value,
    polyak,
    soft_value,
    target_entropy,
    td_target,
    twin_loss,
)
from palestra.spec.control.off_policy import SACSpec
from palestra.spec.kinds.control import ControlSpec


class Learned(NamedTuple):
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

    def __init__(self, parts: Parts):
        super().__init__(parts)
        assert isinstance(parts.spec.algorithm, SACSpec)
        spec = self.spec = parts.spec.algorithm
        check_bounds(self.head, "sac")
        self.actors = Shaped(self.net)
        self.critics = Shaped(Critics(parts.obs_shape, self.head, parts.spec.net, self.scale).to(self.device))
        start = self.critics.start()
        log_alpha = 0.0 if spec.alpha == "auto" else math.log(spec.alpha)
        self.learned = Learned(
            Trained.of(Flat(self.net).vector),  # the parameters of the network that acts are views of it
            Trained.of(start),
            start.clone(),
            Trained.of(torch.full((1,), log_alpha, device=self.device)),
            torch.zeros(3, device=self.device),
        )
        given = spec.target_entropy
        automatic = target_entropy(self.head.outputs, discrete=not self.head.continuous)
        self.target_entropy = automatic if given == "auto" else given
        self._update_critics, self._update_policy = self.update_critics, self.update_policy
        if parts.compile:
            self._update_critics, self._update_policy = compiled(self.update_critics), compiled(self.update_policy)

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
        drawn = spec.batch if self.head.continuous else 0  # expectations over Discrete actions are exact
        noise = self.head.noise(self.generator, updates, 2, drawn).to(self.device)
        totals = torch.zeros(len(self.metrics), device=self.device)
        for batch, (next_noise, policy_noise) in zip(self.batches(updates), noise, strict=True):
            self.updates += 1
            rate = pace(critic_lr, spec.adam_eps, self.updates).to(self.device)
            seen = self._update_critics(self.learned, batch, next_noise, rate)
            if self.updates % spec.policy_delay == 0:
                count = self.updates // spec.policy_delay
                rates = [pace(one, spec.adam_eps, count).to(self.device) for one in (lr, alpha_lr)]
                self._update_policy(self.learned, batch.obs, policy_noise, *rates)
            totals += torch.cat([seen, self.learned.seen])
        return totals

    def update_critics(self, learned: Learned, batch: Batch, noise: Tensor, rate: Tensor) -> Tensor:
        """One gradient step of the critics, then the targets follow; the loss and the mean value."""
        policy = self.actors(learned.actor.vector)(batch.next_obs)
        target, alpha = self.critics(learned.target), learned.alpha.vector.exp()
        if self.head.continuous:
            actions, logprobs = policy.sample_scored(noise)
            values = soft_value(target(batch.next_obs, actions), logprobs, alpha)
        else:
            values = expected_soft_value(target(batch.next_obs), policy.logprobs, alpha)
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

    def update_policy(self, learned: Learned, obs: Tensor, noise: Tensor, rate: Tensor, alpha_rate: Tensor) -> None:
        """One gradient step of the policy on what the critics say, which stay as they are, and one of α."""
        alpha, critics = learned.alpha.vector.exp(), self.critics(learned.critics.vector)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            policy = self.actors(vector)(obs)
            if self.head.continuous:
                actions, logprobs = policy.sample_scored(noise)
                values, entropy = soft_value(critics(obs, actions), logprobs, alpha), -logprobs
            else:
                values = expected_soft_value(critics(obs), policy.logprobs, alpha)
                entropy = policy.entropy()
            total = -values.mean()
            return total, torch.stack([total.detach(), entropy.detach().mean()])

        slope, seen = gradient(loss, learned.actor.vector)
        learned.seen.copy_(torch.cat([seen, alpha]))
        learned.actor.step(slope, rate, self.spec.max_grad_norm)
        if self.spec.alpha == "auto":
            learned.alpha.step(alpha_slope(learned.alpha.vector, seen[1], self.target_entropy), alpha_rate)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return super().state() | {"learned": taken(self.learned)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        super().load_state(state)
        put_back(self.learned, state["learned"])
