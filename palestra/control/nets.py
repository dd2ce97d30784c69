"""Networks for control, and the one vector that holds all parameters of a network."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.control.actions import ActionHead, Distribution
from palestra.control.actors import Actor
from palestra.control.layers import affine, linear
from palestra.control.trunks import make_trunk
from palestra.spec.control.net import NetSpec


class PolicyNet(Actor):
    """A policy without a value function."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        self.trunk = make_trunk(obs_shape, spec, obs_scale=obs_scale)
        self.policy_head, self.log_std = _policy_end(self.trunk.size, head, spec)

    def greedy(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The most likely actions."""
        return self.policy(obs, mask).mode()

    def drawn(self, obs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        """Actions drawn from the policy."""
        return self.policy(obs, mask).sample(self.head.noise(generator, len(obs)).to(obs.device))

    def policy(self, obs: Tensor, mask: Tensor | None = None) -> Distribution:
        """The distribution over actions in `obs`, (B, ...)."""
        hidden = self.trunk.forward(obs)
        outputs = affine(hidden, self.policy_head.weight, self.policy_head.bias)
        return self.head.distribution(outputs, self.log_std, mask)

    forward = policy


class ActorCritic(Actor):
    """A policy and a value function, with separate hidden layers or shared ones."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__(head)
        # Here and not in the trunks: one module twice does not trace as one graph.
        self.obs_scale = obs_scale
        self.trunk = make_trunk(obs_shape, spec)
        self.value_trunk = None if spec.shared else make_trunk(obs_shape, spec, spec.critic_hidden)
        self.policy_head, self.log_std = _policy_end(self.trunk.size, head, spec)
        self.value_head = linear((self.value_trunk or self.trunk).size, 1, 1.0 if spec.orthogonal else None)

    def greedy(self, obs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The most likely actions."""
        return self.policy(obs, mask).mode()

    def drawn(self, obs: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        """Actions drawn from the policy."""
        return self.policy(obs, mask).sample(self.head.noise(generator, len(obs)).to(obs.device))

    def policy(self, obs: Tensor, mask: Tensor | None = None) -> Distribution:
        """The distribution over actions in `obs`, (B, ...)."""
        return self._distribution(self.trunk.forward(self._scaled(obs)), mask)

    def value(self, obs: Tensor) -> Tensor:
        """V of `obs`, (B,)."""
        return self._values((self.value_trunk or self.trunk).forward(self._scaled(obs)))

    def forward(self, obs: Tensor, mask: Tensor | None = None) -> tuple[Distribution, Tensor]:
        """Both, for learning."""
        obs = self._scaled(obs)
        hidden = self.trunk.forward(obs)
        return self._distribution(hidden, mask), self._values(
            hidden if self.value_trunk is None else self.value_trunk.forward(obs)
        )

    def _scaled(self, obs: Tensor) -> Tensor:
        return obs if self.obs_scale is None else self.obs_scale.forward(obs)

    def _distribution(self, hidden: Tensor, mask: Tensor | None) -> Distribution:
        outputs = affine(hidden, self.policy_head.weight, self.policy_head.bias)
        return self.head.distribution(outputs, self.log_std, mask)

    def _values(self, hidden: Tensor) -> Tensor:
        return affine(hidden, self.value_head.weight, self.value_head.bias).squeeze(-1)


def _policy_end(inputs: int, head: ActionHead, spec: NetSpec) -> tuple[nn.Linear, nn.Parameter | None]:
    # A small policy head makes the first policy almost uniform, whatever the observation.
    last = linear(inputs, head.outputs, 0.01 if spec.orthogonal else None)
    return last, nn.Parameter(torch.full((head.outputs,), spec.log_std)) if head.has_log_std else None


class Flat:
    """A network whose parameters are views of one vector.

    Clipping and the optimizer then cost a handful of operations instead of a handful for each parameter, which on a
    small network is most of an update.
    """

    def __init__(self, net: nn.Module):
        self.net = net
        self.names = [name for name, _ in net.named_parameters()]
        self.parameters = list(net.parameters())
        self.sizes = [p.numel() for p in self.parameters]
        self.vector = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        for p, part in zip(self.parameters, self.vector.split(self.sizes), strict=True):
            p.data = part.view(p.shape)

    def gradient(self, loss: Callable[[Callable], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        """The gradient of `loss(net)[0]` as one vector, and `loss(net)[1]`.

        Eagerly autograd differentiates by the parameters themselves; inside a compiled graph the network is called as a
        function of the vector, because that is what `torch.compile` traces as one graph on every torch we support.
        """
        if not torch.compiler.is_compiling():
            with torch.enable_grad():
                value, extra = loss(self.net)
            gradients = torch.autograd.grad(value, self.parameters)
            return torch.cat([g.reshape(-1) for g in gradients]), extra

        def of(vector: Tensor) -> tuple[Tensor, Any]:
            views = [part.view(p.shape) for part, p in zip(vector.split(self.sizes), self.parameters, strict=True)]
            named = dict(zip(self.names, views, strict=True))
            return loss(lambda *args: torch.func.functional_call(self.net, named, args))

        gradient, (_, extra) = torch.func.grad_and_value(of, has_aux=True)(self.vector)
        return gradient, extra
