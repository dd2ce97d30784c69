"""The small parts of the transformer: linear layers, norms, rotary positions, gates, feed-forward."""

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.lm import native
from palestra.spec.shape import RopeScaling, Shape

TRITON = find_spec("triton") is not None
"""Whether GPUs have our own kernels; it comes with torch for most of them. Otherwise torch's operations do the work."""


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same on a device; a copy from memory that is not pinned would wait for all that the device has to do."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter that tensor parallelism splits; any other as it is.

    Where every rank has all of it, each sees some of the tokens: their gradients are summed.
    """
    split: Any = parameter
    if not hasattr(split, "to_local"):
        return parameter
    from torch.distributed.tensor import Partial, Replicate  # takes a second to import

    sums = [Partial() if isinstance(place, Replicate) else place for place in split.placements]
    return split.to_local(grad_placements=sums)


class Linear(nn.Module):
    """A matrix kept in its own precision and applied in the input's: master weights in FP32, arithmetic in bf16.

    `parts` are the rows of the matrices that are stacked in it, by their names elsewhere (`{"q_proj": 576, …}`): one
    product is faster than three. Checkpoints, LoRA and Muon see the parts.
    """

    def __init__(self, inputs: int, parts: dict[str, int], *, bias: bool = False):
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), inputs))
        self.bias = nn.Parameter(torch.zeros(sum(parts.values()))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the precision of `x`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Root mean square normalization over the last dimension."""

    def __init__(self, width: int, eps: float, offset: float | None = None):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` over its root mean square, times the weight, to which the offset is added in FP32."""
        weight = local(self.weight).to(x.dtype)
        if self.offset is not None:
            return self._normalized(wide(x), wide(weight) + self.offset).to(x.dtype)
        return self._normalized(x, weight)

    def _normalized(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return _RMSNorm.apply(x, weight, self.eps) if torch.is_grad_enabled() else _rms_norm(x, weight, self.eps)[0]


class LayerNorm(nn.Module):
    """Normalization to mean 0 and variance 1 over the last dimension, with weights and biases."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalized, times the weight, plus the bias."""
        weight, bias = (local(parameter).to(x.dtype) for parameter in (self.weight, self.bias))
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def wide(x: Tensor) -> Tensor:
    """`x` in FP32, or as it is where it is wider: what exponentials, routers and rotations are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `x` (T, heads, dim) by `cos` and `sin` (T, dim / 2), in FP32; halves are paired.

    On the CPU they may be `doubled` already, once for all layers.
    """
    if _fused(x):
        from palestra.lm import kernels

        return kernels.rotate(x, cos, sin)
    if x.is_cuda:
        first, second = wide(x).chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    if cos.shape[-1] < x.shape[-1]:
        cos, sin = doubled(cos, sin)
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotated(x, cos, sin)


def doubled(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(T, dim / 2) → (T, 1, dim) each, for both halves of a head: the CPU loops over the last dimension."""
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU(gate) · up of the two halves."""
    if _fused(gate_up):
        from palestra.lm import kernels

        return kernels.swiglu(gate_up)
    if own_gradients(gate_up):
        from palestra.lm import kernels

        return kernels.SwiGLU.apply(gate_up)
    return _SwiGLU.apply(gate_up) if torch.is_grad_enabled() and not gate_up.is_cuda else _swiglu(gate_up)


def _fused(x: Tensor) -> bool:
    """Whether one kernel stands in for several: while generating on a GPU, where launches are what costs."""
    # torch.compile fuses by itself, and some versions cannot trace the last question.
    return x.is_cuda and TRITON and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def own_gradients(x: Tensor) -> bool:
    """Whether our kernels compute forward and backward passes: torch.compile's read twice what they concatenate."""
    return x.is_cuda and TRITON and torch.is_grad_enabled() and x.dtype != torch.float64


def bilinear(gate_up: Tensor) -> Tensor:
    """gate · up of the two halves, without a nonlinearity."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * up


def geglu(gate_up: Tensor) -> Tensor:
    """GELU(gate) · up of the two halves, by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu(up: Tensor) -> Tensor:
    """GELU without a gate, by its tanh approximation."""
    return F.gelu(up, approximate="tanh")


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """(up + 1) · gate · σ(1.702 · gate), clamped to 7; gate and up are neighbors, as in checkpoints of gpt-oss."""
    gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class MLP(nn.Module):
    """The feed-forward network; with a gate, unless that is `gelu`."""

    def __init__(self, width: int, hidden: int, gate: Callable[[Tensor], Tensor] = swiglu, *, bias: bool = False):
        super().__init__()
        self.gate = gate
        names = ("up_proj",) if gate is gelu else ("gate_proj", "up_proj")
        self.gate_up = Linear(width, dict.fromkeys(names, hidden), bias=bias)
        self.down = Linear(hidden, {"down_proj": width}, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) → (T, D)."""
        return self.down(self.gate(self.gate_up(x)))


# ---- backward passes by hand for the CPU: autograd's own would take twice as many passes over memory


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        if native.available(x):
            to_x, to_weight = native.norm_backward(grads[0], x, weight, scale)
            return to_x, to_weight.to(weight.dtype), None
        grad, hat = wide(grads[0]), wide(x) * scale
        product = grad * hat
        to_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        # With ĝ = grad · weight: (ĝ − x̂ · mean(ĝ · x̂)) · scale.
        mean = (product @ wide(weight) / x.shape[-1])[..., None]
        to_x = (grad * wide(weight)).addcmul_(hat, mean, value=-1.0).mul_(scale)
        return to_x.to(x.dtype), to_weight, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and what each row of `x` was multiplied by."""
    if native.available(x):
        return native.norm(x, weight, eps)
    high = wide(x)
    norm = torch.linalg.vector_norm(high, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (high * scale).mul_(wide(weight)).to(x.dtype), scale


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """`x` (T, heads, dim) by `cos` and `sin` (T, 1, dim), the first half of sines negative; with sign −1 back again."""
    if native.available(x):
        return native.turn(x, cos, sin, sign)
    high = wide(x)
    out = high * cos
    others = reversed(high.chunk(2, dim=-1))
    for half, other, by in zip(out.chunk(2, dim=-1), others, sin.chunk(2, dim=-1), strict=True):
        half.addcmul_(other, by, value=sign)  # in place: concatenating swapped halves took longer than all of this
    return out.to(x.dtype)


def _swiglu(gate_up: Tensor) -> Tensor:
    if native.available(gate_up):
        return native.gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if native.available(gate_up):
            return native.gate_backward(grads[0], gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        to_both = torch.empty_like(gate_up)
        to_gate, to_up = to_both.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=to_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=to_gate)
        return to_both


def frequencies(shape: Shape) -> tuple[Tensor, float]:
    """The angle a position for each pair of a head's dimensions (dim / 2, FP32), and the factor of cos and sin."""
    exponents = torch.arange(0, shape.dim, 2, dtype=torch.float32, device="cpu") / shape.dim
    plain = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, scaling, shape), scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Short wavelengths stay, long ones are divided, those between are blended."""
    wavelength = 2 * math.pi / plain
    smooth = ((scaling.original_context / wavelength - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(plain: Tensor, scaling: RopeScaling, shape: Shape) -> Tensor:
    """Peng et al. 2023, §3.2: a linear ramp between the dimensions that turn `low` and `high` times in the context."""

    def dimension(turns: float) -> float:
        return shape.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    ends = dimension(scaling.high), dimension(scaling.low)
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
    first, last = max(low, 0), min(high, shape.dim - 1)
    ramp = (torch.arange(shape.dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first or 0.001)
    divided = ramp.clamp(0, 1)
    return plain / scaling.factor * divided + plain * (1 - divided)


def pair_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection (heads · dim, …) in which neighbors are rotated together, as halves that are.

    Meta's checkpoints, llama2.c and llama.cpp pair neighbors; `rotate` and Hugging Face pair the halves of a head.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
