"""REINFORCE (Williams 1992): Monte-Carlo returns of whole episodes, no critic.

What it stores: the rows of episodes that are not over yet. Rows count once their episode has ended, so none is learned
from with half of its return; those of a long episode were drawn by policies of some steps ago, and their
log-probabilities are taken under the policy of the moment, as those of all rows are.
How it acts: it samples from the policy; the noise of a whole rollout is drawn at once.
How it learns: one gradient step on all rows of the episodes that ended in the rollout. A truncated episode counts as
ended: without a critic there is nothing to say what would have followed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.on_policy import OnPolicy
from palestra.control.episodes import WholeEpisodes
from palestra.control.nets.actor_critic import PolicyNet
from palestra.control.nets.heads import ActionHead
from palestra.control.optim import scheduled
from palestra.control.scaling import obs_scale
from palestra.rl.normalize import batch_normalize
from palestra.spec.kinds.control import ControlSpec, ReinforceSpec

METRICS = ("policy_loss", "entropy", "grad_norm")


class EpisodeRows(NamedTuple):
    """Steps of whole episodes."""

    obs: Tensor
    actions: Tensor
    returns: Tensor
    masks: Tensor | None


class ReinforceRates(NamedTuple):
    """What schedules move."""

    lr: Tensor
    entropy: Tensor


class Reinforce(OnPolicy):
    """The learner: `step()` is one policy improvement."""

    def __init__(self, parts: AlgorithmParts):
        assert isinstance(parts.spec.algorithm, ReinforceSpec)
        self.spec = parts.spec.algorithm
        super().__init__(parts, self.spec)
        self.whole = WholeEpisodes(self.episodes.num_envs, self.spec.gamma)

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> PolicyNet:
        """The policy alone."""
        assert isinstance(spec.algorithm, ReinforceSpec)
        scale = obs_scale(spec.env, obs_shape)
        return PolicyNet(obs_shape, head.drawing(spec.algorithm.distribution), spec.net, scale)

    def compiles(self, parts: AlgorithmParts) -> bool:
        """Never: every step has another number of rows, and would compile again."""
        return False

    def step(self, progress: float) -> dict[str, float]:
        """Collect one rollout and make one gradient step on the episodes that ended in it; none if none did."""
        with self.span("collect"):
            rollout = self.collect().to(self.policy.device)
        with self.span("learn"):
            valid = rollout.valid if self.episodes.stepper.has_dummy_steps else None
            ended = rollout.terminated | rollout.truncated
            # Scaled by what is known when they are collected: an episode's rewards may come by several scales.
            rewards = self.rewards.learned(rollout.rewards, ended, valid)
            columns = {"obs": rollout.obs, "actions": rollout.actions, "rewards": rewards, "masks": rollout.masks}
            found = self.whole.add(columns, ended, valid)
            rates = ReinforceRates(
                *(scheduled(s, progress).to(rollout.obs.device) for s in (self.spec.lr, self.spec.entropy))
            )
            metrics = {} if found is None else self.learn(found, rates)
            self.observed(rollout)
            return metrics | {"updates": self.updates, "lr": float(rates.lr)}

    def learn(self, found: dict[str, Tensor], rates: ReinforceRates) -> dict[str, float]:
        """One gradient step on the rows of whole episodes."""
        returns = batch_normalize(found["returns"]) if self.spec.normalize_returns else found["returns"]
        rows = EpisodeRows(found["obs"], found["actions"], returns, found.get("masks"))
        vector, self.adam, metrics = self._update(self.adam, rows, rates)
        self.flat.vector.copy_(vector)
        self.updates += 1
        return dict(zip(METRICS, metrics.tolist(), strict=True)) | {"rows": len(returns)}

    def loss(self, net: Any, batch: EpisodeRows, rates: ReinforceRates) -> tuple[Tensor, Tensor]:
        """-log π · return - entropy · H."""
        distribution = net(batch.obs, batch.masks)
        policy = -(distribution.log_prob(batch.actions) * batch.returns).mean()
        entropy = distribution.entropy().mean()
        return policy - rates.entropy * entropy, torch.stack([policy.detach(), entropy.detach()])

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return super().state() | {"whole": self.whole.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.whole.load_state(state["whole"], self.policy.device)
        super().load_state(state)

    def cut(self, rows: Any) -> None:
        """The environments of these rows, bool (N,), began new episodes outside of a step."""
        super().cut(rows)
        self.whole.cut(rows)
