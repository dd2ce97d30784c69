"""A trunk that the spec describes: layers of torch.nn by name, and how they are joined."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.control.layers import begin
from palestra.errors import UsageError
from palestra.spec.control.net import GraphSpec

OBS = "obs"  # the name of the observation in `join`
# What they give depends on whether one is learning: the ratio of PPO would not be 1 at the start, nor a target exact.
MODAL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)


class Graph(nn.Module):
    """Layers in the order of the spec, each after the one before it or after those that `join` names."""

    def __init__(self, obs_shape: Sequence[int], spec: GraphSpec, *, orthogonal: bool):
        super().__init__()
        if not spec.layers:
            raise UsageError("net.graph.layers: expected at least one layer")
        self._inputs = _inputs(spec)
        self._layers = {name: _layer(name, given) for name, given in spec.layers.items()}
        self.nodes = nn.ModuleDict(self._layers)
        # One forward pass: lazy layers learn their sizes, and what does not fit is found now.
        with torch.no_grad():
            self.size = self.forward(torch.zeros(2, *obs_shape)).shape[1]
        if orthogonal:
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Conv2d):
                    begin(module, math.sqrt(2))

    def forward(self, obs: Tensor) -> Tensor:
        """(B, ...) to (B, size): what the last layer gives, flattened."""
        found = {OBS: obs}
        out = obs
        for name, layer in self._layers.items():
            try:
                parts = [found[other] for other in self._inputs[name]]
                out = layer(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise UsageError(f"net.graph.layers.{name}: does not take what comes before it: {error}") from error
            if not isinstance(out, Tensor):
                raise UsageError(f"net.graph.layers.{name}: gives a {type(out).__name__}, expected one tensor")
            found[name] = out
        return out.flatten(1)


def _inputs(spec: GraphSpec) -> dict[str, list[str]]:
    """What each layer takes; every layer but the last must be taken by a later one."""
    names = list(spec.layers)
    if OBS in names:
        raise UsageError(f"net.graph.layers.{OBS}: the name stands for the observation: choose another")
    for name in spec.join:
        if name not in names:
            raise UsageError(f"net.graph.join.{name}: there is no such layer: {', '.join(names)}")
    inputs = {}
    for i, name in enumerate(names):
        before = [OBS, *names[:i]]
        inputs[name] = spec.join.get(name, [before[-1]])
        unknown = [other for other in inputs[name] if other not in before]
        if unknown or not inputs[name]:
            raise UsageError(
                f"net.graph.join.{name}: expected layers that come before it ({', '.join(before)}), "
                f"got {', '.join(unknown) or 'none'}"
            )
    taken = {other for others in inputs.values() for other in others}
    for name in names[:-1]:
        if name not in taken:
            raise UsageError(f"net.graph.layers.{name}: no later layer takes it: name it in net.graph.join")
    return inputs


def _layer(name: str, given: dict[str, dict[str, Any]]) -> nn.Module:
    at = f"net.graph.layers.{name}"
    if "." in name or name in dir(nn.ModuleDict):
        raise UsageError(f"{at}: a layer cannot have this name: choose another")
    if len(given) != 1:
        raise UsageError(f"{at}: expected one class of torch.nn with its arguments, got {', '.join(given) or 'none'}")
    ((kind, arguments),) = given.items()
    made = getattr(nn, kind, None)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise UsageError(f"{at}.{kind}: torch.nn has no layer of this name")
    try:
        layer = made(**{key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{at}.{kind}: cannot be made with {arguments}: {error}") from error
    if isinstance(layer, MODAL):
        raise UsageError(f"{at}.{kind}: what it gives when acting is not what it gives when learning: leave it out")
    return layer
