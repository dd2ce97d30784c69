"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018).

What it stores: transitions, in a replay memory.
How it acts: the policy's action plus Gaussian noise, within the bounds; uniformly at random before `start`.
How it learns: twin critics towards the smaller of their targets' values of a smoothed target action; every
`policy_delay` gradient steps of theirs one of the policy on the first critic, and only then the targets follow.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import Inputs, TwinCritics, critic_loss
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.values import Critics, DeterministicActor
from palestra.control.optim import FunctionalNet, Trained
from palestra.rl.losses import polyak
from palestra.rl.schedules import value


class Td3State(NamedTuple):
    """All that updates change; saved by position, so the order of fields is part of checkpoints."""

    actor: Trained
    critics: Trained
    actor_target: Tensor
    critic_target: Tensor
    seen: Tensor  # the policy's loss at its last update: it has fewer than the critics


class TD3(TwinCritics):
    """The learner."""

    supports = ("box",)
    network = DeterministicActor
    metrics = ("critic_loss", "q", "policy_loss")

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        net = Critics(parts.obs_shape, self.head, parts.spec.net, self.obs_scale)
        self.critics = FunctionalNet(net.to(self.device))
        actor, critics, seen = self.actors.vector, self.critics.start(), torch.zeros(1, device=self.device)
        self.learned = Td3State(Trained.of(actor), Trained.of(critics), actor.clone(), critics.clone(), seen)

    def begin_from(self, given: Mapping[str, Any]) -> None:
        super().begin_from(given)
        self.learned.actor_target.copy_(self.actors.flat(given.get("target", given["policy"])))
        self.learned.critics.vector.copy_(self.critics.flat(given["critics"]))
        self.learned.critic_target.copy_(self.critics.flat(given["targets"]))

    def act(self, obs: Tensor, noise: Tensor, t: int, progress: float) -> Tensor:
        """The policy's actions with noise, within the bounds."""
        std = value(progress=progress, **self.spec.noise.arguments())
        return (self.net.forward(obs) + std * noise[t]).clamp(-1.0, 1.0)

    def inputs(self, updates: int, progress: float) -> Inputs:
        """The noise that smooths target actions; the paces of the critics and of the policy."""
        return Inputs(self.head.noise(self.generator, updates, self.spec.batch), self.rates(updates, progress, "lr"))

    def smoothed(self, actions: Tensor, noise: Tensor) -> Tensor:
        """Target actions with clipped noise, within the bounds: similar actions get similar values (§5.3)."""
        clip = self.spec.noise_clip
        return (actions + (self.spec.target_noise * noise).clamp(-clip, clip)).clamp(-1.0, 1.0)

    def step_critics(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> Tensor:
        """One gradient step of the critics; the loss and the mean value."""
        actions = self.smoothed(self.actors(learned.actor_target)(batch.next_obs), inputs.noise)
        values = self.critics(learned.critic_target)(batch.next_obs, actions).amin(dim=0)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            return critic_loss(self.critics(vector)(batch.obs, batch.actions), batch, values)

        return learned.critics.descend(loss, inputs.rates[0], self.spec.max_grad_norm, self.rule)

    def step_policy(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> None:
        """One gradient step of the policy on the first critic; then both targets follow."""
        obs, critics = batch.obs, self.critics(learned.critics.vector)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            total = -critics(obs, self.actors(vector)(obs), 1).mean()
            return total, total.detach()[None]

        learned.seen.copy_(learned.actor.descend(loss, inputs.rates[1], self.spec.max_grad_norm, self.rule))
        learned.actor_target.copy_(polyak(learned.actor_target, learned.actor.vector, self.spec.tau))
        learned.critic_target.copy_(polyak(learned.critic_target, learned.critics.vector, self.spec.tau))
