"""Calls `rows.cpp`, compiled for this machine once, where it has a C++ compiler: `available` says whether.

These are for the CPU what `kernels.py` is for the GPU. Elsewhere `ops.py` computes the same with torch's operations.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.data.cache import cache_root

Kernels = dict[tuple[str, torch.dtype], Any]

log = logging.getLogger("palestra.lm")

SOURCE = Path(__file__).with_name("rows.cpp")
FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-std=c++17"]
FLAGS += ["-shared", "-fPIC", "-pthread"]
COMPILE_SECONDS = 300.0
"""Where it takes longer, something hangs."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
KERNELS = {
    "norm": "p iii p f p p ii",
    "norm_backward": "p p iii p p p p ii",
    "turn": "p iii p p f p ii",
    "keep": "p iii p p iiii",
    "gate": "p p ii",
    "gate_backward": "p p p ii",
}
"""What each takes: pointers, integers, floats; and at last how many threads may help."""
SINGLE = {"draw": "p i p p p p p ii"}
"""Those of FP32 alone."""


def available(x: Tensor) -> bool:
    """Whether rows like `x` are computed here."""
    known = x.device.type == "cpu" and x.dtype in NAMES and x.stride(-1) == 1 and not torch.compiler.is_compiling()
    return known and library() is not None


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of the rows of `x`, and what each was multiplied by, (…, 1)."""
    out, scale = _like(x), torch.empty(*x.shape[:-1], 1)
    _call("norm", x, *_view(x), weight.float().contiguous(), eps, out, scale, *_size(x))
    return out, scale


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and, in FP32, of the weight."""
    to_x, to_weight = _like(x), torch.zeros(weight.shape)
    high = weight.float().contiguous()
    _call("norm_backward", grad.contiguous(), x, *_view(x), high, scale, to_x, to_weight, *_size(x))
    return to_x, to_weight


def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    """`x` (T, heads, dim) by angles (T, 1, dim), the first half of the sines negative; with sign −1 back again."""
    out = _like(x)
    _call("turn", x, *_view(x), cos.contiguous(), sin.contiguous(), sign, out, *_size(x))
    return out


def keep(fresh: Tensor, cache: Tensor, lengths: Tensor) -> None:
    """Put rows (B, K, dim) into a cache (rows, K, context, dim), behind the `lengths` (B) positions that are there."""
    _, heads, context, dim = cache.shape
    _call("keep", fresh, *_view(fresh), cache, lengths, len(fresh), heads, context, dim)


def draw(scores: Tensor, heats: Tensor, seeds: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row of scores (B, V, FP32) and its log-probability, as `palestra.generate.sampler` has them.

    `heats` (B, FP32) are temperatures; `seeds` and `draws` (B, int64) make each row's random number.
    """
    tokens, logprobs = torch.empty(len(scores), dtype=torch.int64), torch.empty(len(scores))
    _call("draw", scores, scores.stride(0), heats, seeds, draws, tokens, logprobs, *scores.shape)
    return tokens, logprobs


def gate(both: Tensor) -> Tensor:
    """SiLU(gate) · up of the halves of rows."""
    both = both.contiguous()
    out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    _call("gate", both, out, *_size(out))
    return out


def gate_backward(grad: Tensor, both: Tensor) -> Tensor:
    """The gradient of both halves."""
    both = both.contiguous()
    to_both = torch.empty_like(both)
    _call("gate_backward", grad.contiguous(), both, to_both, *_size(grad))
    return to_both


@cache
def library() -> Kernels | None:
    """The compiled kernels; None, said once, where there are none."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.info("there is no C++ compiler here: models run on torch's operations alone, which takes longer")
        return None
    try:
        return _loaded(_built(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("the kernels for this processor could not be built, slower ones stand in for them: %s", said)
        return None


def _loaded(path: Path) -> Kernels:
    opened, types = ctypes.CDLL(str(path)), {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
    found: Kernels = {}
    both, single = product(KERNELS.items(), NAMES.items()), product(SINGLE.items(), [(torch.float32, "fp32")])
    for (name, takes), (dtype, suffix) in chain(both, single):
        kernel = found[name, dtype] = getattr(opened, f"{name}_{suffix}")
        kernel.argtypes, kernel.restype = [*(types[one] for one in takes.replace(" ", "")), ctypes.c_int], None
    return found


def _built(compiler: str) -> Path:
    """The library in the cache; it is made for a processor, and homes are shared between machines."""
    source = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join([source, *(part.encode() for part in (compiler, *FLAGS, _processor()))]))
    path = cache_root() / "native" / f"rows-{key.hexdigest()[:16]}.so"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid():
        raise PermissionError(f"{path.parent} belongs to another user, who could put any code there: remove it")
    if folder.st_mode & 0o022:
        path.parent.chmod(0o700)
    if not _ours(path):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *FLAGS, "-o", made, SOURCE]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            made.chmod(0o700)
            os.replace(made, path)
    return path


def _ours(path: Path) -> bool:
    """Whether a library is there that nobody else can have written: loading it runs its code."""
    return path.exists() and path.lstat().st_uid == os.getuid() and not path.stat().st_mode & 0o022


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _view(x: Tensor) -> tuple[int, int, int]:
    """How many rows lie one after the other, and how far the next lot and the next row are."""
    if x.ndim == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    assert x.ndim == 2
    return 1, x.stride(0), 0


def _size(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _call(name: str, *given: Tensor | float) -> None:
    """Call a kernel for the type of its first argument."""
    kernels, first = library(), given[0]
    assert kernels is not None
    assert isinstance(first, Tensor)
    plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in given]
    kernels[name, first.dtype](*plain, torch.get_num_threads())
