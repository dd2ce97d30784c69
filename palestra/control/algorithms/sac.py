"""Soft actor-critic (Haarnoja et al. 2018): maximizes return plus entropy.

What it stores: transitions, in a replay memory.
How it acts: it samples from the policy, a squashed Gaussian or, for Discrete actions, a softmax; uniformly at random
before `start`.
How it learns: twin critics towards the soft value of the successor, the smaller of which the policy maximizes; the
weight α of the entropy is tuned towards a target. With Discrete actions every expectation over them is exact
(Christodoulou 2019), with the smaller of the twins for each action.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import Inputs, TwinCritics, critic_loss
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.values import Critics, SoftActor
from palestra.control.optim import FunctionalNet, Trained
from palestra.rl.losses import allowed_entropy, alpha_slope, expected_soft_value, polyak, soft_value, target_entropy
from palestra.rl.schedules import value as scheduled

LEAST_LOGPROB = -1e4

Q = Callable[[Tensor | None], Tensor]
"""The critics in given observations: values of a Box's actions, (2, B); None: of every Discrete one, (2, B, A)."""


class SacState(NamedTuple):
    """All that updates change; saved by position, so the order of fields is part of checkpoints."""

    actor: Trained
    critics: Trained
    target: Tensor
    alpha: Trained  # log α, (1,)
    seen: Tensor  # metrics of the policy's last update: it may have fewer than the critics


class SAC(TwinCritics):
    """The learner."""

    supports = ("discrete", "box")
    network = SoftActor
    metrics = ("critic_loss", "q", "policy_loss", "entropy", "alpha")

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        wanted, usual = self.spec.target_entropy, target_entropy(self.head.outputs, discrete=not self.head.continuous)
        self.target_entropy = usual if wanted == "auto" else wanted
        """The entropy that α is tuned towards."""
        self.learned = self.start(parts)

    def start(self, parts: AlgorithmParts) -> Any:
        """Makes the critics; returns all that updates change, before the first."""
        outputs = getattr(self.spec, "quantiles", 1)
        net = Critics(parts.obs_shape, self.head, parts.spec.net, self.obs_scale, outputs)
        self.critics = FunctionalNet(net.to(self.device))
        critics = self.critics.start()
        actor, alpha = Trained.of(self.actors.vector), Trained.of(self.log_alpha())
        return SacState(actor, Trained.of(critics), critics.clone(), alpha, torch.zeros(3, device=self.device))

    def log_alpha(self, progress: float = 0.0) -> Tensor:
        """log α as the spec gives it now, (1,); where it is tuned it begins with α = 1."""
        alpha = 1.0 if self.spec.alpha == "auto" else scheduled(progress=progress, **self.spec.alpha.arguments())
        return torch.full((1,), alpha, dtype=torch.float64, device=self.device).log().float()

    def begin_from(self, given: Mapping[str, Any]) -> None:
        super().begin_from(given)
        self.learned.critics.vector.copy_(self.critics.flat(given["critics"]))
        self.learned.target.copy_(self.critics.flat(given["targets"]))
        if self.spec.alpha == "auto" and "log_alpha" in given:
            self.learned.alpha.vector.copy_(given["log_alpha"])

    def act(self, obs: Tensor, noise: Tensor, t: int, progress: float) -> Tensor:
        """Actions sampled from the policy."""
        mask = self.episodes.mask
        return self.net.forward(obs, None if mask is None else torch.from_numpy(mask).to(obs.device)).sample(noise[t])

    def inputs(self, updates: int, progress: float) -> Inputs:
        """Noise for the critics' and the policy's actions; the paces of the critics, of the policy and of α."""
        batch = self.spec.batch if self.head.continuous else 0  # expectations over Discrete actions are exact
        noise = self.head.noise(self.generator, updates, 2, batch)
        if self.spec.alpha != "auto":
            self.learned.alpha.vector.copy_(self.log_alpha(progress))
        return Inputs(noise, self.rates(updates, progress, "lr", "alpha_lr"))

    def sampled(
        self, vector: Tensor, obs: Tensor, noise: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Sampled actions, their log-probabilities, (B,), and the entropy; None and (B, A) for Discrete actions."""
        return self.scored(self.actors(vector)(obs, mask), noise, mask)

    def scored(self, policy: Any, noise: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
        """The same of a policy's distribution."""
        if not self.head.continuous:
            # Of a forbidden action so small that α times it overflows; e^LEAST is 0 just the same.
            logprobs = policy.logprobs if mask is None else policy.logprobs.clamp_min(LEAST_LOGPROB)
            return None, logprobs, policy.entropy()
        actions, logprobs = policy.sample_scored(noise)
        return actions, logprobs, -logprobs

    def value(self, q: Tensor, logprobs: Tensor, alpha: Tensor) -> Tensor:
        """The soft value of what was sampled, (B,)."""
        return (soft_value if self.head.continuous else expected_soft_value)(q, logprobs, alpha)

    next_value = value
    """The same of the successor, by the target critics; what `critic_loss` takes."""
    critic_loss = staticmethod(critic_loss)

    def step_critics(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> Tensor:
        """One gradient step of the critics, then the targets follow; the loss and the mean value."""
        actions, logprobs, _ = self.sampled(learned.actor.vector, batch.next_obs, inputs.noise[0], batch.next_masks)
        following = self.critics(learned.target)(batch.next_obs, actions)
        values = self.next_value(following, logprobs, learned.alpha.vector.exp())

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            return self.critic_loss(self.chosen(self.critics(vector)(batch.obs, batch.actions), batch), batch, values)

        seen = learned.critics.descend(loss, inputs.rates[0], self.spec.max_grad_norm, self.rule)
        learned.target.copy_(polyak(learned.target, learned.critics.vector, self.spec.tau))
        return seen

    def chosen(self, q: Tensor, batch: ReplayBatch) -> Tensor:
        """The values of the actions that were taken, (2, B)."""
        return q if self.head.continuous else q.gather(2, batch.actions.expand(2, -1)[..., None])[..., 0]

    def step_policy(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> None:
        """One gradient step of the policy on the critics' values, and one of α."""
        q, alpha = self.values_of(learned, batch.obs), learned.alpha.vector.exp()

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            actions, logprobs, entropy = self.sampled(vector, batch.obs, inputs.noise[1], batch.masks)
            total = -self.value(q(actions), logprobs, alpha).mean()
            return total, torch.stack([total.detach(), entropy.detach().mean()])

        self.descend_policy(learned, loss, inputs, batch.masks)

    def descend_policy(self, learned: Any, loss: Callable, inputs: Inputs, masks: Tensor | None) -> None:
        """One gradient step of the policy on `loss`, and one of α towards the target entropy."""
        alpha = learned.alpha.vector.exp()
        seen = learned.actor.descend(loss, inputs.rates[1], self.spec.max_grad_norm, self.rule)
        if self.spec.alpha == "auto":
            target: Any = self.target_entropy
            if masks is not None and self.spec.target_entropy == "auto":
                target = allowed_entropy(target, masks)
            slope = alpha_slope(learned.alpha.vector, seen[1], target)
            learned.alpha.step(slope, inputs.rates[2], None, self.rule._replace(decay=0.0))
        learned.seen.copy_(torch.cat([seen, alpha]))

    def values_of(self, learned: Any, obs: Tensor) -> Q:
        """The critics as the policy sees them."""
        critics = self.critics(learned.critics.vector)
        return lambda actions: critics(obs, actions)
