"""Self-imitation (Oh et al. 2018) beside A2C and PPO: learn again from what turned out better than expected.

What it stores: transitions of finished episodes with their returns R; the oldest make room.
How it learns: some gradient steps after each policy improvement on -log π · (R - V)₊ and ½ (R - V)₊², on transitions
drawn in proportion to (R - V)₊^α, with the weights of prioritised replay (Schaul et al. 2016) to a power β.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.adam import adam_step, clip_norm
from palestra.control.algorithms.base import Parts
from palestra.control.algorithms.on_policy import Estimates, OnPolicy
from palestra.control.collector import Rollout
from palestra.control.compiling import compiled
from palestra.control.memory.sum_tree import SumTree
from palestra.control.whole_episodes import WholeEpisodes
from palestra.errors import UsageError
from palestra.spec.control.on_policy import SelfImitationSpec

LEAST = 1e-6  # added to every (R - V)₊, so that what was once no better than expected can be drawn again
METRICS = ("imitation_policy_loss", "imitation_value_loss", "imitation_share")


class Rows(NamedTuple):
    """Remembered steps, and the weights that make up for how they were drawn."""

    obs: Tensor
    actions: Tensor
    returns: Tensor
    masks: Tensor | None
    weights: Tensor


def imitation(learner: OnPolicy, spec: SelfImitationSpec | None, parts: Parts) -> "SelfImitation | None":
    """Self-imitation for `learner`, where its spec asks for it."""
    if spec is None:
        return None
    if learner.recurrent:
        raise UsageError("algorithm.self_imitation: it learns from single steps, without what net.recurrent remembers")
    assert parts.spec.algorithm.name in ("a2c", "ppo")
    return SelfImitation(learner, spec, parts)


class SelfImitation:
    """A memory of good steps, and gradient steps on them with the learner's own parameters and optimizer."""

    def __init__(self, learner: OnPolicy, spec: SelfImitationSpec, parts: Parts):
        self.learner, self.spec = learner, spec
        self.gamma = parts.spec.algorithm.gamma
        self.episodes = WholeEpisodes(learner.episodes.num_envs, self.gamma)
        self.columns: dict[str, Tensor] = {}  # made with the first episode, (buffer, ...)
        self.tree = SumTree(spec.buffer)
        self.size = self.head = 0
        self.most = 1.0  # the largest (R - V)₊ seen: new steps begin with it
        self._update = compiled(self.update) if parts.compile else self.update  # pyrefly: ignore

    def add(self, rollout: Rollout, found: Estimates) -> None:
        """Remember the episodes that ended in a rollout."""
        # A truncated episode goes on with what its last observation is worth, or a time limit would look like a fault.
        rewards = found.rewards + torch.where(
            rollout.truncated & ~rollout.terminated, self.gamma * found.next_values, 0.0
        )
        columns = {"obs": rollout.obs, "actions": rollout.actions, "rewards": rewards, "masks": rollout.masks}
        rows = self.episodes.add(columns, rollout.terminated | rollout.truncated, found.valid)
        if rows is not None:
            del rows["rewards"]
            self._remember(rows)

    def _remember(self, rows: dict[str, Tensor]) -> None:
        capacity = self.spec.buffer
        rows = {name: column[-capacity:] for name, column in rows.items()}
        if not self.columns:
            self.columns = {name: c.new_zeros((capacity, *c.shape[1:])) for name, c in rows.items()}
        count = len(rows["returns"])
        at = torch.arange(self.head, self.head + count) % capacity
        for name, column in rows.items():
            self.columns[name][at.to(column.device)] = column
        self.tree.set(at.numpy(), (self.most + LEAST) ** self.spec.alpha)
        self.head, self.size = (self.head + count) % capacity, min(self.size + count, capacity)

    def learn(self, lr: Tensor) -> dict[str, float]:
        """Its gradient steps, once there are enough steps for one; the means over them."""
        learner, spec = self.learner, self.spec
        if self.size < spec.batch:
            return {}
        totals = torch.zeros(len(METRICS), device=lr.device)
        for _ in range(spec.updates):
            at, rows = self._sample()
            vector, learner.adam, out = self._update(learner.adam, rows, lr)
            learner.flat.vector.copy_(vector)
            learner.updates += 1
            totals += out[: len(METRICS)]
            self._weigh(at, out[len(METRICS) :])
        return dict(zip(METRICS, (totals / spec.updates).tolist(), strict=True))

    def _sample(self) -> tuple[np.ndarray, Rows]:
        spec, total = self.spec, self.tree.total
        drawn = torch.rand(spec.batch, generator=self.learner.generator, dtype=torch.float64).numpy()
        at = self.tree.find(drawn * total)
        weights = (self.size * self.tree.weights(at) / total) ** -spec.beta
        device = self.columns["returns"].device
        rows = {name: column[torch.from_numpy(at).to(device)] for name, column in self.columns.items()}
        weight = torch.from_numpy(weights / weights.max()).float().to(device)
        return at, Rows(rows["obs"], rows["actions"], rows["returns"], rows.get("masks"), weight)

    def _weigh(self, at: np.ndarray, better: Tensor) -> None:
        numbers = better.double().numpy(force=True)
        self.most = max(self.most, float(numbers.max()))
        self.tree.set(at, (numbers + LEAST) ** self.spec.alpha)

    def update(self, adam: Any, rows: Rows, lr: Tensor) -> tuple[Tensor, Any, Tensor]:
        """One gradient step: new parameters, new optimizer memory, metrics and after them (R - V)₊ of each row."""
        learner = self.learner
        gradient, out = learner.flat.gradient(lambda net: self.loss(net, rows))
        gradient, _ = clip_norm(gradient, learner._max_grad_norm)
        vector, adam = adam_step(learner.flat.vector, gradient, adam, lr, learner._adam_eps)
        return vector, adam, out

    def loss(self, net: Any, rows: Rows) -> tuple[Tensor, Tensor]:
        """coef · -log π · (R - V)₊ + value_coef · ½ (R - V)₊² (eq. 1 to 3)."""
        distribution, values = net(rows.obs, rows.masks)
        better = (rows.returns - values).clamp_min(0.0)
        policy = -(rows.weights * distribution.log_prob(rows.actions) * better.detach()).mean()
        value = 0.5 * (rows.weights * better.square()).mean()
        share = (better > 0).to(values.dtype).mean()
        logged = torch.stack([part.detach() for part in (policy, value, share)])
        return self.spec.coef * policy + self.spec.value_coef * value, torch.cat((logged, better.detach()))

    def state(self) -> dict[str, Any]:
        """What is remembered, copied; rows never written are left out."""
        return {
            "episodes": self.episodes.state(),
            "columns": {name: column[: self.size].to("cpu", copy=True) for name, column in self.columns.items()},
            "weights": self.tree.weights(np.arange(self.size)),
            "head": self.head,
            "most": self.most,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        device = self.learner.policy.device
        self.episodes.load_state(state["episodes"], device)
        self.head, self.most, self.size = state["head"], state["most"], len(state["weights"])
        self.tree = SumTree(self.spec.buffer)
        if self.size:
            self.tree.set(np.arange(self.size), np.asarray(state["weights"]))
        self.columns = {}
        for name, column in state["columns"].items():
            self.columns[name] = torch.zeros((self.spec.buffer, *column.shape[1:]), dtype=column.dtype, device=device)
            self.columns[name][: self.size] = column.to(device)
