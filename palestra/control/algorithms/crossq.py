"""CrossQ (Bhatt et al. 2024): SAC without target networks.

What it stores: transitions, in a replay memory.
How it acts: as SAC.
How it learns: as SAC, but critics with batch renormalization see (s, a) and (s', a') as one batch, so that both are
normalized alike and no target networks are needed. The policy's step evaluates the critics under their running
statistics and does not change these. Adam with a small β₁, and fewer steps of the policy than of the critics.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import Inputs, critic_loss
from palestra.control.algorithms.sac import SAC, Q
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.values import RenormCritics, Running, warmth_after
from palestra.control.optim import FunctionalNet, Trained


class CrossqState(NamedTuple):
    """All that updates change; saved by position, so the order of fields is part of checkpoints."""

    actor: Trained
    critics: Trained
    running: list[Running]
    alpha: Trained  # log α, (1,)
    seen: Tensor  # metrics of the policy's last update: it has fewer than the critics


class CrossQ(SAC):
    """The learner."""

    def start(self, parts: AlgorithmParts) -> CrossqState:
        """The critics, and all that updates change, before the first."""
        critics = RenormCritics(parts.obs_shape, self.head, parts.spec.net, self.obs_scale, self.spec.renorm_momentum)
        self.critics = FunctionalNet(critics.to(self.device))
        running = [Running(*(part.to(self.device) for part in layer)) for layer in critics.start()]
        actor, alpha = Trained.of(self.actors.vector), Trained.of(self.log_alpha())
        return CrossqState(actor, Trained.of(self.critics.start()), running, alpha, torch.zeros(3, device=self.device))

    def inputs(self, updates: int, progress: float) -> Inputs:
        """As SAC's, and how far the renormalization has warmed up."""
        warmths = [warmth_after(self.updates + n, self.spec.renorm_warmup) for n in range(updates)]
        return super().inputs(updates, progress)._replace(warmth=torch.tensor(warmths))

    def step_critics(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> Tensor:
        """One gradient step of the critics on the joint batch; the loss and the mean value."""
        next_actions, logprobs, _ = self.sampled(
            learned.actor.vector, batch.next_obs, inputs.noise[0], batch.next_masks
        )
        alpha, rows = learned.alpha.vector.exp(), len(batch.rewards)
        obs = torch.cat([batch.obs, batch.next_obs])
        actions = None if next_actions is None else torch.cat([batch.actions, next_actions])

        def loss(vector: Tensor) -> tuple[Tensor, tuple[Tensor, list[Running]]]:
            both, running = self.critics(vector)(obs, actions, learned.running, inputs.warmth)
            q, following = both.split(rows, dim=1)
            error, seen = critic_loss(self.chosen(q, batch), batch, self.value(following, logprobs, alpha))
            return error, (seen, running)

        seen, running = learned.critics.descend(loss, inputs.rates[0], self.spec.max_grad_norm, self.rule)
        for before, after in zip(learned.running, running, strict=True):
            before.mean.copy_(after.mean)
            before.var.copy_(after.var)
        return seen

    def values_of(self, learned: Any, obs: Tensor) -> Q:
        """The critics under their running statistics, which do not change."""
        critics = self.critics(learned.critics.vector)
        return lambda actions: critics(obs, actions, learned.running)[0]
