"""Calls `rows.cpp`, compiled for this machine once, where it has a C++ compiler: `available` says whether.

These are for the CPU what `kernels.py` is for the GPU. Elsewhere `layers.py` computes the same with torch's operations.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.data.cache import cache_root
from palestra.spec.shape import Shape

Kernels = dict[tuple[str, torch.dtype], Any]

log = logging.getLogger("palestra.lm")

SOURCE = Path(__file__).with_name("rows.cpp")
FLAGS = ["-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-std=c++17"]
FLAGS += ["-shared", "-fPIC"]
THREADS = [str(path) for path in Path(torch.__file__).parent.glob("lib/libgomp*")]
"""The library for threads that came with torch: linked to, so that both use the same threads."""
COMPILE_SECONDS = 300.0
"""Where it takes longer, something hangs."""
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
KERNELS = {
    "norm": "p iii p f p p ii",
    "norm_backward": "p p iii p p p p ii",
    "turn": "p iii p p f p ii",
    "gate": "p p ii",
    "gate_backward": "p p p ii",
    "attend": "p p p p p p i iiii i i",
    "tree": "p p p p p p p iii iii i i",
}
"""What each takes: pointers, integers, floats; and at last how many threads may help."""
SINGLE = {"draw": "p i p p p p p ii", "product": "p p p iii", "decode": "p p p p p p p f i"}
"""Those of FP32 alone."""
LAYER = ["attn_norm.weight", "attn.qkv", "attn.qkv.bias", "attn.q_norm.weight", "attn.k_norm.weight", "attn.o"]
LAYER += ["mlp_norm.weight", "mlp.gate_up", "mlp.down"]
"""What `Decoder` needs of a layer, in the order of `struct Layer`."""


def available(x: Tensor) -> bool:
    """Whether rows like `x` are computed here."""
    known = x.device.type == "cpu" and x.dtype in NAMES and x.stride(-1) == 1 and not torch.compiler.is_compiling()
    return known and library() is not None


def settle_products() -> None:
    """Leave torch's products to OpenBLAS on ARM, in all of the process.

    Those with a transposed factor go to the Arm Compute Library otherwise, which takes 0.3 ms for a call at least and
    starts threads of its own: the Gram matrices of eight 64 × 64 ones 14 ms on a busy machine, OpenBLAS 0.2.
    """
    if platform.machine() in ("aarch64", "arm64"):
        setattr(torch.backends.mkldnn, "enabled", False)  # noqa: B010 (the type stubs do not know it)


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


def sample_tokens(scores: Tensor, heats: Tensor, seeds: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row of scores (B, V, FP32) and its log-probability, as `generate.engine.sampler` has them.

    `heats` (B, FP32) are temperatures; `seeds` and `counts`, of tokens sampled before (B, int64), make each row's
    random number.
    """
    tokens, logprobs = torch.empty(len(scores), dtype=torch.int64), torch.empty(len(scores))
    _call("draw", scores, scores.stride(0), heats, seeds, counts, tokens, logprobs, *scores.shape)
    return tokens, logprobs


def in_panels(weight: Tensor) -> Tensor:
    """A matrix (outputs, inputs) as `product` reads it: (outputs / 16, inputs, 16), filled up with zeros."""
    return F.pad(weight, (0, 0, 0, -len(weight) % 16)).unflatten(0, (-1, 16)).transpose(1, 2).contiguous()


def product(x: Tensor, panels: Tensor, out: Tensor) -> Tensor:
    """Rows (T, inputs, FP32) times a matrix, into `out` (T, outputs): the bits of a row depend on nothing else."""
    _call("product", x.contiguous(), panels, out, *x.shape, out.shape[1])
    return out


