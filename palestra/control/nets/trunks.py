"""Feature extractors: initialized layers, MLPs, convolutions, and graphs of torch.nn layers that a spec describes."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.control.spaces import Part
from palestra.errors import UsageError
from palestra.spec.shape import GraphSpec, NetSpec

Layer = TypeVar("Layer", bound=nn.Linear | nn.Conv2d)

THIN = 8  # numbers in a side of a matrix


def begin(layer: Layer, gain: float | None) -> Layer:
    """Give a layer orthogonal weights of the given gain and zero biases; None leaves torch's own."""
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return layer


class NoisyLinear(nn.Linear):
    """A linear layer with learned scales of factorized noise on its weights and biases (Fortunato et al. 2018, §3)."""

    def __init__(self, inputs: int, outputs: int, std: float):
        super().__init__(inputs, outputs)
        std = std / math.sqrt(inputs)
        self.weight_std = nn.Parameter(torch.full((outputs, inputs), std))
        self.bias_std = nn.Parameter(torch.full((outputs,), std))


def linear(inputs: int, outputs: int, gain: float | None, noisy: float | None = None) -> nn.Linear:
    """A linear layer, begun; noisy where an initial scale of noise is given."""
    return begin(nn.Linear(inputs, outputs) if noisy is None else NoisyLinear(inputs, outputs, noisy), gain)


