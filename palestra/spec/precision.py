"""The precision that language models are computed in where nobody asks for one."""

from functools import cache
from pathlib import Path

FAST_BF16 = frozenset({"avx512bw", "avx512dq", "avx512vl"})
"""Without these the library emulates products of bf16 or refuses them: on a Neoverse N1 a small one takes 130 times as
long as in FP32. The bf16 instructions of newer ARM cores have not been measured."""


def precision(wanted: str, device: str) -> str:
    """`wanted`; for auto what the device computes fast: bf16 on a GPU and on a CPU with AVX-512, FP32 on others."""
    if wanted != "auto":
        return wanted
    return "bf16" if device != "cpu" or cpu_features() >= FAST_BF16 else "fp32"


def described(wanted: str, device: str) -> str:
    """The same for people, where `device` may be auto too."""
    if wanted != "auto" or device != "auto":
        return precision(wanted, device)
    return f"{precision(wanted, 'cuda')} on a GPU, {precision(wanted, 'cpu')} on this CPU"


@cache
def cpu_features() -> frozenset[str]:
    """What the CPU can do, as Linux calls it; nothing is known on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(" ".join(listed).split())
