"""SARSA (Rummery & Niranjan 1994) with a network: learns the values of the policy that explores.

What it stores: one rollout of T steps in N environments, discarded after the update.
How it acts: ε-greedily, independently in each environment, or by a softmax of the values.
How it learns: Q(s, a) towards r + γ · Q(s', a'), a' being the action that was taken next, or with λ above 0 towards
r + γ · ((1 − λ) · Q(s', a') + λ · the target of s'); one gradient step per rollout.
Where an episode was truncated no action was taken next: there a' is sampled from the policy.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.off_policy import refuse_masks
from palestra.control.algorithms.on_policy import OnPolicy, Rates
from palestra.control.collector import Rollout
from palestra.control.nets.values import Exploration, QNet
from palestra.rl.losses import masked_mean
from palestra.rl.returns import lambda_returns
from palestra.spec.kinds.control import SARSASpec

METRICS = ("loss", "q", "grad_norm")


class SarsaBatch(NamedTuple):
    """Transitions to learn from, one per row."""

    obs: Tensor
    actions: Tensor
    targets: Tensor
    valid: Tensor | None  # None: every row is a real transition


class SARSA(OnPolicy):
    """The learner."""

    supports = ("discrete",)
    network = QNet
    spec: SARSASpec

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        self.frames = parts.spec.train.frames
        self.exploration = Exploration(self.net, self.generator, self.spec.epsilon, self.spec.temperature)
        self.chosen: Tensor | None = None
        """The actions that the next rollout starts with: those that valued the last row of the one before."""

    def collect(self, progress: float = 0.0) -> Rollout:
        """T steps of the exploring policy in all environments, and its actions after the last one."""
        refuse_masks(self.episodes, self.spec.name)
        steps, began = self.spec.horizon, self.episodes.frame
        noise = self.exploration.noise(steps + 1, self.episodes.num_envs)

        def act(obs: Tensor, number: Tensor) -> Tensor:
            t = int(number)
            if t == 0 and self.chosen is not None:
                return self.chosen
            now = progress + (self.episodes.frame - began) / self.frames
            return self.exploration.actions(obs.to(self.device), noise, t, now)

        rollout = self.collector.collect(act, torch.arange(steps), self.policy.head.to_env)
        with torch.no_grad():
            self.chosen = None
            self.chosen = act(rollout.last_obs, torch.tensor(steps)).cpu()
        return rollout

    @torch.no_grad()
    def prepare(self, rollout: Rollout, progress: float = 0.0) -> SarsaBatch:
        """The targets of a rollout: its λ-returns over Q(s', a'), under the weights that collected it."""
        assert self.chosen is not None
        valid = self.valid(rollout)
        following = self.following(rollout, self.chosen.to(rollout.rewards.device), progress)
        rewards = self.rewards.learned(rollout.rewards, rollout.terminated | rollout.truncated, valid)
        ends = {"terminated": rollout.terminated, "truncated": rollout.truncated, "valid": valid}
        targets = lambda_returns(rewards, following, **ends, gamma=self.spec.gamma, lam=self.spec.lam)
        columns = (rollout.obs, rollout.actions, targets, valid)
        return SarsaBatch(*(None if column is None else column.flatten(0, 1) for column in columns))  # pyrefly: ignore

    def following(self, rollout: Rollout, chosen: Tensor, progress: float) -> Tensor:
        """Q(s', a') of each row, (T, N)."""
        steps, envs = rollout.rewards.shape
        actions = torch.cat([rollout.actions.flatten(0, 1)[envs:], chosen])
        q = self.net.q(torch.cat([rollout.obs.flatten(0, 1)[envs:], rollout.last_obs]))
        values = q.gather(1, actions[:, None]).squeeze(1)
        if len(rollout.ends):
            noise = self.exploration.noise(1, len(rollout.ends))
            sampled = self.exploration.actions(rollout.final_obs, noise, 0, progress)
            q = self.net.q(rollout.final_obs)
            values[rollout.ends] = q.gather(1, sampled.to(q.device)[:, None]).squeeze(1)
        return values.view(steps, envs)

    def learn(self, batch: SarsaBatch, progress: float) -> dict[str, float]:
        return dict(zip(METRICS, self.gradient_step(batch, self.rates(progress)).tolist(), strict=True))

    def loss(self, net: Any, batch: SarsaBatch, rates: Rates) -> tuple[Tensor, Tensor]:
        """The mean of (Q(s, a) - target)²."""
        values = net(batch.obs).squeeze(2).gather(1, batch.actions[:, None]).squeeze(1)
        loss = masked_mean((values - batch.targets).square(), batch.valid)
        return loss, torch.stack([loss.detach(), masked_mean(values.detach(), batch.valid)])

    def state(self) -> dict[str, Any]:
        return super().state() | {"chosen": None if self.chosen is None else self.chosen.clone()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.chosen = state["chosen"]
        super().load_state(state)

    def cut(self, rows: np.ndarray) -> None:
        super().cut(rows)
        self.chosen = None  # it was chosen for the observations before
