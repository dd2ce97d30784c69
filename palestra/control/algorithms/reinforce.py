"""REINFORCE (Williams 1992): Monte-Carlo returns of whole episodes, no critic.

What it stores: the rows of running episodes. Rows are learned from once their episode has ended, with their full
return; those of a long episode were sampled by policies of some steps ago, and their log-probabilities are taken under
the current policy, as those of all rows are.
How it acts: it samples from the policy; the noise of a whole rollout is generated at once.
How it learns: one gradient step on all rows of the episodes that ended in the rollout. A truncated episode counts as
ended: without a critic there is nothing to bootstrap from.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.on_policy import OnPolicy, Rates
from palestra.control.collector import Rollout
from palestra.control.episodes import WholeEpisodes
from palestra.control.nets.actor_critic import PolicyNet
from palestra.rl.normalize import batch_normalize
from palestra.spec.kinds.control import ReinforceSpec

METRICS = ("policy_loss", "entropy", "grad_norm")


class Reinforce(OnPolicy):
    """The learner."""

    spec: ReinforceSpec
    network = PolicyNet
    compiles = False  # every step has another number of rows, and would compile again

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        self.whole = WholeEpisodes(self.episodes.num_envs, self.spec.gamma)

    def prepare(self, rollout: Rollout, progress: float = 0.0) -> dict[str, Tensor] | None:
        """The rows of the episodes that ended in the rollout, from their first step on; None if none did."""
        valid, ended = self.valid(rollout), rollout.terminated | rollout.truncated
        # Normalized by the statistics of the time of collection: an episode's rewards may have several scales.
        rewards = self.rewards.learned(rollout.rewards, ended, valid)
        columns = {"obs": rollout.obs, "actions": rollout.actions, "rewards": rewards, "masks": rollout.masks}
        return self.whole.add(columns, ended, valid)

    def learn(self, batch: dict[str, Tensor] | None, progress: float) -> dict[str, float]:
        """One gradient step on the rows of whole episodes; none without any."""
        rates = self.rates(progress)
        if batch is None:
            return {"lr": float(rates.lr)}
        if self.spec.normalize_returns:
            batch = batch | {"returns": batch_normalize(batch["returns"])}
        metrics = dict(zip(METRICS, self.gradient_step(batch, rates).tolist(), strict=True))
        return metrics | {"rows": len(batch["returns"]), "lr": float(rates.lr)}

    def loss(self, net: Any, batch: dict[str, Tensor], rates: Rates) -> tuple[Tensor, Tensor]:
        """-log π · return - entropy · H."""
        distribution = net(batch["obs"], batch.get("masks"))
        policy = -(distribution.log_prob(batch["actions"]) * batch["returns"]).mean()
        entropy = distribution.entropy().mean()
        return policy - rates.entropy * entropy, torch.stack([policy.detach(), entropy.detach()])

    def state(self) -> dict[str, Any]:
        return super().state() | {"whole": self.whole.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.whole.load_state(state["whole"], self.device)
        super().load_state(state)

    def cut(self, rows: np.ndarray) -> None:
        super().cut(rows)
        self.whole.cut(rows)
