"""What algorithms that learn from a replay memory share: acting, storing and learning in turns."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.algorithms.base import Algorithm, AlgorithmParts
from palestra.control.envs.stepping import Transition
from palestra.control.episodes import Episodes
from palestra.control.memory.replay import Replay, ReplayBatch
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.values import check_bounds
from palestra.control.optim import compiled, no_denormals, products, put_back, taken
from palestra.control.policy import Policy
from palestra.control.scaling import ObsScale, Rewards
from palestra.errors import UsageError
from palestra.rl.schedules import value
from palestra.spec.kinds.control import DQNSpec, OffPolicySpec

GATHERED_BYTES = 64 * 2**20  # observations gathered at once for several updates, more or less
DRAWN_AT_ONCE = 16  # batches drawn by the same priorities: one by one, drawing them costs much of an update


class OffPolicy(Algorithm):
    """A learner with a memory. A subclass says how to act (`explore`, `act`) and how to learn (`learn`)."""

    metrics: ClassVar[tuple[str, ...]]
    """What `learn` gives, by name."""
    net: Any
    """The network that acts."""

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        spec = parts.spec.algorithm
        assert isinstance(spec, OffPolicySpec)
        self.head, self.device, self.frames, self.common = parts.head, parts.device, parts.spec.train.frames, spec
        self.net = self.actor(parts.spec, parts.obs_shape, parts.head)
        self.policy = Policy(parts.obs_shape, self.net, parts.device)
        self.episodes = Episodes(parts.stepper)
        self.memory = Replay(
            spec.buffer,
            self.episodes.num_envs,
            parts.obs_shape,
            self.episodes.obs_dtype,
            parts.head.shape,
            parts.head.dtype,
            gamma=spec.gamma,
            n_step=spec.n_step,
            prioritized=spec.prioritized if isinstance(spec, DQNSpec) else None,
            frame_stack=parts.spec.env.frame_stack,
            device=parts.device,
        )
        self.rewards = Rewards(parts.spec.env, self.episodes.num_envs, spec.gamma, parts.device)
        self.scale = next((module for module in self.net.modules() if isinstance(module, ObsScale)), None)
        # What the environments show, in an array of our own: they may write into theirs again.
        self._shown = np.zeros_like(self.episodes.now)
        self._shown_tensor = torch.from_numpy(self._shown)

    @abstractmethod
    def explore(self, horizon: int) -> Any:
        """Draw all the noise that `act` needs in a step of `horizon` vector steps at once."""

    @abstractmethod
    def act(self, obs: Tensor, noise: Any, t: int, progress: float) -> Tensor:
        """The actions to store for `obs`, (N, ...), at vector step `t` of those that `noise` was drawn for."""

    @abstractmethod
    def learn(self, updates: int, progress: float) -> Tensor:
        """So many gradient steps; the sums over them of what `metrics` names, as one tensor."""

    def step(self, progress: float) -> dict[str, float]:
        """Act for `horizon` vector steps, and learn every `update_every` of them once there is enough to learn from."""
        with self.span("interact"):
            return self._step(progress)

    def _step(self, progress: float) -> dict[str, float]:
        spec, episodes = self.common, self.episodes
        refuse_masks(episodes, spec.name)  # pyrefly: ignore
        began, before = episodes.frame, self.updates
        at_once = spec.updates_at_once(episodes.num_envs)
        noise = self.explore(spec.horizon)
        random = random_actions(self.head, self.generator, spec.horizon, episodes.num_envs)
        totals = torch.zeros(len(self.metrics), device=self.device)
        for t in range(spec.horizon):
            now = progress + (episodes.frame - began) / self.frames
            self._shown[:] = episodes.now
            if episodes.frame < spec.start:
                actions = random[t]
            else:
                # One row a time: rounding its factors would cost more than the products.
                with torch.no_grad(), products("fp32"):
                    actions = self.act(self._shown_tensor.to(self.device), noise, t, now)
            moved = episodes.step(self.head.to_env(actions))
            self._check(moved)
            kept = moved._replace(rewards=self.rewards.kept(moved.rewards))
            self.memory.add(self._shown, actions.numpy(force=True), kept)
            if self.rewards.scale is not None:
                self._add_rewards(moved)
            if (t + 1) % spec.update_every == 0 and episodes.frame >= spec.start:
                with no_denormals():
                    totals += self.learn(at_once, min(now, 1.0))
        if self.scale is not None:
            self.scale.update(*self.memory.newest(spec.horizon))
        made = self.updates - before
        means = (totals / made).tolist() if made else []
        return dict(zip(self.metrics, means, strict=False)) | {"updates": self.updates}

    def batches(self, updates: int) -> Iterator[ReplayBatch]:
        """What to learn from in so many updates, one batch each."""
        return (batch for drawn in self.drawn(updates) for batch in drawn)

    def drawn(self, updates: int, beta: float | None = None) -> Iterator[list[ReplayBatch]]:
        """The same in groups that are gathered together; who draws by priority sets the new ones after each group."""
        size = self.common.batch
        most = max(1, GATHERED_BYTES // (8 * size * math.prod(self._shown.shape[1:]) * self._shown.itemsize)) * 4
        if beta is not None:
            most = min(most, DRAWN_AT_ONCE)
        for done in range(0, updates, most):
            count = min(most, updates - done)
            many = self.memory.sample_many(count, size, self.generator, beta)
            many = many._replace(rewards=self.rewards.scaled(many.rewards))
            parts = [(None,) * count if part is None else part.split(size) for part in many]
            yield [ReplayBatch._make(each) for each in zip(*parts, strict=True)]

    def _check(self, moved: Transition) -> None:
        """Stop before what is not finite is stored. A sum is: then each number is looked at."""
        if not math.isfinite(moved.rewards.sum()):
            self.episodes.check("reward", moved.rewards)
        if moved.obs.dtype.kind == "f" and not math.isfinite(moved.obs.sum()):
            self.episodes.check("observation", moved.obs)
        final = moved.final_obs
        if final is not None and final.dtype.kind == "f" and not math.isfinite(final.sum()):
            self.episodes.check("final observation", final)

    def _add_rewards(self, moved: Transition) -> None:
        ended = np.logical_or(moved.terminated, moved.truncated)
        columns = [moved.rewards, ended] + ([] if moved.valid is None else [moved.valid])
        self.rewards.update(*(torch.as_tensor(column)[None].to(self.device) for column in columns))

    @property
    def _beside(self) -> Path | None:
        return None if self.folder is None else self.folder / "replay"

    def state(self) -> dict[str, Any]:
        """Policy, memory, environments and counters; a subclass adds its own."""
        return {
            "policy": self.policy.state(),
            "updates": self.updates,
            "episodes": self.episodes.state(),
            "memory": self.memory.state(self._beside),
            "rewards": self.rewards.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.policy.load_state(state["policy"])
        self.updates = state["updates"]
        self.memory.load_state(state["memory"], self._beside)
        self.rewards.load_state(state["rewards"])
        restarted = self.episodes.load_state(state["episodes"])
        if restarted is not None:
            self.memory.cut(restarted)
            self.rewards.cut(restarted)


class Inputs(NamedTuple):
    """What an update needs besides a batch."""

    noise: Tensor
    rates: Tensor
    """The paces of the critics, of the policy and of what else is trained."""
    warmth: Tensor | None = None
    """How far batch renormalization has warmed up."""


class TwinCritics(OffPolicy):
    """Twin critics and a policy that climbs them every `policy_delay` updates: SAC, CrossQ and TD3.

    A subclass makes `learned`, says what updates need (`inputs`) and what a step of the critics and one of the policy
    is.
    """

    spec: Any
    learned: Any
    """A named tuple of all that updates change; `seen` has the metrics of the policy's last update."""

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        self.spec = parts.spec.algorithm
        check_bounds(self.head, self.spec.name)
        self._update, self._update_critics = self.update, self.update_critics
        if parts.compile:
            self._update, self._update_critics = compiled(self.update), compiled(self.update_critics)

    @abstractmethod
    def inputs(self, updates: int, progress: float) -> Inputs:
        """Those of so many updates, each with a dimension for them in front."""

    @abstractmethod
    def step_critics(self, learned: Any, batch: ReplayBatch, given: Inputs) -> Tensor:
        """One gradient step of the critics; the loss and the mean value."""

    @abstractmethod
    def step_policy(self, learned: Any, obs: Tensor, given: Inputs) -> None:
        """One gradient step of the policy on what the critics say, which stay as they are."""

    def explore(self, horizon: int) -> Tensor:
        return self.head.noise(self.generator, horizon, self.episodes.num_envs).to(self.device)

    def rate(self, name: str, progress: float) -> float:
        """A learning rate; where it has none of its own, the policy's."""
        return value(progress=progress, **(getattr(self.spec, name) or self.spec.lr).arguments())

    @torch.no_grad()
    def learn(self, updates: int, progress: float) -> Tensor:
        """Gradient steps of the critics, and every `policy_delay` of them one of the policy."""
        inputs = [part.to(self.device) for part in self.inputs(updates, progress) if part is not None]
        totals = torch.zeros(len(self.metrics), device=self.device)
        for batch, *given in zip(self.batches(updates), *inputs, strict=True):
            self.updates += 1
            both = self.updates % self.spec.policy_delay == 0
            (self._update if both else self._update_critics)(self.learned, batch, Inputs(*given), totals)
        return totals

    def update(self, learned: Any, batch: ReplayBatch, given: Inputs, totals: Tensor) -> None:
        """One gradient step of the critics, then one of the policy."""
        seen = self.step_critics(learned, batch, given)
        self.step_policy(learned, batch.obs, given)
        totals.add_(torch.cat([seen, learned.seen]))

    def update_critics(self, learned: Any, batch: ReplayBatch, given: Inputs, totals: Tensor) -> None:
        """One gradient step of the critics alone."""
        totals.add_(torch.cat([self.step_critics(learned, batch, given), learned.seen]))

    def state(self) -> dict[str, Any]:
        return super().state() | {"learned": taken(self.learned)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        put_back(self.learned, state["learned"])


def random_actions(head: ActionHead, generator: torch.Generator, *batch: int) -> Tensor:
    """Actions as they are stored, drawn uniformly; parts of a Box without bounds too, from −1 to 1."""
    if head.continuous:
        return torch.rand((*batch, *head.shape), generator=generator) * 2 - 1
    return torch.randint(head.outputs, batch, generator=generator)


def refuse_masks(episodes: Episodes, name: str) -> None:
    """Stop where the environment forbids actions: the values of forbidden ones would be learned from and chosen."""
    if episodes.mask is not None:
        raise UsageError(
            f"{episodes.stepper.name} forbids actions (info['action_mask']), and {name} cannot leave them out: "
            "use ppo, a2c or reinforce"
        )