def conv(inputs: int, outputs: int, kernel: int, gain: float | None, **options: Any) -> nn.Conv2d:
    """A convolution over images, begun."""
    return begin(nn.Conv2d(inputs, outputs, kernel, **options), gain)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight`, (..., B, inputs) and (..., inputs, outputs).

    In a compiled graph on a CPU a matrix with a side of a few numbers, such as the first and last ones of a network, is
    multiplied element by element: that fuses with the kernels around it, where a matmul costs more to call than to
    compute (docs/log.md).
    """
    inputs, outputs = weight.shape[-2:]
    if not _thin(x, weight):
        return x @ weight
    # Stacked, which copies: numbers that lie next to each other in the long side are read many at a time.
    if inputs <= THIN:
        rows = torch.stack(weight.unbind(-2)).unsqueeze(-2)
        return sum((x[..., k, None] * rows[k] for k in range(1, inputs)), x[..., 0, None] * rows[0])
    columns = torch.stack(weight.unbind(-1)).unsqueeze(-2)
    return torch.stack([(x * columns[k]).sum(dim=-1) for k in range(outputs)], dim=-1)


def affine(x: Tensor, layer: nn.Linear, noise: Tensor | None = None) -> Tensor:
    """`layer(x)`, by `product` where its weights, (outputs, inputs), are thin.

    `noise`, (..., inputs + outputs), is of a noisy layer: its factors at both sides, one for all rows or one a row.
    """
    weight, bias = layer.weight, layer.bias
    if noise is not None:
        assert isinstance(layer, NoisyLinear)
        before, after = noise.split([layer.in_features, layer.out_features], dim=-1)
        return affine(x, layer) + after * F.linear(x * before, layer.weight_std, layer.bias_std)
    return product(x, weight.mT) + bias if _thin(x, weight) else F.linear(x, weight, bias)


def _thin(x: Tensor, weight: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.is_cpu and min(weight.shape[-2:]) <= THIN


OBS = "obs"  # the name of the observation in `join`
# Their output depends on the training mode: the first ratio of PPO would not be 1, nor a target exact.
MODAL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm, nn.RReLU)


class GraphTrunk(nn.Module):
    """Layers in the order of the spec, each after the one before it or after those that `join` names."""

    def __init__(self, obs_shape: Sequence[int], spec: GraphSpec, *, orthogonal: bool):
        super().__init__()
        if not spec.layers:
            raise UsageError("net.graph.layers: expected at least one layer")
        self._inputs = _inputs(spec)
        self._layers = {name: _layer(name, described) for name, described in spec.layers.items()}
        self.nodes = nn.ModuleDict(self._layers)
        # One forward pass: lazy layers get their sizes, and mismatches are found now.
        with torch.no_grad():
            self.size = self.forward(torch.zeros(2, *obs_shape)).shape[1]
        if orthogonal:
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Conv2d):
                    begin(module, math.sqrt(2))

    def forward(self, obs: Tensor) -> Tensor:
        """(B, ...) to (B, size): what the last layer gives, flattened."""
        outputs = {OBS: obs}
        out = obs
        for name, layer in self._layers.items():
            try:
                parts = [outputs[other] for other in self._inputs[name]]
                out = layer(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise UsageError(f"net.graph.layers.{name}: does not accept its inputs: {error}") from error
            if not isinstance(out, Tensor):
                raise UsageError(f"net.graph.layers.{name}: returns a {type(out).__name__}, expected one tensor")
            outputs[name] = out
        return out.flatten(1)


def _inputs(spec: GraphSpec) -> dict[str, list[str]]:
    """The inputs of each layer; every layer but the last must be an input of a later one."""
    names = list(spec.layers)
    if OBS in names:
        raise UsageError(f"net.graph.layers.{OBS}: the name is reserved for the observation: choose another")
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
            raise UsageError(f"net.graph.layers.{name}: no later layer uses it: name it in net.graph.join")
    return inputs


def _layer(name: str, described: dict[str, dict[str, Any]]) -> nn.Module:
    at = f"net.graph.layers.{name}"
    if "." in name or name in dir(nn.ModuleDict):
        raise UsageError(f"{at}: a layer cannot have this name: choose another")
    if len(described) != 1:
        got = ", ".join(described) or "none"
        raise UsageError(f"{at}: expected one class of torch.nn with its arguments, got {got}")
    ((kind, arguments),) = described.items()
    made = getattr(nn, kind, None)
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise UsageError(f"{at}.{kind}: torch.nn has no layer of this name")
    try:
        layer = made(**{key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{at}.{kind}: cannot be made with {arguments}: {error}") from error
    if isinstance(layer, MODAL):
        raise UsageError(f"{at}.{kind}: its output differs between training and evaluation mode: leave it out")
    return layer


ACTIVATIONS: dict[str, Callable] = {"tanh": torch.tanh, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}

SMALLEST_IMAGE = 36  # pixels per side: the three convolutions of the Nature network leave nothing of fewer


class Trunk(nn.Module):
    """Raw observations to features: scaled, then through convolutions or a graph, then through hidden layers.

    `hidden` replaces `spec.hidden`; a graph is followed by none.
    """

    def __init__(
        self, shape: Sequence[int], spec: NetSpec, hidden: list[int] | None = None, obs_scale: nn.Module | None = None
    ):
        super().__init__()
        mlp = None
        parts = getattr(shape, "parts", None) or []
        images = any(part.pixels or _image(part, spec) for part in parts)
        if spec.graph is None:
            front = Parts(shape, parts, spec) if images else _images(tuple(shape), spec)
            inputs = math.prod(shape) if front is None else front.size
            mlp = last = Mlp([inputs, *(spec.hidden if hidden is None else hidden)], spec)
        else:
            if images:
                raise UsageError("net.graph takes observations without images in a Dict or Tuple: use net.trunk")
            front = last = GraphTrunk(shape, spec.graph, orthogonal=spec.orthogonal)
        self.obs_scale, self.front, self.mlp = obs_scale, front, mlp
        self.size: int = last.size
        self._scales = not images  # parts are scaled each as it is
        # Beside the registered ones: on nets this small, looking a module up costs as much as its matmul.
        self._parts = (obs_scale, front, mlp)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to (B, size)."""
        obs_scale, front, mlp = self._parts
        if obs_scale is not None:
            x = obs_scale.forward(x)
        if self._scales and not x.is_floating_point():
            x = x / 255 if x.dtype == torch.uint8 else x.float()  # where images are scaled
        if front is not None:
            x = front.forward(x)
        elif x.ndim != 2:
            x = x.flatten(1) if x.ndim > 2 else x[:, None]
        return x if mlp is None else mlp.forward(x)


PART_FEATURES = 256  # of an image among other parts, so that a few numbers beside it are not lost in thousands


class Parts(nn.Module):
    """Observations of several parts: each image through convolutions of its own, beside it all other numbers."""

    def __init__(self, shape: Sequence[int], parts: list[Part], spec: NetSpec):
        super().__init__()
        self.parts, self.size = parts, 0
        gain = math.sqrt(2) if spec.orthogonal else None
        images: list[nn.Module] = []
        for part in parts:
            whole = (*shape[:-1], *part.shape)  # stacked where observations are
            if _image(part, spec):
                body = _images(whole, spec)
                assert body is not None
                images.append(nn.Sequential(body, linear(body.size, PART_FEATURES, gain), nn.ReLU()))
                self.size += PART_FEATURES
            else:
                images.append(nn.Flatten())
                self.size += math.prod(whole)
        if spec.trunk in ("nature", "impala") and not any(_image(part, spec) for part in parts):
            raise UsageError(f"net.trunk: {spec.trunk} takes images, and no part of the observations is one: use mlp")
        self.fronts = nn.ModuleList(images)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., numbers of all parts) to (B, size)."""
        features = []
        for part, front in zip(self.parts, self.fronts, strict=True):
            piece = x[..., part.start : part.stop].float()
            piece = piece / 255 if part.pixels else piece
            features.append(front(piece.unflatten(-1, part.shape) if isinstance(front, nn.Sequential) else piece))
        return torch.cat(features, dim=1)


def _image(part: Part, spec: NetSpec) -> bool:
    """Whether a part of an observation goes through convolutions."""
    sides = part.shape[-3:-1] if _channels_last(tuple(part.shape)) else part.shape[-2:]
    least = 1 if spec.trunk == "impala" else SMALLEST_IMAGE
    return spec.trunk != "mlp" and len(part.shape) >= 2 and min(sides) >= least


class Mlp(nn.Module):
    """Hidden layers, each with optional layer normalization and the activation."""

    def __init__(self, sizes: Sequence[int], spec: NetSpec, noisy: float | None = None):
        super().__init__()
        self.size = sizes[-1]
        self.activation = ACTIVATIONS[spec.activation]
        gain = math.sqrt(2) if spec.orthogonal else None
        self.linears = [linear(i, o, gain, noisy) for i, o in pairwise(sizes)]
        self.layers = nn.ModuleList(self.linears)
        self._norms = [nn.LayerNorm(o) for o in sizes[1:]] if spec.layer_norm else []
        self.norms = nn.ModuleList(self._norms)

    def forward(self, x: Tensor, noise: Sequence[Tensor] | None = None) -> Tensor:
        """(B, first size) to (B, last size); `noise` of each layer, where they are noisy."""
        for i, layer in enumerate(self.linears):
            x = affine(x, layer, None if noise is None else noise[i])
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
        return self.body(x.reshape(x.shape[0], -1, *x.shape[-2:]))  # not len(x): an exported graph takes any batch


def nature(channels: int, gain: float | None) -> nn.Sequential:
    """The convolutions of Mnih et al. 2015; their hidden layer of 512 is `net.hidden`."""
    layers = [conv(channels, 32, 8, gain, stride=4), conv(32, 64, 4, gain, stride=2), conv(64, 64, 3, gain)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Flatten())


def impala(channels: int, gain: float | None) -> nn.Sequential:
    """The deep residual network of Espeholt et al. 2018 (fig. 3), whose hidden layer of 256 is `net.hidden`."""
    stages = [_stage(i, o, gain) for i, o in pairwise([channels, 16, 32, 32])]
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
    first = conv(inputs, outputs, 3, gain, padding=1)
    return nn.Sequential(first, nn.MaxPool2d(3, stride=2, padding=1), Residual(outputs, gain), Residual(outputs, gain))


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
