"""Shared code of the on-policy algorithms: acting, values, advantages, self-imitation (Oh et al. 2018).

`ppo.py`, `a2c.py`, `reinforce.py` and `sarsa.py` say how each learns.

What self-imitation stores: transitions of finished episodes with their returns R, in a ring.
How it learns: some gradient steps after each policy improvement on -log π · (R - V)₊ and ½ (R - V)₊², on transitions
sampled in proportion to (R - V)₊^α, with the importance weights of Schaul et al. 2016 to the power β.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.algorithms.base import Algorithm, AlgorithmParts
from palestra.control.asynchronous import Elsewhere
from palestra.control.collector import Collector, Rollout
from palestra.control.episodes import WholeEpisodes
from palestra.control.memory.storage import SumTree
from palestra.control.nets.actor_critic import ActorCritic, Recurrent
from palestra.control.optim import Adam, FlatNet, adam_step, clip_norm, no_denormals, scheduled
from palestra.errors import UsageError
from palestra.rl.losses import explained_variance
from palestra.rl.returns import gae, stale_gae
from palestra.spec.kinds.control import SelfImitationSpec


class Rates(NamedTuple):
    """Scheduled values as tensors, so that a compiled update sees new ones; None where the algorithm has none."""

    lr: Tensor
    clip: Any = None
    entropy: Any = None
    critic_lr: Any = None


class RolloutBatch(NamedTuple):
    """Transitions to learn from, one per row; for a recurrent policy (T, B), one environment per column."""

    obs: Tensor
    actions: Tensor
    advantages: Tensor
    returns: Tensor
    values: Tensor
    valid: Tensor | None  # None: every row is a real transition
    masks: Tensor | None = None  # allowed actions; None: all of them always are
    began: Tensor | None = None  # recurrent: (T, B), first steps of episodes
    memory: Tensor | None = None  # recurrent: (1, B, memory), the recurrent state before the first row
    logprobs: Any = None  # PPO: under the policy that acted

    def rows(self, which: Tensor | slice) -> "RolloutBatch":
        """Some of the rows; of a recurrent policy whole sequences, because earlier steps are part of them."""
        index = which if self.began is None else (slice(None), which)
        return RolloutBatch(*(None if column is None else column[index] for column in self))  # pyrefly: ignore

    def outputs(self, net: Any) -> tuple[Any, Tensor]:
        """The distribution over actions and the values that `net` gives for the rows."""
        if self.began is None or self.memory is None:
            return net(self.obs, self.masks)
        return net(self.obs, self.began, self.memory[0], self.masks)


class OnPolicy(Algorithm):
    """Collects a rollout with the current policy and makes gradient steps on one vector of all parameters."""

    supports = ("discrete", "multi_discrete", "multi_binary", "box")
    network = ActorCritic
    compiles = True
    """Whether its updates can be compiled."""

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        net, head = self.net, self.policy.head
        self.recurrent = isinstance(net, Recurrent)
        self.collector = Collector(self.episodes, self.spec.horizon, head.shape, head.dtype)
        self.flat = FlatNet(net)
        self.adam = Adam.zeros(self.flat.vector, self.rule)
        own = zip(self.flat.names, self.flat.sizes, strict=True)
        # Also nets.0.value_head of several agents' networks.
        of_value = [torch.full((size,), name.startswith("value_") or ".value_" in name) for name, size in own]
        self.of_value = torch.cat(of_value).to(self.device)
        """Which parameters are of the value alone."""
        self.memory = net.nothing(self.episodes.num_envs) if self.recurrent else None
        """The state of a recurrent policy now, (N, memory)."""
        self.start = self.memory
        """The same before the last rollout."""
        # A loop over the steps would be compiled as one graph of all of them: minutes.
        self._update = parts.compiled(self.update, self.compiles and not self.recurrent)
        wanted = getattr(self.spec, "self_imitation", None)
        self.imitation = None if wanted is None else SelfImitation(self, wanted, parts)

    def step(self, progress: float) -> dict[str, float]:
        with self.span("collect"):
            rollout = self.collect(progress).to(self.device)
        with self.span("learn"), no_denormals():
            batch = self.prepare(rollout, progress)
            metrics = self.learn(batch, progress)
            if isinstance(batch, RolloutBatch):  # with values: before the update, as they explained the rollout
                metrics["explained_variance"] = float(explained_variance(batch.values, batch.returns, batch.valid))
            if self.imitation is not None:
                metrics |= self.imitation.learn(self.step_sizes(self.rates(progress)))
            # Only now: a rollout is acted on and learned from under the same normalization of observations.
            if self.obs_scale is not None:
                self.obs_scale.update(rollout.obs, self.valid(rollout))
        return metrics | {"updates": self.updates}

    def prepare(self, rollout: Rollout, progress: float = 0.0) -> Any:
        """What `learn` takes, computed from a rollout under the weights that collected it."""
        raise NotImplementedError

    def learn(self, batch: Any, progress: float) -> dict[str, float]:
        """Gradient steps on what `prepare` gave; returns metrics."""
        raise NotImplementedError

    def loss(self, net: Any, batch: Any, rates: Rates) -> tuple[Tensor, Tensor]:
        """The loss, and its parts that are logged."""
        raise NotImplementedError

    def rates(self, progress: float) -> Rates:
        schedules = [getattr(self.spec, name, None) for name in Rates._fields]
        return Rates(*(None if s is None else scheduled(s, progress).to(self.device) for s in schedules))  # pyrefly: ignore

    def valid(self, rollout: Rollout) -> Tensor | None:
        """Which rows are real transitions; None in an environment that never has others."""
        # By the kind of environment, not by what this rollout holds: see `compiled`.
        return rollout.valid if self.episodes.stepper.has_dummy_steps else None

    def collect(self, progress: float = 0.0) -> Rollout:
        """T steps of the sampling policy in all environments."""
        device, head, net, episodes = self.device, self.policy.head, self.net, self.episodes
        if isinstance(env := episodes.stepper.env, Elsewhere):
            segments = env.segments(net.state_dict())
            for segment in segments:
                episodes.add(segment.frames, segment.finished, segment.recent, segment.components)
            return env.rollout(segments)
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

    def batch(self, rollout: Rollout, lam: float) -> RolloutBatch:
        """The rollout with values and GAE under the weights that collected it, one transition per row.

        For a recurrent policy still (T, N).
        """
        valid = self.valid(rollout)
        rewards = self.rewards.learned(rollout.rewards, rollout.terminated | rollout.truncated, valid)
        values, next_values = self.values(rollout)
        ends = {"terminated": rollout.terminated, "truncated": rollout.truncated, "valid": valid}
        estimated = (rewards, values, next_values)
        if rollout.logprobs is None:
            advantages, returns = gae(*estimated, **ends, gamma=self.spec.gamma, lam=lam)
        else:
            ratio = torch.exp(self._logprobs(rollout) - rollout.logprobs)
            advantages, returns = stale_gae(ratio, *estimated, **ends, gamma=self.spec.gamma, lam=lam)
        if self.imitation is not None:
            self.imitation.add(rollout, rewards, next_values, valid)
        batch = RolloutBatch(rollout.obs, rollout.actions, advantages, returns, values, valid, rollout.masks)
        batch = batch._replace(logprobs=rollout.logprobs)
        if self.start is not None:
            return batch._replace(began=rollout.began, memory=self.start[None])
        return RolloutBatch(*(None if column is None else column.flatten(0, 1) for column in batch))  # pyrefly: ignore

    def _logprobs(self, rollout: Rollout) -> Tensor:
        """Of the actions under the policy now, (T, N)."""
        masks = None if rollout.masks is None else rollout.masks.flatten(0, 1)
        policy = self.net.policy(rollout.obs.flatten(0, 1), masks)
        return policy.log_prob(rollout.actions.flatten(0, 1)).view(rollout.rewards.shape)

    def values(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """V of each row's observation and of its true successor, both (T, N)."""
        if self.start is None:
            return rollout.next_values(self.net.value)
        values, memories = self.net.values(rollout.obs, rollout.began, self.start)
        # Successors, final observations too, are evaluated with the memory of the step before them.
        _, last, _ = self.net.advance(rollout.last_obs, memories[-1])
        successors = torch.cat((values[1:], last[None])).flatten()
        if len(rollout.ends):
            _, final, _ = self.net.advance(rollout.final_obs, memories.flatten(0, 1)[rollout.ends])
            successors[rollout.ends] = final
        return values, successors.view(values.shape)

    def gradient_step(self, batch: Any, rates: Any, update: Callable | None = None) -> Tensor:
        """One gradient step, on `loss` unless by another `update`; what was logged and the norm before clipping."""
        vector, self.adam, metrics = (update or self._update)(self.adam, batch, rates)
        self.flat.vector.copy_(vector)
        self.updates += 1
        return metrics

    def update(self, adam: Adam, batch: Any, rates: Rates) -> tuple[Tensor, Adam, Tensor]:
        """New parameters, new optimizer state, metrics: a pure function, eager or one compiled graph."""
        return self.descend(adam, lambda net: self.loss(net, batch, rates), self.step_sizes(rates))

    def step_sizes(self, rates: Rates) -> Tensor:
        """The learning rate, or with `critic_lr` that of each parameter."""
        return rates.lr if rates.critic_lr is None else torch.where(self.of_value, rates.critic_lr, rates.lr)

    def descend(self, adam: Adam, loss: Callable, lr: Tensor) -> tuple[Tensor, Adam, Tensor]:
        """One update by the gradient of `loss(net)`; its norm follows what the loss logs."""
        gradient, metrics = self.flat.gradient(loss)
        # One global norm over policy and value together, clipped before Adam sees it.
        gradient, norm = clip_norm(gradient, self.spec.max_grad_norm)
        vector, adam = adam_step(self.flat.vector, gradient, adam, lr, self.spec.adam_eps, self.rule)
        return vector, adam, torch.cat([metrics, norm.detach().reshape(1)])

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "adam": dict(self.adam._asdict()),
            "memory": None if self.memory is None else self.memory.to("cpu", copy=True),
            "imitation": None if self.imitation is None else self.imitation.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.adam = Adam(**{name: value.to(self.device) for name, value in state["adam"].items()})
        if self.memory is not None:
            self.memory = state["memory"].to(self.device, copy=True)
        if self.imitation is not None:
            self.imitation.load_state(state["imitation"])
        super().load_state(state)

    def cut(self, rows: np.ndarray) -> None:
        super().cut(rows)
        if self.imitation is not None:
            self.imitation.episodes.cut(rows)