class Decoder:
    """All layers of a dense FP32 model for one new token in each row, in one call: a model of 30 has 400 otherwise."""

    def __init__(self, shape: Shape, parts: Mapping[str, Tensor], keys: Tensor, values: Tensor):
        """`parts` by name, matrices `in_panels`; `keys` and `values` (L, pages, page, K, dim)."""
        self._held = parts, keys, values
        pointers = []
        for layer in range(shape.layers):
            tensors = [*(parts.get(f"layers.{layer}.{name}") for name in LAYER), keys[layer], values[layer]]
            pointers.append([0 if each is None else each.data_ptr() for each in tensors])
            pointers[-1].append(shape.window_of(layer) or 0)
        per_head = shape.qk_norm == "head"
        sizes = [shape.layers, shape.width, shape.heads, shape.kv, shape.dim, shape.hidden, keys.shape[2], per_head]
        self._layers, self._sizes, self._eps = torch.tensor(pointers), torch.tensor(sizes), shape.norm_eps

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, tables: Tensor) -> Tensor:
        """Embeddings (B, D) become the last hidden states, before their norm; angles are `doubled`.

        Row b has `lengths[b]` tokens cached, in the pages `tables[b]`.
        """
        sizes = torch.cat([self._sizes, torch.tensor([tables.stride(0)])])
        _call("decode", x, self._layers, sizes, cos, sin, lengths, tables, self._eps, len(x))
        return x


def attend(q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, window: int | None) -> Tensor:
    """Attention of one token a row, q (T, H, dim), over the first `lengths` + 1 positions of its pages.

    `keys` and `values` (pages, page, K, dim), `tables` (B, n) int32, `lengths` (B), T ≥ B; zeros beyond B. The
    dimension of a head is a multiple of 16.
    """
    (_, page, kv, dim), (batch, across) = keys.shape, (len(lengths), tables.stride(0))
    out, q = torch.zeros(q.shape, dtype=q.dtype), q.contiguous()
    _call("attend", q, keys, values, lengths, tables, out, across, q.shape[1], kv, dim, page, window or 0, batch)
    return out


def attend_tree(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, bounds: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention of q (T, H, dim) over k and v (T, K, dim), of sequences that share beginnings.

    With (a, b, n) = `bounds[s]`, sequence s has the tokens of `ranges[a:b]`, (first, count) each, one after the other.
    The last n, all of its last range, attend to those up to themselves; the result has nothing for the others. `sinks`
    (H) are scores of keys without values.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    q, k, v = (t if t.stride()[1:] == (t.shape[2], 1) else t.contiguous() for t in (q, k, v))
    logits = 0 if sinks is None else sinks.float().contiguous()
    apart = (t.stride(0) for t in (q, k, v))
    _call("tree", q, k, v, logits, ranges, bounds, out, *apart, *q.shape[1:2], *k.shape[1:], window or 0, len(bounds))
    return out


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
    """The compiled kernels; None, logged once, where they cannot be built."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log.info("no C++ compiler: models run on torch's operations alone, which is slower")
        return None
    try:
        return _loaded(_built(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("the CPU kernels could not be compiled, slower torch operations replace them: %s", reason)
        return None


def _loaded(path: Path) -> Kernels:
    opened, types = ctypes.CDLL(str(path)), {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
    kernels: Kernels = {}
    for dtype, suffix in NAMES.items():
        for name, takes in (KERNELS | SINGLE if dtype == torch.float32 else KERNELS).items():
            kernel = kernels[name, dtype] = getattr(opened, f"{name}_{suffix}")
            kernel.argtypes, kernel.restype = [*(types[kind] for kind in takes.replace(" ", "")), ctypes.c_int], None
    return kernels


def _built(compiler: str) -> Path:
    """The library in the cache; it is made for a processor, and homes are shared between machines."""
    source = SOURCE.read_bytes()
    link = ["-Wl,--no-as-needed", *THREADS] if THREADS else []
    parts = (compiler, *FLAGS, *link, _processor())
    key = hashlib.sha256(b"\0".join([source, *(part.encode() for part in parts)]))
    path = cache_root() / "native" / f"rows-{key.hexdigest()[:16]}.so"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid():
        raise PermissionError(f"{path.parent} belongs to another user, who could put any code there: remove it")
    if folder.st_mode & 0o022:
        path.parent.chmod(0o700)
    if not _is_ours(path):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *FLAGS, "-o", made, SOURCE, *link]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            made.chmod(0o700)
            os.replace(made, path)
    return path


def _is_ours(path: Path) -> bool:
    """Whether a library is there that no other user can have written: loading it runs its code."""
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


def _call(name: str, *arguments: Tensor | float) -> None:
    """Call a kernel for the type of its first argument."""
    kernels, first = library(), arguments[0]
    assert kernels is not None
    assert isinstance(first, Tensor)
    plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    kernels[name, first.dtype](*plain, torch.get_num_threads())
