"""Shared code of the on-policy algorithms: acting, values, advantages, self-imitation (Oh et al. 2018).

Each has one file of its own that says how it learns: `ppo.py`, `a2c.py`, `reinforce.py`.

What it stores: transitions of finished episodes with their returns R; the oldest make room.
How it learns: some gradient steps after each policy improvement on -log π · (R - V)₊ and ½ (R - V)₊², on transitions
drawn in proportion to (R - V)₊^α, with the weights of prioritized replay (Schaul et al. 2016) to a power β.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.algorithms.base import Algorithm, AlgorithmParts
from palestra.control.collector import Collector, Rollout
from palestra.control.episodes import Episodes, WholeEpisodes
from palestra.control.memory.storage import SumTree
from palestra.control.nets.actor_critic import Actor, ActorCritic, Flat, Recurrent
from palestra.control.nets.heads import ActionHead
from palestra.control.optim import Adam, adam_step, clip_norm, compiled
from palestra.control.policy import Policy
from palestra.control.scaling import ObsScale, Rewards, obs_scale
from palestra.errors import UsageError
from palestra.rl.returns import gae
from palestra.spec.kinds.control import ControlSpec, OnPolicySpec, SelfImitationSpec


class RolloutBatch(NamedTuple):
    """Transitions to learn from, one a row; of a recurrent policy (T, B) of them, an environment a column."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    valid: Tensor | None  # None: every row is a real transition
    masks: Tensor | None = None  # what was allowed; None: everything always is
    began: Tensor | None = None  # recurrent: (T, B), where nothing came before
    memory: Tensor | None = None  # recurrent: (1, B, memory), what was remembered before the first row

    def rows(self, which: Tensor | slice) -> "RolloutBatch":
        """Some of the rows; of a recurrent policy whole sequences, because what came before is part of them."""
        if self.began is None:
            return RolloutBatch(*(None if column is None else column[which] for column in self))  # pyrefly: ignore
        return RolloutBatch(*(None if column is None else column[:, which] for column in self))  # pyrefly: ignore

    def outputs(self, net: Any) -> tuple[Any, Tensor]:
        """The distribution over actions and the values that `net` gives for the rows."""
        if self.began is None or self.memory is None:
            return net(self.obs, self.masks)
        return net(self.obs, self.began, self.memory[0], self.masks)

    def logprobs_by(self, net: Any) -> Tensor:
        """Log-probabilities of the actions by `net`."""
        distribution = net.policy(self.obs, self.masks) if self.began is None else self.outputs(net)[0]
        return distribution.log_prob(self.actions)


class Estimates(NamedTuple):
    """What a rollout is worth, each (T, N)."""

    rewards: Tensor  # as they are learned from
    values: Tensor
    next_values: Tensor
    advantages: Tensor
    returns: Tensor
    valid: Tensor | None


