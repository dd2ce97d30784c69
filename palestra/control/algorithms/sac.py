"""Soft actor-critic (Haarnoja et al. 2018): the policy that pays best while it stays as random as it may.

What it stores: transitions, in a replay memory.
How it acts: it samples from the policy, a squashed Gaussian or, for Discrete actions, a softmax; evenly before `start`.
How it learns: twin critics towards the soft value of what follows, whose smaller one the policy climbs; the weight α of
the entropy is tuned towards a target. With Discrete actions every expectation over them is exact (Christodoulou 2019),
with the smaller of the twins for each action there too.
"""

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
from palestra.control.soft_policy import SoftPolicy
from palestra.control.squashed import SoftActor, check_bounds
from palestra.control.vectors import Shaped, Trained, gradient, put_back, taken
from palestra.rl.schedules import value
from palestra.rl.soft import polyak, td_target, twin_loss
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
        self.soft = SoftPolicy(Shaped(self.net), self.head, spec)
        self.critics = Shaped(Critics(parts.obs_shape, self.head, parts.spec.net, self.scale).to(self.device))
        start = self.critics.start()
        self.learned = Learned(
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

    def update(self, learned: Learned, batch: Batch, noise: Tensor, rates: Tensor, totals: Tensor) -> None:
        """One gradient step of the critics, then one of the policy and of α."""
        seen = self.step_critics(learned, batch, noise[0], rates[0])
        self.step_policy(learned, batch.obs, noise[1], rates[1:])
        totals.add_(torch.cat([seen, learned.seen]))

    def update_critics(self, learned: Learned, batch: Batch, noise: Tensor, rates: Tensor, totals: Tensor) -> None:
        """One gradient step of the critics alone."""
        totals.add_(torch.cat([self.step_critics(learned, batch, noise[0], rates[0]), learned.seen]))

    def step_critics(self, learned: Learned, batch: Batch, noise: Tensor, rate: Tensor) -> Tensor:
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

    def step_policy(self, learned: Learned, obs: Tensor, noise: Tensor, rates: Tensor) -> None:
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
