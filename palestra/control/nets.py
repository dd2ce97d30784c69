"""Networks for control, and the one vector that holds all parameters of a network."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.control.actions import ActionHead, Distribution
from palestra.control.actors import Actor
from palestra.spec.kinds.control import NetSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}


def linear(inputs: int, outputs: int, gain: float | None) -> nn.Linear:
    """A linear layer, with orthogonal weights of the given gain and zero biases, or with torch's own (None)."""
    layer = nn.Linear(inputs, outputs)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


class Trunk(nn.Module):
    """Hidden layers over flattened observations, the activation after each."""

    def __init__(self, sizes: Sequence[int], spec: NetSpec):
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        gain = math.sqrt(2) if spec.orthogonal else None
        # A plain list beside the registered one: on nets this small, looking a module up costs as much as its matmul.
        self._linears = [linear(i, o, gain) for i, o in pairwise(sizes)]
        self.layers = nn.ModuleList(self._linears)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to (B, last size)."""
        if not x.is_floating_point():
            x = x / 255 if x.dtype == torch.uint8 else x.float()  # the one place where images are scaled
        if x.ndim != 2:
            x = x.reshape(len(x), -1)
        for layer in self._linears:
            x = self.activation(F.linear(x, layer.weight, layer.bias))
        return x


class ActorCritic(Actor):
    """A policy and a value function, with separate hidden layers or shared ones."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec):
        super().__init__(head)
        sizes = [math.prod(obs_shape), *spec.hidden]
        self.trunk = Trunk(sizes, spec)
        self.value_trunk = None if spec.shared else Trunk(sizes, spec)  # one module twice does not trace as one graph
        # A small policy head makes the first policy almost uniform, whatever the observation.
        self.policy_head = linear(sizes[-1], head.outputs, 0.01 if spec.orthogonal else None)
        self.value_head = linear(sizes[-1], 1, 1.0 if spec.orthogonal else None)
        self.log_std = nn.Parameter(torch.zeros(head.outputs)) if head.continuous else None

    def greedy(self, obs: Tensor) -> Tensor:
        """The most likely actions."""
        return self.policy(obs).mode()

    def drawn(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        """Actions drawn from the policy."""
        return self.policy(obs).sample(self.head.noise(generator, len(obs)).to(obs.device))

    def policy(self, obs: Tensor) -> Distribution:
        """The distribution over actions in `obs`, (B, ...)."""
        return self._distribution(self.trunk.forward(obs))

    def value(self, obs: Tensor) -> Tensor:
        """V of `obs`, (B,)."""
        return self._values((self.value_trunk or self.trunk).forward(obs))

    def forward(self, obs: Tensor) -> tuple[Distribution, Tensor]:
        """Both, for learning."""
        hidden = self.trunk.forward(obs)
        return self._distribution(hidden), self._values(
            hidden if self.value_trunk is None else self.value_trunk.forward(obs)
        )

    def _distribution(self, hidden: Tensor) -> Distribution:
        return self.head.distribution(F.linear(hidden, self.policy_head.weight, self.policy_head.bias), self.log_std)

    def _values(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.value_head.weight, self.value_head.bias).squeeze(-1)


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

    def gradient(self, loss: Callable[[Callable], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The gradient of `loss(net)[0]` as one vector, and `loss(net)[1]`.

        Eagerly autograd differentiates by the parameters themselves; inside a compiled graph the network is called as a
        function of the vector, because that is what `torch.compile` traces as one graph on every torch we support.
        """
        if not torch.compiler.is_compiling():
            value, extra = loss(self.net)
            gradients = torch.autograd.grad(value, self.parameters)
            return torch.cat([g.reshape(-1) for g in gradients]), extra

        def of(vector: Tensor) -> tuple[Tensor, Tensor]:
            views = [part.view(p.shape) for part, p in zip(vector.split(self.sizes), self.parameters, strict=True)]
            named = dict(zip(self.names, views, strict=True))
            return loss(lambda *args: torch.func.functional_call(self.net, named, args))

        gradient, (_, extra) = torch.func.grad_and_value(of, has_aux=True)(self.vector)
        return gradient, extra
