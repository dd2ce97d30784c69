"""Whether and how an update is compiled to one graph."""

import shutil
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from palestra.errors import UsageError
from palestra.spec.kinds.control import ControlSpec

# Compiling takes about 20 s on two cores and saves about 1 ms an update of a small network (docs/log.md).
WORTH_UPDATES = 25_000
# Four updates of DQN in one graph take 13 s more to compile and save 80 µs each (docs/log.md).
WORTH_TOGETHER = 160_000


def should_compile(spec: ControlSpec) -> bool:
    """What `train.compile` means here: auto compiles long runs where there is a compiler."""
    wanted = spec.train.compile
    compiler = shutil.which("g++") or shutil.which("clang++")
    if wanted == "on" and compiler is None:
        raise UsageError(
            "train.compile: on needs a C++ compiler (g++ or clang++), found none: install one or set it to off"
        )
    return wanted == "on" or (wanted == "auto" and compiler is not None and spec.updates >= WORTH_UPDATES)


def together(spec: ControlSpec) -> int:
    """How many updates one graph is worth to hold: several in long runs, or where compiling is asked for."""
    return 4 if spec.train.compile == "on" or spec.updates >= WORTH_TOGETHER else 1


def compiled(method: MethodType) -> Callable:
    """`method` as one graph for fixed shapes.

    On small networks what surrounds the kernels costs as much as they do: the C++ wrapper and checking only the tensors
    (the Python objects an update reads never change) save 40 % of a call (docs/log.md). The price of not checking: an
    argument that was None must stay None.
    """
    # torch keeps graphs by code object, and nothing it still checks tells two objects of one class apart: with a code
    # object of its own, one learner cannot be handed the graph, and so the coefficients, of another.
    f: Any = method.__func__
    own = FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    options: dict[str, Any] = {"cpp_wrapper": True, "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    return torch.compile(MethodType(own, method.__self__), fullgraph=True, dynamic=False, options=options)
