"""Names of tensors: where a `Linear` is split over ranks it has a parameter for each part; else they are stacked."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_PART = re.compile(r"(.+)\.(weight|biase)s\.(\w+)")
_EXPERTS = re.compile(r"\.experts\.(gate_up|down)$")


def joined(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors under the names that they have in a model that is not split."""
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in named.items():
        stacks.setdefault(stack_name(name), []).append(tensor)
    return {name: torch.cat(parts) if len(parts) > 1 and parts[0].ndim else parts[0] for name, parts in stacks.items()}


def parted(full: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: what belongs to each name of `mine`, in whose order the parts of a stack lie."""
    parts: dict[str, Tensor] = {}
    taken: dict[str, int] = {}
    for name, tensor in mine.items():
        stack = stack_name(name)
        if stack == name or not tensor.ndim:
            if stack in full:
                parts[name] = full[stack]
            continue
        start = taken.get(stack, 0)
        taken[stack] = start + len(tensor)
        parts[name] = full[stack][start : taken[stack]]
    return parts


def stack_name(name: str) -> str:
    """The name of the tensor that one belongs to where nothing is split."""
    name = _EXPERTS.sub(r".\1", name)
    match = _PART.fullmatch(name)
    return f"{match[1]}.{match[2].removesuffix('e')}" if match else name
