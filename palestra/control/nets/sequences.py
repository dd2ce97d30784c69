"""Recurrent networks of the off-policy algorithms: Q-values, a soft policy, twin critics.

Each takes (T, B) steps from a memory, (B, memory), clears it where episodes began, and also gives the memories after
each step, (T, B, memory).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.control.nets.actor_critic import Cell, RecurrentActor, unroll
from palestra.control.nets.heads import ActionHead
from palestra.control.nets.trunks import Trunk, linear
from palestra.control.nets.values import LOG_STD_BOUNDS, ActionValues, Critics, forbid
from palestra.rl.distributions import Categorical, SquashedGaussian
from palestra.spec.off_policy import DQNSpec
from palestra.spec.shape import NetSpec


class Remembering(nn.Module):
    """Hidden layers and a recurrent cell."""

    def __init__(self, obs_shape: Sequence[int], spec: NetSpec, obs_scale: nn.Module | None):
        super().__init__()
        assert spec.recurrent is not None
        self.trunk = Trunk(obs_shape, spec, obs_scale=obs_scale)
        self.cell = Cell(self.trunk.size, spec.recurrent, 1.0 if spec.orthogonal else None)
        self.size, self.memory = self.cell.size, self.cell.memory

    def forward(self, obs: Tensor, began: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Features (T, B, size) and memories."""
        seen = self.trunk.forward(obs.flatten(0, 1)).unflatten(0, began.shape)
        memories = unroll([self.cell], [seen], began, memory)
        return memories[..., : self.size], memories


def one_step(obs: Tensor) -> tuple[Tensor, Tensor]:
    """Observations (B, ...) as a sequence of one step, in which no episode begins."""
    rows = obs.shape[0]  # not len: exported, that would be the constant it was traced with
    return obs[None], torch.zeros(1, rows, dtype=torch.bool, device=obs.device)


class RecurrentQ(ActionValues, RecurrentActor):
    """Q of every action of a Discrete space; acts greedily."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        head: ActionHead,
        spec: NetSpec,
        obs_scale: nn.Module | None = None,
        options: DQNSpec | None = None,
    ):
        super().__init__(head)
        self.encoder = Remembering(obs_shape, spec, obs_scale)
        self.memory = self.encoder.memory
        self.make_heads(self.encoder.size, [], spec, options)

    def forward(self, obs: Tensor, began: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What is predicted of the return of every action, (T, B, A, outputs), and memories."""
        hidden, memories = self.encoder(obs, began, memory)
        return self.action_values(hidden), memories

    def remembered(
        self, obs: Tensor, memory: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        values, memories = self(*one_step(obs), memory)
        return forbid(self.expected(values[0]), mask).argmax(dim=-1), memories[0]


class RecurrentSoft(RecurrentActor):
    """A squashed Gaussian for a Box, a softmax for Discrete actions."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        self.encoder = Remembering(obs_shape, spec, obs_scale)
        self.memory, outputs = self.encoder.memory, head.outputs
        width = 2 * outputs if head.continuous else outputs
        self.policy_head = linear(self.encoder.size, width, 0.01 if spec.orthogonal else None)
        if head.continuous:
            with torch.no_grad():
                self.policy_head.bias[outputs:] = spec.log_std

    def forward(self, obs: Tensor, began: Tensor, memory: Tensor, mask: Tensor | None = None) -> tuple[Any, Tensor]:
        """The distribution over T · B actions, and memories."""
        hidden, memories = self.encoder(obs, began, memory)
        outputs = self.policy_head(hidden.flatten(0, 1))
        if not self.head.continuous:
            return Categorical(outputs, None if mask is None else mask.flatten(0, 1)), memories
        mean, log_std = outputs.chunk(2, dim=-1)
        return SquashedGaussian(mean, log_std.clamp(*LOG_STD_BOUNDS)), memories

    def remembered(
        self, obs: Tensor, memory: Tensor, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        policy, memories = self(*one_step(obs), memory, None if mask is None else mask[None])
        return self.chosen(policy, obs, generator), memories[0]


class RecurrentCritics(nn.Module):
    """Twin critics after one cell that both share; actions come in after it."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__()
        self.encoder = Remembering(obs_shape, spec, obs_scale)
        layers = spec.model_copy(update={"graph": None, "trunk": "mlp"})
        self.twins = Critics((self.encoder.size,), head, layers)

    def forward(self, obs: Tensor, began: Tensor, memory: Tensor, actions: Tensor | None = None) -> tuple[Any, Tensor]:
        """Values of T · B steps, (2, T · B), or of every Discrete action, (2, T · B, A), and memories.

        Without the actions of a Box the memories alone.
        """
        hidden, memories = self.encoder(obs, began, memory)
        if self.twins.continuous and actions is None:
            return None, memories
        return self.twins(hidden.flatten(0, 1), actions), memories
