"""CrossQ (Bhatt et al. 2024): SAC without target networks.

What it stores: transitions, in a replay memory.
How it acts: as SAC.
How it learns: as SAC, but critics with batch renormalisation see (s, a) and (s', a') as one batch, so that both are
normalised alike and no target networks are needed. The policy's step takes the critics as they would be used, by their
running statistics, and leaves these alone. Adam with a small β₁, and fewer steps of the policy than of the critics.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.actions import ActionHead
from palestra.control.algorithms.base import Parts
from palestra.control.algorithms.off_policy import OffPolicy
from palestra.control.compiling import compiled
from palestra.control.critics import RenormCritics
from palestra.control.memory.replay import Batch
from palestra.control.nets import Flat
from palestra.control.renorm import Running, Warmth
from palestra.control.scaling import obs_scale
from palestra.control.squashed import SoftActor, check_bounds
from palestra.control.vectors import Shaped, Trained, gradient, pace, put_back, taken
from palestra.rl.schedules import value
from palestra.rl.soft import alpha_slope, expected_soft_value, soft_value, target_entropy, td_target, twin_loss
from palestra.spec.control.off_policy import CrossQSpec
from palestra.spec.kinds.control import ControlSpec


class Learned(NamedTuple):
    """All that updates change."""

    actor: Trained
    critics: Trained
    running: list[Running]
    alpha: Trained  # log α, (1,)
    seen: Tensor  # metrics of the policy's last update: it has fewer than the critics


class CrossQ(OffPolicy):
    """The learner."""

    supports = ("discrete", "box")
    metrics = ("critic_loss", "q", "policy_loss", "entropy", "alpha")

    def __init__(self, parts: Parts):
        super().__init__(parts)
        assert isinstance(parts.spec.algorithm, CrossQSpec)
        spec = self.spec = parts.spec.algorithm
        check_bounds(self.head, "crossq")
        self.actors = Shaped(self.net)
        critics = RenormCritics(parts.obs_shape, self.head, parts.spec.net, self.scale, spec.renorm_momentum)
        self.critics = Shaped(critics.to(self.device))
        log_alpha = 0.0 if spec.alpha == "auto" else math.log(spec.alpha)
        self.learned = Learned(
            Trained.of(Flat(self.net).vector),  # the parameters of the network that acts are views of it
            Trained.of(self.critics.start()),
            [Running(*(part.to(self.device) for part in one)) for one in critics.start()],
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
            warmth = Warmth(*(part.to(self.device) for part in Warmth.after(self.updates, spec.renorm_warmup)))
            self.updates += 1
            rate = pace(critic_lr, spec.adam_eps, self.updates, spec.beta1).to(self.device)
            seen = self._update_critics(self.learned, batch, next_noise, warmth, rate)
            if self.updates % spec.policy_delay == 0:
                count = self.updates // spec.policy_delay
                rates = [pace(one, spec.adam_eps, count, spec.beta1).to(self.device) for one in (lr, alpha_lr)]
                self._update_policy(self.learned, batch.obs, policy_noise, *rates)
            totals += torch.cat([seen, self.learned.seen])
        return totals

    def update_critics(self, learned: Learned, batch: Batch, noise: Tensor, warmth: Warmth, rate: Tensor) -> Tensor:
        """One gradient step of the critics on the joint batch; the loss and the mean value."""
        policy = self.actors(learned.actor.vector)(batch.next_obs)
        alpha, rows = learned.alpha.vector.exp(), len(batch.rewards)
        obs = torch.cat([batch.obs, batch.next_obs])
        if self.head.continuous:
            next_actions, logprobs = policy.sample_scored(noise)
            actions = torch.cat([batch.actions, next_actions])
        else:
            logprobs, actions = policy.logprobs, None

        def loss(vector: Tensor) -> tuple[Tensor, tuple[Tensor, list[Running]]]:
            both, running = self.critics(vector)(obs, actions, learned.running, warmth)
            q, following = both.split(rows, dim=1)
            if self.head.continuous:
                values = soft_value(following, logprobs, alpha)
            else:
                values = expected_soft_value(following, logprobs, alpha)
                q = q.gather(2, batch.actions.expand(2, -1)[..., None])[..., 0]
            error = twin_loss(q, td_target(batch.rewards, batch.discounts, values))
            return error, (torch.stack([error.detach(), q.detach().mean()]), running)

        slope, (seen, running) = gradient(loss, learned.critics.vector)
        learned.critics.step(slope, rate, self.spec.max_grad_norm, self.spec.beta1)
        for before, after in zip(learned.running, running, strict=True):
            before.mean.copy_(after.mean)
            before.var.copy_(after.var)
        return seen

    def update_policy(self, learned: Learned, obs: Tensor, noise: Tensor, rate: Tensor, alpha_rate: Tensor) -> None:
        """One gradient step of the policy on what the critics say, which stay as they are, and one of α."""
        alpha, critics = learned.alpha.vector.exp(), self.critics(learned.critics.vector)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            policy = self.actors(vector)(obs)
            if self.head.continuous:
                actions, logprobs = policy.sample_scored(noise)
                q, _ = critics(obs, actions, learned.running)
                values, entropy = soft_value(q, logprobs, alpha), -logprobs
            else:
                q, _ = critics(obs, None, learned.running)
                values, entropy = expected_soft_value(q, policy.logprobs, alpha), policy.entropy()
            total = -values.mean()
            return total, torch.stack([total.detach(), entropy.detach().mean()])

        slope, seen = gradient(loss, learned.actor.vector)
        learned.seen.copy_(torch.cat([seen, alpha]))
        learned.actor.step(slope, rate, self.spec.max_grad_norm, self.spec.beta1)
        if self.spec.alpha == "auto":
            learned.alpha.step(
                alpha_slope(learned.alpha.vector, seen[1], self.target_entropy), alpha_rate, None, self.spec.beta1
            )

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return super().state() | {"learned": taken(self.learned)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        super().load_state(state)
        put_back(self.learned, state["learned"])