LEAST = 1e-6  # added to every (R - V)₊, so that a step once no better than expected can be sampled again
METRICS = ("imitation_policy_loss", "imitation_value_loss", "imitation_share")


class ImitationRows(NamedTuple):
    """Stored steps and their importance weights."""

    obs: Tensor
    actions: Tensor
    returns: Tensor
    masks: Tensor | None
    weights: Tensor


class SelfImitation:
    """A memory of good steps, and gradient steps on them with the learner's own parameters and optimizer."""

    def __init__(self, learner: OnPolicy, spec: SelfImitationSpec, parts: AlgorithmParts):
        if learner.recurrent:
            raise UsageError("algorithm.self_imitation learns from single steps and does not work with net.recurrent")
        self.learner, self.spec = learner, spec
        self.gamma = parts.spec.algorithm.gamma
        self.episodes = WholeEpisodes(learner.episodes.num_envs, self.gamma)
        self.columns: dict[str, Tensor] = {}  # made with the first episode, (buffer, ...)
        self.tree = SumTree(spec.buffer)
        self.size = self.head = 0
        self.most = 1.0  # the largest (R - V)₊ seen: new steps begin with it
        self._update = parts.compiled(self.update)

    def add(self, rollout: Rollout, rewards: Tensor, next_values: Tensor, valid: Tensor | None) -> None:
        """Remember the episodes that ended in a rollout; `rewards` are as they are learned from."""
        # A truncated episode bootstraps from the value of its last observation: a time limit is not a failure.
        truncated = rollout.truncated & ~rollout.terminated
        rewards = rewards + torch.where(truncated, self.gamma * next_values, 0.0)
        columns = {"obs": rollout.obs, "actions": rollout.actions, "rewards": rewards, "masks": rollout.masks}
        rows = self.episodes.add(columns, rollout.terminated | rollout.truncated, valid)
        if rows is not None:
            self._remember({name: column for name, column in rows.items() if name != "rewards"})

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
        """Its gradient steps, once a batch is stored; the means of their metrics."""
        spec = self.spec
        if self.size < spec.batch:
            return {}
        totals = torch.zeros(len(METRICS), device=lr.device)
        for _ in range(spec.updates):
            at, rows = self._sample()
            out = self.learner.gradient_step(rows, lr, self._update)
            totals += out[: len(METRICS)]
            self._weigh(at, out[len(METRICS) : -1])
        return dict(zip(METRICS, (totals / spec.updates).tolist(), strict=True))

    def _sample(self) -> tuple[np.ndarray, ImitationRows]:
        spec, total = self.spec, self.tree.total
        uniform = torch.rand(spec.batch, generator=self.learner.generator, dtype=torch.float64).numpy()
        at = self.tree.find(uniform * total)
        weights = (self.size * self.tree.weights(at) / total) ** -spec.beta
        device = self.columns["returns"].device
        rows = {name: column[torch.from_numpy(at).to(device)] for name, column in self.columns.items()}
        weight = torch.from_numpy(weights / weights.max()).float().to(device)
        return at, ImitationRows(rows["obs"], rows["actions"], rows["returns"], rows.get("masks"), weight)

    def _weigh(self, at: np.ndarray, better: Tensor) -> None:
        numbers = better.double().numpy(force=True)
        self.most = max(self.most, float(numbers.max()))
        self.tree.set(at, (numbers + LEAST) ** self.spec.alpha)

    def update(self, adam: Adam, rows: ImitationRows, lr: Tensor) -> tuple[Tensor, Adam, Tensor]:
        """One gradient step: new parameters and optimizer state; metrics, (R - V)₊ of each row, the gradient's norm."""
        return self.learner.descend(adam, lambda net: self.loss(net, rows), lr)

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
        """The stored steps, copied, without rows never written."""
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
