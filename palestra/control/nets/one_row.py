"""A Q-network on one observation by NumPy: calling torch for so little takes several times as long as computing it."""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from palestra.control.nets.values import QNet
from palestra.spec.shape import NetSpec


class OneRow:
    """What orders the actions of a Q-network of linear layers, whose memory its arrays are.

    Of dueling streams that is the advantage's: the value is the same for all actions. `einsum` is not BLAS: it starts
    no threads, so a run's numbers do not depend on how many cores it has.
    """

    def __init__(self, net: QNet):
        streams = [net.trunk.mlp, net.advantage_stream]
        linears = [*(layer for mlp in streams if mlp is not None for layer in mlp.linears), net.advantage_head]
        *self.hidden, self.last = [(each.weight.detach().numpy(), each.bias.detach().numpy()) for each in linears]

    @classmethod
    def of(cls, net: object, spec: NetSpec, shown: np.ndarray, device: torch.device) -> Self | None:
        """For a network that acts on one row like `shown`, None where it has more than linear layers and ReLUs."""
        one = len(shown) == 1 and shown.ndim == 2 and shown.dtype == np.float32 and device.type == "cpu"
        relus = spec.activation == "relu" and not spec.layer_norm
        if not (one and relus and type(net) is QNet):
            return None
        trunk = net.trunk
        linear = trunk.obs_scale is None and trunk.front is None and net.outputs == 1 and not net.noise_sizes
        return cls(net) if linear else None

    def __call__(self, obs: np.ndarray) -> Tensor:
        """(1, inputs) to (1, A)."""
        x = obs[0]
        for weight, bias in self.hidden:
            x = np.maximum(np.einsum("oi,i->o", weight, x) + bias, 0)
        weight, bias = self.last
        return torch.from_numpy(np.einsum("oi,i->o", weight, x) + bias)[None]
