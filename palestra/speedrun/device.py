"""How fast a device could be: by its data sheet where it is known, else by the fastest matrix product measured."""

import time

import torch

from palestra.kinds.models import named_dtype
from palestra.lm.speed import peak_flops

SIZE = 1024
SECONDS = 0.5


def gpu_name(device: torch.device) -> str | None:
    """The name of the GPU, where it is one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def peak_of(device: torch.device, precision: str) -> tuple[float, str]:
    """Floating-point operations a second of one device, and how that is known."""
    known = peak_flops(device)
    if known is not None:
        return known, "data sheet, dense bf16"
    return measured_peak(device, precision), f"measured, {precision} matrix products of {SIZE} rows and columns"


def measured_peak(device: torch.device, precision: str) -> float:
    """The fastest of the products that fit into half a second: others at work on the machine only slow some down."""
    size = SIZE if device.type == "cpu" else 8 * SIZE
    a = torch.ones(size, size, dtype=named_dtype(precision), device=device)
    best, since = 0.0, time.perf_counter()
    while best == 0 or time.perf_counter() - since < SECONDS:
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
