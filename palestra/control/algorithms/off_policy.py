"""Shared code of the off-policy algorithms: act, store and learn in turns; twin critics with a delayed policy."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.algorithms.base import Algorithm, AlgorithmParts
from palestra.control.envs.goals import check_goals
from palestra.control.envs.stepping import Transition
from palestra.control.episodes import Episodes
from palestra.control.memory.hindsight import HindsightReplay
from palestra.control.memory.replay import Masks, Replay, ReplayBatch
from palestra.control.memory.sequences import SequenceReplay
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.values import check_bounds, forbid
from palestra.control.optim import FlatNet, copied, no_denormals, pace, products, restore
from palestra.errors import UsageError
from palestra.rl.losses import td_target, twin_loss
from palestra.rl.schedules import value

GATHERED_BYTES = 64 * 2**20  # observations gathered at once for several updates, approximately
SAMPLED_AT_ONCE = 16  # batches sampled with the same priorities: one by one, sampling costs much of an update


class OffPolicy(Algorithm):
    """A learner with a replay memory. A subclass says how to act (`explore`, `act`) and how to learn (`learn`)."""

    metrics: ClassVar[tuple[str, ...]]
    """The names of what `learn` returns."""
    cells: ClassVar[int] = 1
    """Recurrent cells whose states are stored, where the networks are recurrent."""

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        self.head, self.frames, self.precision = parts.head, parts.spec.train.frames, parts.spec.train.precision
        self.fresh = parts.spec.init is None  # a trained policy fills the memory itself
        self.sampled_rows = self.spec.batch
        """Of the memory, in a batch: transitions, or sequences of them."""
        self.memory = self.make_memory(parts)
        # Observations in an array of our own: environments may write into theirs again.
        self._shown = np.zeros_like(self.episodes.now)
        self._shown_tensor = torch.from_numpy(self._shown)

    def make_memory(self, parts: AlgorithmParts) -> Any:
        """What batches are sampled from."""
        shapes = (parts.obs_shape, self.episodes.obs_dtype, self.head.shape, self.head.dtype)
        options: dict[str, Any] = {"gamma": self.spec.gamma, "n_step": self.spec.n_step, "device": parts.device}
        options |= {"prioritized": getattr(self.spec, "prioritized", None), "frame_stack": parts.spec.env.frame_stack}
        memory: Any = Replay
        if self.spec.her is not None:
            goals = check_goals(getattr(parts.stepper.env, "goals", None), parts.stepper.name)
            memory, her = HindsightReplay, {"her": self.spec.her, "goals": goals, "storable": self.rewards.storable}
            options |= her
        if parts.spec.net.recurrent is not None:
            memory, sequence = SequenceReplay, self.spec.sequence
            options |= {"sequence": sequence, "width": self.cells * parts.spec.net.recurrent.width}
            self.sampled_rows = self.spec.batch // sequence.length
        return memory(self.spec.buffer, self.episodes.num_envs, *shapes, **options)

    @abstractmethod
    def explore(self, horizon: int) -> Any:
        """Generate all the noise that `act` needs for `horizon` vector steps at once."""

    def observe(self, obs: Tensor) -> dict[str, Any]:
        """Take notice of what is acted on next, also where actions are random; what else to store with it."""
        return {}

    @abstractmethod
    def act(self, obs: Tensor, noise: Any, t: int, progress: float) -> Tensor:
        """The actions to store for `obs`, (N, ...), at vector step `t` of those that `noise` is for."""

    @abstractmethod
    def learn(self, updates: int, progress: float) -> Tensor:
        """`updates` gradient steps; the sums of their `metrics` as one tensor."""

    def step(self, progress: float) -> dict[str, float]:
        """Act for `horizon` vector steps, and learn every `update_every` of them once there is enough to learn from."""
        # A few rows: rounding the factors to bfloat16 would cost more than the products.
        with self.span("interact"), torch.no_grad(), products("fp32"):
            return self._step(progress)

    def _step(self, progress: float) -> dict[str, float]:
        spec, episodes = self.spec, self.episodes
        began, before = episodes.frame, self.updates
        at_once = spec.updates_at_once(episodes.num_envs)
        noise = self.explore(spec.horizon)
        random = random_actions(self.head, self.generator, spec.horizon, episodes.num_envs)
        random = held(random, spec.hold, self.generator)
        totals = torch.zeros(len(self.metrics), device=self.device)
        for t in range(spec.horizon):
            now = progress + (episodes.frame - began) / self.frames
            self._shown[:] = episodes.now
            mask = episodes.mask
            stored = self.observe(self._shown_tensor)
            if episodes.frame >= spec.start or not self.fresh:
                actions = self.act(self._shown_tensor.to(self.device), noise, t, now)
            else:
                actions = random[t] if mask is None else random_allowed(mask, self.generator)
            transition = episodes.step(self.head.to_env(actions))
            self._check(transition)
            if mask is not None and episodes.mask is not None:
                stored["masks"] = Masks(mask, episodes.mask, episodes.stepper.final_mask)
            storable = transition._replace(rewards=self.rewards.storable(transition.rewards))
            self.memory.add(self._shown, actions.numpy(force=True), storable, **stored)
            if self.rewards.scale is not None:
                _, rewards, terminated, truncated, valid, _, _ = transition
                columns = [rewards, np.logical_or(terminated, truncated)] + ([] if valid is None else [valid])
                self.rewards.update(*(torch.as_tensor(column)[None].to(self.device) for column in columns))
            if (t + 1) % spec.update_every == 0 and episodes.frame >= spec.start:
                with no_denormals(), products(self.precision):
                    totals += self.learn(at_once, min(now, 1.0))
        if self.obs_scale is not None:
            self.obs_scale.update(*self.memory.newest(spec.horizon))
        made = self.updates - before
        means = (totals / made).tolist() if made else []
        return dict(zip(self.metrics, means, strict=False)) | {"updates": self.updates}

    def batches(self, updates: int, beta: float | None = None) -> Iterator[list[ReplayBatch]]:
        """The batches of `updates` gradient steps, in groups gathered together; priorities are set after each group."""
        size = self.sampled_rows
        most = max(1, GATHERED_BYTES // (8 * size * math.prod(self._shown.shape[1:]) * self._shown.itemsize)) * 4
        if beta is not None:
            most = min(most, SAMPLED_AT_ONCE)
        most = max(1, most // (self.spec.batch // size))
        for done in range(0, updates, most):
            count = min(most, updates - done)
            many = self.memory.sample(size, self.generator, beta, batches=count)
            many = many._replace(rewards=self.rewards.scaled(many.rewards))
            parts = [(None,) * count if part is None else part.split(size) for part in many]
            yield [ReplayBatch._make(each) for each in zip(*parts, strict=True)]

    def _check(self, transition: Transition) -> None:
        """Raise before a non-finite number is stored."""
        obs, rewards, _, _, _, ended, final_obs = transition
        self.episodes.check("reward", rewards, range(len(rewards)))
        self.episodes.check("observation", obs, range(len(rewards)))
        if ended is not None and final_obs is not None:
            self.episodes.check("final observation", final_obs, ended)

    def state(self) -> dict[str, Any]:
        return super().state() | {"memory": self.memory.state(self.folder)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.memory.load_state(state["memory"], self.folder)
        super().load_state(state)

    def cut(self, rows: np.ndarray) -> None:
        super().cut(rows)
        self.memory.cut(rows)


class Inputs(NamedTuple):
    """What an update needs besides a batch."""

    noise: Tensor
    rates: Tensor
    """Step size, ε and decay (`pace`) of the critics, of the policy and of what else is trained, (k, 3)."""
    warmth: Tensor | None = None
    """Bounds of batch renormalization (`warmth_after`), (2,)."""


class TwinCritics(OffPolicy):
    """Twin critics and a policy that is updated every `policy_delay` updates of theirs: SAC, CrossQ and TD3.

    A subclass makes `learned`, and defines the inputs of updates and one step each of the critics and of the policy.
    """

    learned: Any
    """A named tuple of all that updates change; `seen` has the metrics of the policy's last update."""

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        check_bounds(self.head, self.spec.name)
        self.actors = FlatNet(self.net)  # the parameters of the network that acts are views of its vector
        self._update = parts.compiled(self.update, kept=1)
        self._update_critics = parts.compiled(self.update_critics, kept=1)

    @abstractmethod
    def inputs(self, updates: int, progress: float) -> Inputs:
        """The inputs of `updates` updates, each with a dimension for them in front."""

    @abstractmethod
    def step_critics(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> Tensor:
        """One gradient step of the critics; the loss and the mean value."""

    @abstractmethod
    def step_policy(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> None:
        """One gradient step of the policy on the critics' values; the critics do not change."""

    def explore(self, horizon: int) -> Tensor:
        return self.head.noise(self.generator, horizon, self.episodes.num_envs).to(self.device)

    def rates(self, updates: int, progress: float, *names: str) -> Tensor:
        """Paces of the critics and of these learning rates in the next updates, (updates, 1 + names, 3).

        A learning rate that the spec leaves out is the policy's.
        """
        spec, paces = self.spec, []
        schedules = [getattr(spec, name) or spec.lr for name in ("critic_lr", *names)]
        critic_lr, *lrs = (value(progress=progress, **schedule.arguments()) for schedule in schedules)
        for n in range(self.updates + 1, self.updates + updates + 1):
            steps = max(1, n // spec.policy_delay)  # of the policy; before its first its pace is not used
            policy = [pace(lr, spec.adam_eps, steps, self.rule) for lr in lrs]
            paces.append([pace(critic_lr, spec.adam_eps, n, self.rule), *policy])
        return torch.tensor(paces)

    @torch.no_grad()
    def learn(self, updates: int, progress: float) -> Tensor:
        """Gradient steps of the critics, and every `policy_delay` of them one of the policy."""
        columns = [column.to(self.device) for column in self.inputs(updates, progress) if column is not None]
        totals = torch.zeros(len(self.metrics), device=self.device)
        batches = (batch for group in self.batches(updates) for batch in group)
        for batch, *row in zip(batches, *columns, strict=True):
            self.updates += 1
            both = self.updates % self.spec.policy_delay == 0
            (self._update if both else self._update_critics)(self.learned, batch, Inputs(*row), totals)
        return totals

    def update(self, learned: Any, batch: ReplayBatch, inputs: Inputs, totals: Tensor) -> None:
        """One gradient step of the critics, then one of the policy."""
        seen = self.step_critics(learned, batch, inputs)
        self.step_policy(learned, batch, inputs)
        totals.add_(torch.cat([seen, learned.seen]))

    def update_critics(self, learned: Any, batch: ReplayBatch, inputs: Inputs, totals: Tensor) -> None:
        """One gradient step of the critics alone."""
        totals.add_(torch.cat([self.step_critics(learned, batch, inputs), learned.seen]))

    def state(self) -> dict[str, Any]:
        return super().state() | {"learned": copied(self.learned)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        restore(self.learned, state["learned"])


def critic_loss(q: Tensor, batch: ReplayBatch, next_values: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the twins' values `q`, (2, B), towards their targets; this loss and the mean value, to be logged."""
    error = twin_loss(q, td_target(batch.rewards, batch.discounts, next_values))
    return error, torch.stack([error.detach(), q.detach().mean()])


def random_actions(head: ActionHead, generator: torch.Generator, *batch: int) -> Tensor:
    """Uniformly random actions as they are stored; from −1 to 1 also where a Box has no bounds."""
    if head.continuous:
        return torch.rand((*batch, *head.shape), generator=generator) * 2 - 1
    return torch.randint(head.outputs, batch, generator=generator)


def held(actions: Tensor, steps: float, generator: torch.Generator) -> Tensor:
    """Actions (T, N, …), of which each is held for so many steps on average."""
    if steps == 1:
        return actions
    new = torch.rand(actions.shape[:2], generator=generator) < 1 / steps
    last = torch.where(new, torch.arange(len(actions))[:, None], 0).cummax(0).values
    return actions[last, torch.arange(actions.shape[1])]


def random_allowed(mask: np.ndarray, generator: torch.Generator) -> Tensor:
    """A uniformly random allowed action for each row, (N,)."""
    return forbid(torch.rand(mask.shape, generator=generator), torch.from_numpy(mask)).argmax(dim=1)


def refuse_masks(episodes: Episodes, name: str) -> None:
    """Refuse environments with action masks: the values of forbidden actions would be learned from and chosen."""
    if episodes.mask is not None:
        raise UsageError(
            f"{episodes.stepper.name} masks actions (info['action_mask']), which {name} does not support: "
            "use dqn, sac, ppo, a2c or reinforce"
        )
