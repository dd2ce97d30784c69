"""DQN and SAC with recurrent networks, on sequences of the replay memory (R2D2, Kapturowski et al. 2019).

What they store: transitions with the recurrent states that acted there, in a replay memory.
How they act: as without memory, the state carried through the episode, also while actions are random.
How they learn: from sequences. Each network starts from the stored state, is brought up to date with its weights by
the burn-in, which has no gradient, and learns from the steps after it. A successor is valued after the state of the
step before it, so that the final observation of an episode is as well.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.control.algorithms.base import AlgorithmParts
from palestra.control.algorithms.dqn import DQN
from palestra.control.algorithms.off_policy import Inputs, OffPolicy
from palestra.control.algorithms.sac import SAC, SacState
from palestra.control.memory.replay import ReplayBatch
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.sequences import RecurrentCritics, RecurrentQ, RecurrentSoft, one_step
from palestra.control.nets.values import ExplorationNoise
from palestra.control.optim import FunctionalNet, Trained
from palestra.control.scaling import obs_scale
from palestra.rl.losses import polyak, td_target
from palestra.spec.kinds.control import ControlSpec


class Steps(NamedTuple):
    """Sequences with time first, (L, B, ...), the burn-in before the learned steps."""

    obs: Tensor
    began: Tensor
    burn_in: int

    @classmethod
    def of(cls, batch: ReplayBatch, burn_in: int) -> "Steps":
        """The sequences of a batch."""
        assert batch.began is not None
        return cls(batch.obs.transpose(0, 1), batch.began.transpose(0, 1), burn_in)

    def before(self, net: Any, memory: Tensor) -> Tensor:
        """The memory before the learned steps, without gradient."""
        if self.burn_in == 0:
            return memory
        with torch.no_grad():
            return net(self.obs[: self.burn_in], self.began[: self.burn_in], memory)[1][-1]

    def learned(self, net: Any, memory: Tensor, *more: Any) -> Any:
        """What `net` gives for the learned steps, after the burn-in from `memory`."""
        start = self.before(net, memory)
        return net(self.obs[self.burn_in :], self.began[self.burn_in :], start, *more)


def learned_rows(batch: ReplayBatch, burn_in: int) -> Any:
    """The learned steps of sequences as a batch of (T · B, ...), time first, whose `weights` leave dummy steps out."""
    columns: tuple[Any, ...] = batch[:9]
    rows: list[Any] = [None if c is None else c.transpose(0, 1)[burn_in:].flatten(0, 1) for c in columns]
    assert batch.valid is not None
    valid = batch.valid.transpose(0, 1)[burn_in:].flatten().float()
    return ReplayBatch(*rows)._replace(weights=valid / valid.mean().clamp_min(1e-8))


class Sequences(OffPolicy):
    """Carries recurrent states while acting and stores them."""

    def __init__(self, parts: AlgorithmParts):
        super().__init__(parts)
        width = self.memory.columns["states"].tensor.shape[2]
        self.states = torch.zeros(self.episodes.num_envs, width, device=self.device)
        """The recurrent states after the last observation, (N, width)."""

    @property
    def burn_in(self) -> int:
        return self.spec.sequence.burn_in

    def observe(self, obs: Tensor) -> dict[str, Any]:
        began = self.episodes.began
        before = torch.where(torch.from_numpy(began).to(self.device)[:, None], 0.0, self.states)
        self.states = self.advance(obs.to(self.device), before)
        return {"began": began.copy(), "states": before.numpy(force=True)}

    def advance(self, obs: Tensor, states: Tensor) -> Tensor:
        """The states after `obs`, (N, ...); what `act` needs is kept."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        return super().state() | {"states": self.states.to("cpu", copy=True)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.states = state["states"].to(self.device, copy=True)
        super().load_state(state)


class RecurrentDQN(Sequences, DQN):
    """The learner of values."""

    net: Any
    network = RecurrentQ

    def advance(self, obs: Tensor, states: Tensor) -> Tensor:
        values, memories = self.net(*one_step(obs), states)
        self._q = self.net.expected(values[0])
        return memories[0]

    def act(self, obs: Tensor, noise: ExplorationNoise, t: int, progress: float) -> Tensor:
        return self.exploration.chosen(lambda: self._q, noise, t, progress, self.episodes.mask)

    def targets(self, batch: ReplayBatch, noise: Any = (None, None)) -> Tensor:
        """The TD targets of the learned steps, (T · B, outputs), without gradient."""
        rows, steps = learned_rows(batch, self.burn_in), Steps.of(batch, self.burn_in)
        following = self._following(self.target(self.target.vector), steps, batch, rows)
        double = self.spec.double
        chooses = self._following(self.flat(self.flat.vector), steps, batch, rows) if double else following
        return self.backed_up(rows, following, chooses)

    @staticmethod
    def _following(net: Any, steps: Steps, batch: ReplayBatch, rows: Any) -> Tensor:
        assert batch.states is not None
        _, memories = steps.learned(net, batch.states)
        return net(*one_step(rows.next_obs), memories.flatten(0, 1))[0][0]

    def loss(self, net: Any, batch: ReplayBatch, targets: Tensor, noise: Any = None) -> Any:
        assert batch.states is not None
        values, _ = Steps.of(batch, self.burn_in).learned(net, batch.states)
        return super().loss(lambda obs, noise: values.flatten(0, 1), learned_rows(batch, self.burn_in), targets)


