"""Policy and value networks, feed-forward and recurrent.

The memory of a recurrent network is one tensor `(B, memory)` for all its cells, opaque to callers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.control.nets.heads import ActionHead, Distribution
from palestra.control.nets.trunks import Trunk, affine, linear
from palestra.spec.shape import NetSpec, RecurrentSpec


class Actor(nn.Module):
    """A network that acts. Actions are as they are stored: the head converts them to the environment's."""

    memory: int = 0
    """The width of a recurrent policy's memory; 0: it acts on the observation alone."""

    def __init__(self, head: ActionHead):
        super().__init__()
        self.head = head

    def policy(self, obs: Tensor, mask: Tensor | None = None) -> Any:
        """The distribution over actions in `obs`, (B, ...); `mask`, (B, outputs), is True for allowed actions."""
        raise NotImplementedError

    def actions(self, obs: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """The most likely action in each of `obs`, or one sampled where there is a generator and a distribution."""
        return self.chosen(self.policy(obs, mask), obs, generator)

    def chosen(self, distribution: Any, obs: Tensor, generator: torch.Generator | None) -> Tensor:
        """The modes of a distribution over actions in `obs`, or samples of it."""
        if generator is None:
            return distribution.mode()
        return distribution.sample(self.head.noise(generator, len(obs)).to(obs.device))


class RecurrentActor(Actor):
    """A network that acts with a memory, (B, memory), which is cleared where episodes begin."""

    def nothing(self, rows: int) -> Tensor:
        """The memory before an episode, (rows, memory)."""
        return next(self.parameters()).new_zeros(rows, self.memory)

    def remembered(
        self, obs: Tensor, memory: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """`actions` in `obs` after what is in memory, and the memory after them."""
        raise NotImplementedError


class PolicyNet(Actor):
    """A policy without a value function."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        self.trunk = Trunk(obs_shape, spec, obs_scale=obs_scale)
        self.policy_head, self.log_std = _policy_head(self.trunk.size, head, spec)

    def policy(self, obs: Tensor, mask: Tensor | None = None) -> Distribution:
        return self.head.distribution(affine(self.trunk.forward(obs), self.policy_head), self.log_std, mask)

    forward = policy


class ActorCritic(Actor):
    """A policy and a value function, with separate hidden layers or shared ones."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        # Here and not in the trunks: one module twice does not trace as one graph.
        self.obs_scale = obs_scale
        self.trunk = Trunk(obs_shape, spec)
        self.value_trunk = None if spec.shared else Trunk(obs_shape, spec, spec.critic_hidden)
        self.policy_head, self.log_std = _policy_head(self.trunk.size, head, spec)
        self.value_head = linear((self.value_trunk or self.trunk).size, 1, 1.0 if spec.orthogonal else None)

    def policy(self, obs: Tensor, mask: Tensor | None = None) -> Distribution:
        return self._distribution(self.trunk.forward(self._scaled(obs)), mask)

    def value(self, obs: Tensor) -> Tensor:
        """V of `obs`, (B,)."""
        return self._values((self.value_trunk or self.trunk).forward(self._scaled(obs)))

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> tuple[Distribution, Tensor]:
        """Both, for learning."""
        obs = self._scaled(obs)
        hidden = self.trunk.forward(obs)
        value_hidden = hidden if self.value_trunk is None else self.value_trunk.forward(obs)
        return self._distribution(hidden, mask), self._values(value_hidden)

    def _scaled(self, obs: Tensor) -> Tensor:
        return obs if self.obs_scale is None else self.obs_scale.forward(obs)

    def _distribution(self, hidden: Tensor, mask: Tensor | None) -> Distribution:
        return self.head.distribution(affine(hidden, self.policy_head), self.log_std, mask)

    def _values(self, hidden: Tensor) -> Tensor:
        return affine(hidden, self.value_head).squeeze(-1)


def _policy_head(inputs: int, head: ActionHead, spec: NetSpec) -> tuple[nn.Linear, nn.Parameter | None]:
    # A small policy head makes the first policy almost uniform, whatever the observation.
    last = linear(inputs, head.outputs, 0.01 if spec.orthogonal else None)
    gaussian = head.continuous and head.family == "gaussian"
    return last, nn.Parameter(torch.full((head.outputs,), spec.log_std)) if gaussian else None


class Cell(nn.Module):
    """The weights of an LSTM (Hochreiter & Schmidhuber 1997) or GRU (Cho et al. 2014), gates in torch's order."""

    def __init__(self, inputs: int, spec: RecurrentSpec, gain: float | None):
        super().__init__()
        self.lstm, self.size = spec.cell == "lstm", spec.size
        self.memory = spec.size * (2 if self.lstm else 1)
        gates = 4 if self.lstm else 3
        self.inputs = linear(inputs, gates * spec.size, gain)
        self.hidden = linear(spec.size, gates * spec.size, gain)


def unroll(cells: list[Cell], seen: list[Tensor], began: Tensor, memory: Tensor) -> Tensor:
    """The memories of K cells of one kind after each of T steps, (T, B, K · memory of one), side by side.

    Each cell has its own inputs (T, B, features). `began` (T, B) clears the memory before the step. One batched product
    per step advances all cells: the steps are sequential, and the overhead around the products is most of their cost.
    """
    lstm, size = cells[0].lstm, cells[0].size
    weight = torch.stack([cell.hidden.weight.t() for cell in cells])  # (K, size, gates)
    bias = torch.stack([cell.hidden.bias[None] for cell in cells])
    # All steps at once, as inputs do not depend on the memory. (T, K, B, gates)
    projected = torch.stack([cell.inputs(x) for cell, x in zip(cells, seen, strict=True)], dim=1)
    stays = (~began).to(memory.dtype)[:, None, :, None]
    some = began.any(dim=1).tolist()
    state = memory.unflatten(1, (len(cells), -1)).transpose(0, 1)  # (K, B, memory of one)
    states = []
    for now, stay, begins in zip(projected.unbind(0), stays.unbind(0), some, strict=True):
        state = state * stay if begins else state
        hidden = state[..., :size]
        gates = torch.baddbmm(bias, hidden, weight)
        state = _lstm(now + gates, state[..., size:]) if lstm else _gru(now, gates, hidden)
        states.append(state)
    return torch.stack(states).transpose(1, 2).flatten(2)


def _lstm(gates: Tensor, cell: Tensor) -> Tensor:
    i, f, _, o = torch.sigmoid(gates).chunk(4, dim=-1)
    cell = f * cell + i * torch.tanh(gates.chunk(4, dim=-1)[2])
    return torch.cat((o * torch.tanh(cell), cell), dim=-1)


def _gru(projected: Tensor, gates: Tensor, hidden: Tensor) -> Tensor:
    size = hidden.shape[-1]
    r, z = torch.sigmoid(projected[..., : 2 * size] + gates[..., : 2 * size]).chunk(2, dim=-1)
    new = torch.tanh(projected[..., 2 * size :] + r * gates[..., 2 * size :])
    return torch.lerp(new, hidden, z)


class Recurrent(RecurrentActor):
    """A policy and a value function with memory, each with its own hidden layers and cell, or with shared ones."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        assert spec.recurrent is not None
        gain = 1.0 if spec.orthogonal else None
        self.obs_scale = obs_scale
        self.trunk = Trunk(obs_shape, spec)
        self.value_trunk = None if spec.shared else Trunk(obs_shape, spec, spec.critic_hidden)
        self.cell = Cell(self.trunk.size, spec.recurrent, gain)
        self.value_cell = None if self.value_trunk is None else Cell(self.value_trunk.size, spec.recurrent, gain)
        self.memory = self.cell.memory * (1 if spec.shared else 2)
        self.policy_head, self.log_std = _policy_head(spec.recurrent.size, head, spec)
        self.value_head = linear(spec.recurrent.size, 1, gain)

    def remembered(
        self, obs: Tensor, memory: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        distribution, _, memory = self.advance(obs, memory, mask)
        return self.chosen(distribution, obs, generator), memory

    def advance(self, obs: Tensor, memory: Tensor, mask: Tensor | None = None) -> tuple[Distribution, Tensor, Tensor]:
        """One step: the distribution over actions, V of `obs`, (B,), and the memory after it, (B, memory)."""
        began = torch.zeros(1, len(obs), dtype=torch.bool, device=obs.device)
        memories = self._memories(obs.unsqueeze(0), began, memory)[0]
        return self._distribution(memories, mask), self._values(memories), memories

    def forward(
        self, obs: Tensor, began: Tensor, memory: Tensor, masks: Tensor | None = None
    ) -> tuple[Distribution, Tensor]:
        """T steps of B environments for learning: the distribution over (T, B) actions, and values (T, B)."""
        memories = self._memories(obs, began, memory)
        return self._distribution(memories, masks), self._values(memories)

    def values(self, obs: Tensor, began: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Values (T, B), and the memories after each step, (T, B, memory)."""
        memories = self._memories(obs, began, memory)
        return self._values(memories), memories

    def _memories(self, obs: Tensor, began: Tensor, memory: Tensor) -> Tensor:
        rows = obs.flatten(0, 1)
        rows = rows if self.obs_scale is None else self.obs_scale.forward(rows)
        cells, trunks = [self.cell], [self.trunk]
        if self.value_cell is not None and self.value_trunk is not None:
            cells, trunks = [self.cell, self.value_cell], [self.trunk, self.value_trunk]
        return unroll(cells, [trunk(rows).unflatten(0, began.shape) for trunk in trunks], began, memory)

    def _distribution(self, memories: Tensor, mask: Tensor | None) -> Distribution:
        return self.head.distribution(self.policy_head(memories[..., : self.cell.size]), self.log_std, mask)

    def _values(self, memories: Tensor) -> Tensor:
        first = 0 if self.value_cell is None else self.cell.memory
        return self.value_head(memories[..., first : first + self.cell.size]).squeeze(-1)
