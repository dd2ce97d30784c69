"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018).

What it stores: transitions, in a replay memory.
How it acts: the policy's action with Gaussian noise, within the bounds; evenly before `start`.
How it learns: twin critics towards the smaller of their targets' values of a smoothed target action; every
`policy_delay` gradient steps of theirs the policy climbs the first critic, and only then the targets follow.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import OffPolicy
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.actor_critic import Flat
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.values import Critics, DeterministicActor, check_bounds
from palestra.control.optim import Shaped, Trained, compiled, gradient, pace, put_back, taken
from palestra.control.scaling import obs_scale
from palestra.rl.losses import polyak, td_target, twin_loss
from palestra.rl.schedules import value
from palestra.spec.kinds.control import ControlSpec, TD3Spec


class Td3State(NamedTuple):
    """All that updates change."""

    actor: Trained
    critics: Trained
    actor_target: Tensor
    critic_target: Tensor
    seen: Tensor  # the policy's loss at its last update: it has fewer than the critics


class TD3(OffPolicy):
    """The learner."""

    supports = ("box",)
    metrics = ("critic_loss", "q", "policy_loss")

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        assert isinstance(parts.spec.algorithm, TD3Spec)
        self.spec = parts.spec.algorithm
        check_bounds(self.head, "td3")
        self.actors = Shaped(self.net)
        self.critics = Shaped(Critics(parts.obs_shape, self.head, parts.spec.net, self.scale).to(self.device))
        actor, critics = Flat(self.net).vector, self.critics.start()  # the network that acts has views of the vector
        seen = torch.zeros(1, device=self.device)
        self.learned = Td3State(Trained.of(actor), Trained.of(critics), actor.clone(), critics.clone(), seen)
        self._update, self._update_critics = self.update, self.update_critics
        if parts.compile:
            self._update, self._update_critics = compiled(self.update), compiled(self.update_critics)

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> DeterministicActor:
        """The policy; the critics are not part of what acts."""
        return DeterministicActor(obs_shape, head, spec.net, obs_scale(spec.env, obs_shape))

    def explore(self, horizon: int) -> Tensor:
        """The noise of a whole step."""
        return self.head.noise(self.generator, horizon, self.episodes.num_envs).to(self.device)

    def act(self, obs: Tensor, noise: Tensor, t: int, progress: float) -> Tensor:
        """The policy's actions with noise, within the bounds."""
        std = value(progress=progress, **self.spec.noise.arguments())
        return (self.net.forward(obs) + std * noise[t]).clamp(-1.0, 1.0)

    @torch.no_grad()
    def learn(self, updates: int, progress: float) -> Tensor:
        """Gradient steps of the critics, and every `policy_delay` of them one of the policy and of the targets."""
        spec = self.spec
        lr, critic_lr = (
            value(progress=progress, **(rate or spec.lr).arguments()) for rate in (spec.lr, spec.critic_lr)
        )
        noise = self.head.noise(self.generator, updates, spec.batch).to(self.device)
        counts = [(n, n // spec.policy_delay) for n in range(self.updates + 1, self.updates + updates + 1)]
        paces = [[pace(critic_lr, spec.adam_eps, n), pace(lr, spec.adam_eps, m or 1)] for n, m in counts]
        rates = torch.tensor(paces).to(self.device)
        totals = torch.zeros(len(self.metrics), device=self.device)
        for batch, smoothing, rate in zip(self.batches(updates), noise, rates, strict=True):
            self.updates += 1
            both = self.updates % spec.policy_delay == 0
            (self._update if both else self._update_critics)(self.learned, batch, smoothing, rate, totals)
        return totals

    def smoothed(self, actions: Tensor, noise: Tensor) -> Tensor:
        """Actions of the target policy with clipped noise, within the bounds: similar actions get similar values."""
        clip = self.spec.noise_clip
        return (actions + (self.spec.target_noise * noise).clamp(-clip, clip)).clamp(-1.0, 1.0)

    def update(self, learned: Td3State, batch: ReplayBatch, noise: Tensor, rates: Tensor, totals: Tensor) -> None:
        """One gradient step of the critics, then one of the policy, and the targets follow."""
        seen = self.step_critics(learned, batch, noise, rates[0])
        self.step_policy(learned, batch.obs, rates[1])
        totals.add_(torch.cat([seen, learned.seen]))

    def update_critics(
        self, learned: Td3State, batch: ReplayBatch, noise: Tensor, rates: Tensor, totals: Tensor
    ) -> None:
        """One gradient step of the critics alone."""
        totals.add_(torch.cat([self.step_critics(learned, batch, noise, rates[0]), learned.seen]))

    def step_critics(self, learned: Td3State, batch: ReplayBatch, noise: Tensor, rate: Tensor) -> Tensor:
        """One gradient step of the critics; the loss and the mean value."""
        actions = self.smoothed(self.actors(learned.actor_target)(batch.next_obs), noise)
        values = self.critics(learned.critic_target)(batch.next_obs, actions).amin(dim=0)
        targets = td_target(batch.rewards, batch.discounts, values)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            q = self.critics(vector)(batch.obs, batch.actions)
            error = twin_loss(q, targets)
            return error, torch.stack([error.detach(), q.detach().mean()])

        slope, seen = gradient(loss, learned.critics.vector)
        learned.critics.step(slope, rate, self.spec.max_grad_norm)
        return seen

    def step_policy(self, learned: Td3State, obs: Tensor, rate: Tensor) -> None:
        """One gradient step of the policy on the first critic, which stays as it is; then both targets follow."""
        critics = self.critics(learned.critics.vector)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            total = -critics(obs, self.actors(vector)(obs), 1).mean()
            return total, total.detach()[None]

        slope, seen = gradient(loss, learned.actor.vector)
        learned.seen.copy_(seen)
        learned.actor.step(slope, rate, self.spec.max_grad_norm)
        learned.actor_target.copy_(polyak(learned.actor_target, learned.actor.vector, self.spec.tau))
        learned.critic_target.copy_(polyak(learned.critic_target, learned.critics.vector, self.spec.tau))

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return super().state() | {"learned": taken(self.learned)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        super().load_state(state)
        put_back(self.learned, state["learned"])