class RecurrentSAC(Sequences, SAC):
    """The learner of a policy; stores the states of its cell, then of the critics'."""

    network = RecurrentSoft
    cells = 2

    @classmethod
    def actor(cls, spec: ControlSpec, obs_shape: tuple[int, ...], head: ActionHead) -> Any:
        return RecurrentSoft(obs_shape, head, spec.net, obs_scale(spec.env, obs_shape))

    def start(self, parts: AlgorithmParts) -> SacState:
        net = RecurrentCritics(parts.obs_shape, self.head, parts.spec.net, self.obs_scale)
        self.critics = FunctionalNet(net.to(self.device))
        critics = self.critics.start()
        actor, alpha = Trained.of(self.actors.vector), Trained.of(self.log_alpha())
        return SacState(actor, Trained.of(critics), critics.clone(), alpha, torch.zeros(3, device=self.device))

    def advance(self, obs: Tensor, states: Tensor) -> Tensor:
        own, critics = states.chunk(2, dim=1)
        mask = self.episodes.mask
        allowed = None if mask is None else torch.from_numpy(np.asarray(mask)).to(self.device)[None]
        self._policy, memories = self.net(*one_step(obs), own, allowed)
        _, others = self.critics(self.learned.critics.vector)(*one_step(obs), critics)
        return torch.cat([memories[0], others[0]], dim=1)

    def act(self, obs: Tensor, noise: Tensor, t: int, progress: float) -> Tensor:
        return self._policy.sample(noise[t])

    def step_critics(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> Tensor:
        rows, steps = learned_rows(batch, self.burn_in), Steps.of(batch, self.burn_in)
        own, critics = _states(batch)
        actor, target = self.actors(learned.actor.vector), self.critics(learned.target)
        _, memories = steps.learned(actor, own)
        after, masks = one_step(rows.next_obs), None if rows.next_masks is None else rows.next_masks[None]
        policy, _ = actor(*after, memories.flatten(0, 1), masks)
        actions, logprobs, _ = self.scored(policy, inputs.noise[0], rows.next_masks)
        _, memories = steps.learned(target, critics)
        following, _ = target(*after, memories.flatten(0, 1), actions)
        values = self.value(following, logprobs, learned.alpha.vector.exp())
        targets = td_target(rows.rewards, rows.discounts, values)

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            q, _ = steps.learned(self.critics(vector), critics, rows.actions)
            q = self.chosen(q, rows)
            error = 0.5 * (rows.weights * (q - targets).square()).mean(dim=1).sum()
            return error, torch.stack([error.detach(), q.detach().mean()])

        seen = learned.critics.descend(loss, inputs.rates[0], self.spec.max_grad_norm, self.rule)
        learned.target.copy_(polyak(learned.target, learned.critics.vector, self.spec.tau))
        return seen

    def step_policy(self, learned: Any, batch: ReplayBatch, inputs: Inputs) -> None:
        rows, steps = learned_rows(batch, self.burn_in), Steps.of(batch, self.burn_in)
        own, states = _states(batch)
        critics, alpha = self.critics(learned.critics.vector), learned.alpha.vector.exp()
        shown = None if batch.masks is None else batch.masks.transpose(0, 1)[self.burn_in :]

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            actor = self.actors(vector)
            start = steps.before(actor, own)
            policy, _ = actor(steps.obs[self.burn_in :], steps.began[self.burn_in :], start, shown)
            actions, logprobs, entropy = self.scored(policy, inputs.noise[1], rows.masks)
            q, _ = steps.learned(critics, states, actions)
            total = -(rows.weights * self.value(q, logprobs, alpha)).mean()
            return total, torch.stack([total.detach(), (rows.weights * entropy.detach()).mean()])

        self.descend_policy(learned, loss, inputs, rows.masks)


def _states(batch: ReplayBatch) -> tuple[Tensor, Tensor]:
    """The stored states of the policy's cell and of the critics'."""
    assert batch.states is not None
    own, critics = batch.states.chunk(2, dim=1)
    return own, critics
