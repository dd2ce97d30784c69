"""What reads observations: hidden layers, convolutions before them where they are images, or a graph of the spec."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.control.graphs import Graph
from palestra.control.layers import affine, conv, linear
from palestra.errors import UsageError
from palestra.spec.control.net import NetSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}

SMALLEST_IMAGE = 36  # pixels a side: what is left of fewer is nothing after the three convolutions of Nature's network


def make_trunk(
    obs_shape: Sequence[int], spec: NetSpec, hidden: Sequence[int] | None = None, obs_scale: nn.Module | None = None
) -> "Trunk":
    """What turns observations (B, ...) into features (B, .size), as `spec` says.

    `hidden` stands in for `spec.hidden` where given; `obs_scale` is applied to raw observations first.
    """
    widths = spec.hidden if hidden is None else hidden
    if spec.graph is not None:
        return Trunk(obs_scale, Graph(obs_shape, spec.graph, orthogonal=spec.orthogonal), None)
    images = _images(tuple(obs_shape), spec)
    inputs = math.prod(obs_shape) if images is None else images.size
    return Trunk(obs_scale, images, Mlp([inputs, *widths], spec))


class Trunk(nn.Module):
    """Raw observations to features: scaled, then through convolutions or a graph, then through hidden layers."""

    def __init__(self, obs_scale: nn.Module | None, front: "Images | Graph | None", mlp: "Mlp | None"):
        super().__init__()
        self.obs_scale, self.front, self.mlp = obs_scale, front, mlp
        last = mlp or front
        assert last is not None
        self.size: int = last.size
        # Beside the registered ones: on nets this small, looking a module up costs as much as its matmul.
        self._parts = (obs_scale, front, mlp)

    @property
    def layers(self) -> nn.ModuleList:
        """The hidden layers."""
        assert self.mlp is not None
        return self.mlp.layers

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to (B, size)."""
        obs_scale, front, mlp = self._parts
        if obs_scale is not None:
            x = obs_scale.forward(x)
        if not x.is_floating_point():
            x = x / 255 if x.dtype == torch.uint8 else x.float()  # the one place where images are scaled
        if front is not None:
            x = front.forward(x)
        elif x.ndim != 2:
            x = x.reshape(len(x), -1)
        return x if mlp is None else mlp.forward(x)


class Mlp(nn.Module):
    """Hidden layers, the activation after each, layer normalisation before it where the spec says so."""

    def __init__(self, sizes: Sequence[int], spec: NetSpec):
        super().__init__()
        self.size = sizes[-1]
        self.activation = ACTIVATIONS[spec.activation]
        gain = math.sqrt(2) if spec.orthogonal else None
        self._linears = [linear(i, o, gain) for i, o in pairwise(sizes)]
        self.layers = nn.ModuleList(self._linears)
        self._norms = [nn.LayerNorm(o) for o in sizes[1:]] if spec.layer_norm else []
        self.norms = nn.ModuleList(self._norms)

    def forward(self, x: Tensor) -> Tensor:
        """(B, first size) to (B, last size)."""
        for i, layer in enumerate(self._linears):
            x = affine(x, layer.weight, layer.bias)
            if self._norms:
                x = self._norms[i].forward(x)
            x = self.activation(x)
        return x


class Images(nn.Module):
    """Convolutions over images that are scaled already, (B, *shape) to (B, size), with ReLUs as in the papers."""

    def __init__(self, shape: tuple[int, ...], body: Callable[[int, float | None], nn.Module], orthogonal: bool):
        super().__init__()
        self.last = _channels_last(shape)
        height, width = shape[-3:-1] if self.last else shape[-2:]
        channels = math.prod(shape) // (height * width)
        self.body = body(channels, math.sqrt(2) if orthogonal else None)
        with torch.no_grad():
            self.size = self.body(torch.zeros(1, channels, height, width)).shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) images, channels first or last, stacked or not, to (B, size)."""
        if self.last:
            x = x.movedim(-1, -3)
        # A stack of images is one image with the channels of all of them.
        return self.body(x.reshape(len(x), -1, *x.shape[-2:]))


def nature(channels: int, gain: float | None) -> nn.Sequential:
    """The convolutions of Mnih et al. 2015; their hidden layer of 512 is `net.hidden`."""
    return nn.Sequential(
        conv(channels, 32, 8, gain, stride=4),
        nn.ReLU(),
        conv(32, 64, 4, gain, stride=2),
        nn.ReLU(),
        conv(64, 64, 3, gain),
        nn.ReLU(),
        nn.Flatten(),
    )


def impala(channels: int, gain: float | None) -> nn.Sequential:
    """The deep residual network of Espeholt et al. 2018 (fig. 3), whose hidden layer of 256 is `net.hidden`."""
    sizes = [channels, 16, 32, 32]
    stages = [_stage(i, o, gain) for i, o in pairwise(sizes)]
    return nn.Sequential(*stages, nn.ReLU(), nn.Flatten())


class Residual(nn.Module):
    """x + two convolutions of it."""

    def __init__(self, channels: int, gain: float | None):
        super().__init__()
        self.first = conv(channels, channels, 3, gain, padding=1)
        self.second = conv(channels, channels, 3, gain, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.second(F.relu(self.first(F.relu(x))))


def _stage(inputs: int, outputs: int, gain: float | None) -> nn.Sequential:
    return nn.Sequential(
        conv(inputs, outputs, 3, gain, padding=1),
        nn.MaxPool2d(3, stride=2, padding=1),
        Residual(outputs, gain),
        Residual(outputs, gain),
    )


def _images(shape: tuple[int, ...], spec: NetSpec) -> Images | None:
    """The convolutions for observations of `shape`; None for hidden layers alone."""
    if spec.trunk == "mlp":
        return None
    sides = () if len(shape) < 2 else shape[-3:-1] if _channels_last(shape) else shape[-2:]
    if spec.trunk == "auto":
        return Images(shape, nature, spec.orthogonal) if sides and min(sides) >= SMALLEST_IMAGE else None
    least = SMALLEST_IMAGE if spec.trunk == "nature" else 1
    if not sides or min(sides) < least:
        raise UsageError(
            f"net.trunk: {spec.trunk} takes images of at least {least} × {least} pixels, and observations have the "
            f"shape {shape}: use mlp"
        )
    return Images(shape, nature if spec.trunk == "nature" else impala, spec.orthogonal)


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Whether the channels of an image come last: there are fewer of them than pixels on a side."""
    return len(shape) >= 3 and shape[-1] < min(shape[-3], shape[-2])
