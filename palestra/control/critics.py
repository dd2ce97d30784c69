"""Twin critics in one network: the layers of both are stacked, so that each is one batched product for the two."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.control.actions import ActionHead
from palestra.control.layers import product
from palestra.control.renorm import Running, normalised, renormalised
from palestra.control.trunks import ACTIVATIONS, make_trunk
from palestra.spec.control.net import NetSpec


class TwinLayers(nn.Module):
    """The layers of both critics: once what reads images or is a graph of the spec, twice the hidden ones."""

    def __init__(self, obs_shape: Sequence[int], head: ActionHead, spec: NetSpec, obs_scale: nn.Module | None = None):
        super().__init__()
        self.encoder = make_trunk(obs_shape, spec, hidden=[], obs_scale=obs_scale)
        self.continuous = head.continuous
        hidden = spec.hidden if spec.critic_hidden is None else spec.critic_hidden
        self.sizes = [self.encoder.size + (head.outputs if self.continuous else 0), *hidden]
        outputs = 1 if self.continuous else head.outputs
        self.activation = ACTIVATIONS[spec.activation]
        layers = [*pairwise(self.sizes), (self.sizes[-1], outputs)]
        gains = [math.sqrt(2)] * len(hidden) + [1.0]
        begun = [_begun(i, o, gain if spec.orthogonal else None) for (i, o), gain in zip(layers, gains, strict=True)]
        self.weights = nn.ParameterList([weight for weight, _ in begun])  # (2, inputs, outputs)
        self.biases = nn.ParameterList([bias for _, bias in begun])  # (2, 1, outputs)
        normed = hidden if spec.layer_norm else []
        self.norm_weights = nn.ParameterList([torch.ones(2, 1, size) for size in normed])
        self.norm_biases = nn.ParameterList([torch.zeros(2, 1, size) for size in normed])
        self.layer_norm = spec.layer_norm

    def inputs(self, obs: Tensor, actions: Tensor | None, twins: int = 2) -> Tensor:
        """What the hidden layers of both take, (2, B, inputs), or of the first alone, (1, B, inputs)."""
        features = self.encoder.forward(obs)
        if self.continuous:
            assert actions is not None
            features = torch.cat([features, actions], dim=1)
        return features.expand(twins, *features.shape)

    def hidden(self, x: Tensor, layer: int) -> Tensor:
        """One hidden layer of those that `x` is for."""
        n = len(x)
        x = product(x, self.weights[layer][:n]) + self.biases[layer][:n]  # not baddbmm: that copies the biases first
        if self.layer_norm:
            x = F.layer_norm(x, x.shape[-1:]) * self.norm_weights[layer][:n] + self.norm_biases[layer][:n]
        return self.activation(x)

    def outputs(self, x: Tensor) -> Tensor:
        """From the last hidden layer to values."""
        q = product(x, self.weights[-1][: len(x)]) + self.biases[-1][: len(x)]
        return q.squeeze(-1) if self.continuous else q


class Critics(TwinLayers):
    """Q of observations and actions for a Box, (2, B); Q of every action for Discrete, (2, B, A)."""

    def forward(self, obs: Tensor, actions: Tensor | None = None, twins: int = 2) -> Tensor:
        """Values of both, or of the first alone; `actions` are looked at where they are a Box's."""
        x = self.inputs(obs, actions, twins)
        for layer in range(len(self.sizes) - 1):
            x = self.hidden(x, layer)
        return self.outputs(x)


class RenormCritics(TwinLayers):
    """The same with batch renormalisation of what each layer takes (Bhatt et al. 2024, fig. 2)."""

    def __init__(
        self,
        obs_shape: Sequence[int],
        head: ActionHead,
        spec: NetSpec,
        obs_scale: nn.Module | None = None,
        momentum: float = 0.01,
    ):
        super().__init__(obs_shape, head, spec, obs_scale)
        self.momentum = momentum
        self.scales = nn.ParameterList([torch.ones(2, 1, size) for size in self.sizes])
        self.shifts = nn.ParameterList([torch.zeros(2, 1, size) for size in self.sizes])

    def start(self) -> list[Running]:
        """The statistics before the first batch."""
        return [Running.start(size) for size in self.sizes]

    def forward(
        self, obs: Tensor, actions: Tensor | None, running: list[Running], warmth: Tensor | None = None
    ) -> tuple[Tensor, list[Running]]:
        """Values of both and the new running statistics; without `warmth` by the running ones, which then stay."""
        x, after = self.inputs(obs, actions), []
        for layer, (statistics, scale, shift) in enumerate(zip(running, self.scales, self.shifts, strict=True)):
            if layer > 0:
                x = self.hidden(x, layer - 1)
            if warmth is None:
                x, now = normalised(x, statistics), statistics
            else:
                x, now = renormalised(x, statistics, warmth, self.momentum)
            x = x * scale + shift
            after.append(now)
        return self.outputs(x), after


def _begun(inputs: int, outputs: int, gain: float | None) -> tuple[nn.Parameter, nn.Parameter]:
    """First weights and biases of one layer of both: orthogonal of this gain, or as torch's own linear layers have."""
    layers = [nn.Linear(inputs, outputs) for _ in range(2)]
    if gain is not None:
        for layer in layers:
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
    weight = torch.stack([layer.weight.detach().T for layer in layers])
    return nn.Parameter(weight), nn.Parameter(torch.stack([layer.bias.detach()[None] for layer in layers]))
