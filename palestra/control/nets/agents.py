"""Networks of its own for each of several agents, whose observations end in which of them it is, one-hot."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from palestra.control.nets.actor_critic import Actor, ActorCritic
from palestra.control.nets.heads import ActionHead, Distribution
from palestra.control.nets.trunks import affine
from palestra.spec.shape import NetSpec


class SeparateAgents(Actor):
    """A policy and a value function for each agent; rows go through all of them, and get the output of their own.

    The others' outputs are multiplied by zero, so no gradient of a row reaches another agent's weights.
    """

    def __init__(
        self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None, agents: int
    ):
        super().__init__(head)
        self.obs_scale, self.agents = obs_scale, agents
        self.nets = nn.ModuleList(ActorCritic((obs_shape[0] - agents,), head, spec) for _ in range(agents))

    def policy(self, obs: Tensor, mask: Tensor | None = None) -> Distribution:
        outputs = self._own(obs, lambda net, own: affine(net.trunk(own), net.policy_head))
        return self.head.distribution(outputs, self._log_std(obs), mask)

    def value(self, obs: Tensor) -> Tensor:
        """V of `obs`, (B,)."""
        return self._own(obs, lambda net, own: net.value(own)[:, None]).squeeze(-1)

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> tuple[Distribution, Tensor]:
        """Both, for learning."""
        return self.policy(obs, mask), self.value(obs)

    def _own(self, obs: Tensor, output: Callable[[ActorCritic, Tensor], Tensor]) -> Tensor:
        """The output for each row of its own agent, (B, outputs)."""
        scaled = obs if self.obs_scale is None else self.obs_scale.forward(obs)
        own, which = scaled[:, : -self.agents], obs[:, -self.agents :]
        outputs = [output(net, own) for net in self.nets if isinstance(net, ActorCritic)]
        return (torch.stack(outputs, dim=1) * which[:, :, None]).sum(dim=1)

    def _log_std(self, obs: Tensor) -> Tensor | None:
        every: list[Tensor] = [
            net.log_std for net in self.nets if isinstance(net, ActorCritic) and net.log_std is not None
        ]
        return obs[:, -self.agents :] @ torch.stack(every) if every else None
