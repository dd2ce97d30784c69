"""AdamW where memory is short: moments in 8 bits or on the host, weights in bf16; a step goes chunk by chunk."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale in 8 bits."""
SMALL = 4096
"""Parameters with fewer numbers, norms and biases, keep FP32 moments, as in bitsandbytes."""
CHUNK = 2**24
"""Numbers of a parameter that a step works on at a time, in FP32; a multiple of `BLOCK`."""
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


@cache
def code(signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers of dynamic quantization (Dettmers et al. 2021, §2.1), ascending, from -1 or 0 to 1.

    Each decade down to 1e-7 has half as many as the one above it: few bits for an exponent, the others for a fraction.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        numbers += middles + ([-number for number in middles] if signed else [])
    return torch.tensor(sorted(numbers), device=device)


def quantize(x: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Numbers (n) in FP32 as the nearest of the `code` (n, uint8), times the largest of each block.

    Where there is no sign, what is above 0 stays above 0: Adam divides by it.
    """
    numbers = code(signed, x.device)
    middles = (numbers[1:] + numbers[:-1]) / 2
    if not signed:
        middles[0] = 0.0
    blocks = F.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    scaled = blocks / scales.clamp_min(torch.finfo(x.dtype).tiny)[:, None]
    return torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8).view(-1)[: len(x)], scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """What `quantize` stored, up to its rounding."""
    return code(signed, codes.device)[codes.int()].mul_(scales.repeat_interleave(BLOCK)[: len(codes)])


def round_stochastically(x: Tensor, key: int) -> Tensor:
    """FP32 as bf16, up or down at random so that the mean over keys is `x`: it depends on nothing but the two.

    A bf16 number is the upper half of an FP32 number's bits, so a random lower half is added before it is cut off.
    """
    generator = torch.Generator(x.device).manual_seed(key)
    noise = torch.randint(2**16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    return noise.add_(x.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).to(torch.bfloat16)


def moments_of(p: Tensor, bits: int = 32, *, host: bool = False) -> dict[str, Tensor]:
    """What AdamW remembers of a parameter, before the first step; on a GPU's host in pinned memory.

    In 8 bits the second moment is stored as its root, which spans as many decades as the first.
    """
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    if bits == 32 and not host:
        wide = torch.promote_types(p.dtype, torch.float32)
        return {"step": step, "exp_avg": torch.zeros_like(p, dtype=wide), "exp_avg_sq": torch.zeros_like(p, dtype=wide)}
    small = bits == 32 or p.numel() < SMALL
    dtype, device, pinned = torch.float32 if small else torch.uint8, "cpu" if host else p.device, host and p.is_cuda
    zeros = {key: torch.zeros(p.shape, dtype=dtype, device=device, pin_memory=pinned) for key in _NAMES}
    if not small:
        blocks = -(-p.numel() // BLOCK)
        zeros |= {key: torch.zeros(blocks, device=device, pin_memory=pinned) for key in SCALES}
    return {"step": step, **zeros}


_NAMES = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def streamed_step(p: Tensor, moments: dict[str, Tensor], adam: Callable[..., None], key: int) -> None:
    """One step of a parameter by `adam`, torch's function for lists of tensors; `key` is that of the rounding to bf16.

    Copies are queued on the device's stream, so each chunk is read and written in order.
    """
    assert p.grad is not None
    for start in range(0, p.numel(), CHUNK):
        at = slice(start, min(start + CHUNK, p.numel()))
        weight, grad = p.view(-1)[at], p.grad.view(-1)[at]
        wide, of_wide = (t if t.dtype.itemsize >= 4 else t.float() for t in (weight, grad))
        read = [_read(moments, name, at, p.device) for name in _NAMES]
        step = moments["step"].clone()  # which it counts up
        adam([wide], [of_wide], *([values] for values in read), state_steps=[step])
        for name, values in zip(_NAMES, read, strict=True):
            _write(moments, name, at, values)
        if wide is not weight:
            weight.copy_(round_stochastically(wide, (key + start) % 2**63))
    moments["step"] += 1


def _read(moments: dict[str, Tensor], name: str, at: slice, device: torch.device) -> Tensor:
    """Some of a moment in FP32 on a device: itself, where it is that."""
    stored = moments[name].view(-1)[at].to(device, non_blocking=True)
    if stored.dtype != torch.uint8:
        return stored
    scales = moments[f"{name}_scale"][_blocks(at)].to(device, non_blocking=True)
    signed = name == "exp_avg"
    values = dequantize(stored, scales, signed=signed)
    return values if signed else values.square_()


def _write(moments: dict[str, Tensor], name: str, at: slice, values: Tensor) -> None:
    if moments[name].dtype == torch.uint8:
        signed = name == "exp_avg"
        values, scales = quantize(values if signed else values.sqrt_(), signed=signed)
        moments[f"{name}_scale"][_blocks(at)].copy_(scales, non_blocking=True)
    moments[name].view(-1)[at].copy_(values, non_blocking=True)  # onto itself where it was changed in place


def _blocks(at: slice) -> slice:
    return slice(at.start // BLOCK, -(-at.stop // BLOCK))
