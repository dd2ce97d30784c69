"""CrossQ (Bhatt et al. 2024): SAC without target networks.

What it stores: transitions, in a replay memory.
How it acts: as SAC.
How it learns: as SAC, but critics with batch renormalisation see (s, a) and (s', a') as one batch, so that both are
normalised alike and no target networks are needed. The policy's step takes the critics as they would be used, by their
running statistics, and leaves these alone. Adam with a small β₁, and fewer steps of the policy than of the critics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import OffPolicy
from palestra.control.algorithms.sac import SoftPolicy
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.actor_critic import Flat
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.values import RenormCritics, Running, SoftActor, check_bounds, warmth_after
from palestra.control.optim import Shaped, Trained, compiled, gradient, put_back, taken
from palestra.control.scaling import obs_scale
from palestra.rl.losses import td_target, twin_loss
from palestra.rl.schedules import value
from palestra.spec.kinds.control import ControlSpec, CrossQSpec


class CrossqState(NamedTuple):
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

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        assert isinstance(parts.spec.algorithm, CrossQSpec)
        spec = self.spec = parts.spec.algorithm
        check_bounds(self.head, "crossq")
        self.soft = SoftPolicy(Shaped(self.net), self.head, spec, spec.beta1)
        critics = RenormCritics(parts.obs_shape, self.head, parts.spec.net, self.scale, spec.renorm_momentum)
        self.critics = Shaped(critics.to(self.device))
        self.learned = CrossqState(
            Trained.of(Flat(self.net).vector),  # the parameters of the network that acts are views of it
            Trained.of(self.critics.start()),
            [Running(*(part.to(self.device) for part in one)) for one in critics.start()],
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
        warmths = [warmth_after(self.updates + n, spec.renorm_warmup) for n in range(updates)]
        totals = torch.zeros(len(self.metrics), device=self.device)
        per_update = zip(self.batches(updates), noise, rates, torch.tensor(warmths).to(self.device), strict=True)
        for batch, drawn, rate, warmth in per_update:
            self.updates += 1
            both = self.updates % spec.policy_delay == 0
            (self._update if both else self._update_critics)(self.learned, batch, drawn, rate, warmth, totals)
        return totals

    def update(
        self, learned: CrossqState, batch: ReplayBatch, noise: Tensor, rates: Tensor, warmth: Tensor, totals: Tensor
    ) -> None:
        """One gradient step of the critics, then one of the policy and of α."""
        seen = self.step_critics(learned, batch, noise[0], rates[0], warmth)
        self.step_policy(learned, batch.obs, noise[1], rates[1:])
        totals.add_(torch.cat([seen, learned.seen]))

    def update_critics(
        self, learned: CrossqState, batch: ReplayBatch, noise: Tensor, rates: Tensor, warmth: Tensor, totals: Tensor
    ) -> None:
        """One gradient step of the critics alone."""
        seen = self.step_critics(learned, batch, noise[0], rates[0], warmth)
        totals.add_(torch.cat([seen, learned.seen]))

    def step_critics(
        self, learned: CrossqState, batch: ReplayBatch, noise: Tensor, rate: Tensor, warmth: Tensor
    ) -> Tensor:
        """One gradient step of the critics on the joint batch; the loss and the mean value."""
        next_actions, logprobs, _ = self.soft.drawn(learned.actor.vector, batch.next_obs, noise)
        alpha, rows = learned.alpha.vector.exp(), len(batch.rewards)
        obs = torch.cat([batch.obs, batch.next_obs])
        actions = None if next_actions is None else torch.cat([batch.actions, next_actions])

        def loss(vector: Tensor) -> tuple[Tensor, tuple[Tensor, list[Running]]]:
            both, running = self.critics(vector)(obs, actions, learned.running, warmth)
            q, following = both.split(rows, dim=1)
            if not self.head.continuous:
                q = q.gather(2, batch.actions.expand(2, -1)[..., None])[..., 0]
            values = self.soft.value(following, logprobs, alpha)
            error = twin_loss(q, td_target(batch.rewards, batch.discounts, values))
            return error, (torch.stack([error.detach(), q.detach().mean()]), running)

        slope, (seen, running) = gradient(loss, learned.critics.vector)
        learned.critics.step(slope, rate, self.spec.max_grad_norm, self.spec.beta1)
        for before, after in zip(learned.running, running, strict=True):
            before.mean.copy_(after.mean)
            before.var.copy_(after.var)
        return seen

    def step_policy(self, learned: CrossqState, obs: Tensor, noise: Tensor, rates: Tensor) -> None:
        """One gradient step of the policy on what the critics say, which stay as they are, and one of α."""
        critics = self.critics(learned.critics.vector)

        def q(actions: Tensor | None) -> Tensor:
            return critics(obs, actions, learned.running)[0]

        learned.seen.copy_(self.soft.step(learned.actor, learned.alpha, q, obs, noise, rates))

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return super().state() | {"learned": taken(self.learned)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        super().load_state(state)
        put_back(self.learned, state["learned"])
