"""Names of tensors: where a `Linear` is split over ranks it has a parameter for each part; else they are stacked."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_PART = re.compile(r"(.+)\.(weight|biase)s\.(\w+)")
_EXPERTS = re.compile(r"\.experts\.((?:gate_up|down)(?:_bias)?)$")


def joined(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors under the names that they have in a model that is not split."""
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in named.items():
        stacks.setdefault(stack_name(name), []).append(tensor)
    return {name: torch.cat(parts) if len(parts) > 1 and parts[0].ndim else parts[0] for name, parts in stacks.items()}


def stack_name(name: str) -> str:
    """The name of the tensor that one belongs to where nothing is split."""
    name = _EXPERTS.sub(r".\1", name)
    match = _PART.fullmatch(name)
    return f"{match[1]}.{match[2].removesuffix('e')}" if match else name