class OnPolicy(Algorithm):
    """Collects rollouts with the policy of the moment, and makes gradient steps on one vector of all parameters."""

    supports = ("discrete", "multi_discrete", "multi_binary", "box")
    net: Any
    imitation: "SelfImitation | None" = None
    """What learns beside it, where its spec asks for it."""

    def __init__(self, parts: AlgorithmParts, spec: OnPolicySpec):
        super().__init__(parts)
        net = self.actor(parts.spec, parts.obs_shape, parts.head)
        self.net, self.policy = net, Policy(parts.obs_shape, net, parts.device)
        self.recurrent = isinstance(net, Recurrent)
        self.episodes = Episodes(parts.stepper)
        self.collector = Collector(self.episodes, spec.horizon, net.head.shape, net.head.dtype)
        self.rewards = Rewards(parts.spec.env, self.episodes.num_envs, spec.gamma, parts.device)
        self.flat = Flat(net)
        self.adam = Adam.zeros(self.flat.vector)
        self.memory = net.nothing(self.episodes.num_envs) if isinstance(net, Recurrent) else None
        """What a recurrent policy remembers now, (N, memory)."""
        self.start = self.memory
        """What it remembered before the last rollout."""
        self._max_grad_norm, self._adam_eps = spec.max_grad_norm, spec.adam_eps
        # A loop over the steps would be compiled as one graph of all of them: minutes.
        self._update = compiled(self.update) if self.compiles(parts) else self.update  # pyrefly: ignore

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> Actor:
        """Policy and value."""
        assert isinstance(spec.algorithm, OnPolicySpec)
        net = ActorCritic if spec.net.recurrent is None else Recurrent
        return net(obs_shape, head.drawing(spec.algorithm.distribution), spec.net, obs_scale(spec.env, obs_shape))

    def compiles(self, parts: AlgorithmParts) -> bool:
        """Whether its updates are compiled."""
        return parts.compile and not self.recurrent

    def collect(self) -> Rollout:
        """T steps of the sampling policy in all environments."""
        device, head, net, episodes = self.policy.device, self.policy.head, self.net, self.episodes
        noise = head.noise(self.generator, self.collector.horizon, episodes.num_envs).to(device)

        def act(obs: Tensor, noise: Tensor) -> Tensor:
            mask = None if episodes.mask is None else torch.from_numpy(episodes.mask).to(device)
            if self.memory is None:
                return net.policy(obs.to(device), mask).sample(noise)
            before = torch.where(torch.from_numpy(episodes.began).to(device)[:, None], 0.0, self.memory)
            distribution, _, self.memory = net.advance(obs.to(device), before, mask)
            return distribution.sample(noise)

        self.start = self.memory
        return self.collector.collect(act, noise, head.to_env)

    def estimates(self, rollout: Rollout, gamma: float, lam: float) -> Estimates:
        """Values and advantages of a rollout under the weights that collected it."""
        # By the kind of environment, not by what this rollout holds: see `compiled`.
        valid = rollout.valid if self.episodes.stepper.has_dummy_steps else None
        rewards = self.rewards.learned(rollout.rewards, rollout.terminated | rollout.truncated, valid)
        values, next_values = self._values(rollout)
        advantages, returns = gae(
            rewards,
            values,
            next_values,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            valid=valid,
            gamma=gamma,
            lam=lam,
        )
        return Estimates(rewards, values, next_values, advantages, returns, valid)

    def _values(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        if self.start is None:
            return rollout.next_values(self.net.value)
        values, memories = self.net.values(rollout.obs, rollout.began, self.start)
        # Successors are seen with the memory of the step before them, final observations too.
        _, last, _ = self.net.advance(rollout.last_obs, memories[-1])
        successors = torch.cat((values[1:], last[None])).flatten()
        if len(rollout.ends):
            _, final, _ = self.net.advance(rollout.final_obs, memories.flatten(0, 1)[rollout.ends])
            successors[rollout.ends] = final
        return values, successors.view(values.shape)

    def update(self, adam: Adam, batch: Any, rates: Any) -> tuple[Tensor, Adam, Tensor]:
        """One gradient step: new parameters, new optimizer memory, metrics. A pure function, eager or one graph."""
        gradient, metrics = self.flat.gradient(lambda net: self.loss(net, batch, rates))
        # One global norm over policy and value together, clipped before Adam sees it.
        gradient, norm = clip_norm(gradient, self._max_grad_norm)
        vector, adam = adam_step(self.flat.vector, gradient, adam, rates.lr, self._adam_eps)
        return vector, adam, torch.cat([metrics, norm.detach().reshape(1)])

    def loss(self, net: Any, batch: Any, rates: Any) -> tuple[Tensor, Tensor]:
        """What is made smaller, and the parts of it that are logged."""
        raise NotImplementedError

    def observed(self, rollout: Rollout) -> None:
        """The rollout was learned from: its observations may now change the scale of those to come."""
        scales = [module for module in self.net.modules() if isinstance(module, ObsScale)]
        for scale in scales:
            scale.update(rollout.obs, rollout.valid if self.episodes.stepper.has_dummy_steps else None)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, besides the generator's state."""
        return {
            "policy": self.policy.state(),
            "adam": dict(self.adam._asdict()),
            "updates": self.updates,
            "episodes": self.episodes.state(),
            "rewards": self.rewards.state(),
            "memory": None if self.memory is None else self.memory.to("cpu", copy=True),
            "imitation": None if self.imitation is None else self.imitation.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        device = self.policy.device
        if self.imitation is not None:
            self.imitation.load_state(state["imitation"])
        self.policy.load_state(state["policy"])
        self.updates = state["updates"]
        self.adam = Adam(**{name: value.to(device) for name, value in state["adam"].items()})
        self.rewards.load_state(state["rewards"])
        self.memory = None if state["memory"] is None else state["memory"].to(device, copy=True)
        restarted = self.episodes.load_state(state["episodes"])
        if restarted is not None:
            self.cut(restarted)

    def cut(self, rows: Any) -> None:
        """The environments of these rows, bool (N,), began new episodes outside of a step."""
        self.rewards.cut(rows)
        if self.imitation is not None:
            self.imitation.episodes.cut(rows)


LEAST = 1e-6  # added to every (R - V)₊, so that what was once no better than expected can be drawn again
METRICS = ("imitation_policy_loss", "imitation_value_loss", "imitation_share")


class ImitationRows(NamedTuple):
    """Remembered steps, and the weights that make up for how they were drawn."""

    obs: Tensor
    actions: Tensor
    returns: Tensor
    masks: Tensor | None
    weights: Tensor


def imitation(learner: OnPolicy, spec: SelfImitationSpec | None, parts: AlgorithmParts) -> "SelfImitation | None":
    """Self-imitation for `learner`, where its spec asks for it."""
    if spec is None:
        return None
    if learner.recurrent:
        raise UsageError("algorithm.self_imitation: it learns from single steps, without what net.recurrent remembers")
    assert parts.spec.algorithm.name in ("a2c", "ppo")
    return SelfImitation(learner, spec, parts)


class SelfImitation:
    """A memory of good steps, and gradient steps on them with the learner's own parameters and optimizer."""

    def __init__(self, learner: OnPolicy, spec: SelfImitationSpec, parts: AlgorithmParts):
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

    def _sample(self) -> tuple[np.ndarray, ImitationRows]:
        spec, total = self.spec, self.tree.total
        drawn = torch.rand(spec.batch, generator=self.learner.generator, dtype=torch.float64).numpy()
        at = self.tree.find(drawn * total)
        weights = (self.size * self.tree.weights(at) / total) ** -spec.beta
        device = self.columns["returns"].device
        rows = {name: column[torch.from_numpy(at).to(device)] for name, column in self.columns.items()}
        weight = torch.from_numpy(weights / weights.max()).float().to(device)
        return at, ImitationRows(rows["obs"], rows["actions"], rows["returns"], rows.get("masks"), weight)

    def _weigh(self, at: np.ndarray, better: Tensor) -> None:
        numbers = better.double().numpy(force=True)
        self.most = max(self.most, float(numbers.max()))
        self.tree.set(at, (numbers + LEAST) ** self.spec.alpha)

    def update(self, adam: Any, rows: ImitationRows, lr: Tensor) -> tuple[Tensor, Any, Tensor]:
        """One gradient step: new parameters, new optimizer memory, metrics and after them (R - V)₊ of each row."""
        learner = self.learner
        gradient, out = learner.flat.gradient(lambda net: self.loss(net, rows))
        gradient, _ = clip_norm(gradient, learner._max_grad_norm)
        vector, adam = adam_step(learner.flat.vector, gradient, adam, lr, learner._adam_eps)
        return vector, adam, out

    def loss(self, net: Any, rows: ImitationRows) -> tuple[Tensor, Tensor]:
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
