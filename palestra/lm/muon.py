"""Muon (Jordan et al. 2024): momentum, orthogonalised matrix by matrix. Many matrices of a shape go together."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from palestra.lm.moe import MoE
from palestra.lm.ops import Linear
from palestra.lm.sharding import like, whole
from palestra.spec.optim import MuonSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that is iterated: the steepest at 0 that leads all singular values to between about 0.7 and 1.2."""
TOGETHER = 2**26
"""How many numbers are orthogonalised at once: enough to fill a GPU, little beside a model that has more."""


@dataclass(frozen=True)
class Stack:
    """A parameter (rows, columns) or (experts, rows, columns) in which matrices of `parts` rows each are stacked."""

    parameter: nn.Parameter
    momentum: Tensor
    parts: tuple[int, ...]


def stacked(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The parameters that Muon moves, by name, and the rows of the matrices in each: of every `Linear` and expert.

    The rows of embeddings, heads and routers belong to one token or expert each and are no map between spaces: they
    stay with Adam, as Jordan found best.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, Linear):
            found[f"{prefix}weight"] = tuple(module.parts.values())
        elif isinstance(module, MoE):
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    rows = parameter.shape[1]
                    found[f"{prefix}{key}"] = (rows // 2, rows // 2) if key.endswith("gate_up") else (rows,)
    return found


@torch.no_grad()
def muon_step(stacks: Sequence[Stack], lr: float, spec: MuonSpec) -> None:
    """One update of all that have a gradient: decoupled decay, then -lr · √max(1, rows / columns) · O.

    O is the orthogonalised momentum. With that factor (Jordan's) the learning rate means the same for every shape: how
    much an output changes. Rates tuned for 0.2·√max(rows, columns), which imitates Adam's size, are others.
    """
    for group in _alike([stack for stack in stacks if stack.parameter.grad is not None]):
        parameters, momenta = tuple(stack.parameter for stack in group), tuple(stack.momentum for stack in group)
        gradients = tuple(p.grad for p in parameters if p.grad is not None)
        torch._foreach_lerp_(momenta, gradients, 1 - spec.momentum)
        ahead = torch._foreach_lerp(gradients, momenta, spec.momentum) if spec.nesterov else momenta
        directions = torch.stack([whole(direction) for direction in ahead])  # (n, [experts,] rows, columns)
        turned = []
        for part in directions.split(group[0].parts, dim=-2):
            scale = max(1.0, part.shape[-2] / part.shape[-1]) ** 0.5
            turned.append(orthogonalise(part.flatten(0, -3), spec.ns_steps).view(part.shape) * scale)
        updates = torch.cat(turned, dim=-2).to(directions.dtype)
        torch._foreach_mul_(parameters, 1 - lr * spec.weight_decay)
        torch._foreach_add_(parameters, tuple(map(like, updates, parameters)), alpha=-lr)


def orthogonalise(batch: Tensor, steps: int) -> Tensor:
    """For each matrix U·S·Vᵀ of the batch (n, rows, columns) U·S'·Vᵀ with S' near 1, by Newton–Schulz iteration.

    A singular value s becomes φ applied `steps` times to s / ‖S‖, with φ(x) = a·x + b·x³ + c·x⁵. Products are in bf16
    on a GPU: its error is small beside the band in which S' lies anyway.
    """
    a, b, c = COEFFICIENTS
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.mT if tall else batch  # the Gram matrix is the smaller one
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-12)  # all singular values at most 1; 0 stays 0
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b·xxᵀ + c·(xxᵀ)²
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).contiguous()


def _alike(stacks: Sequence[Stack]) -> Iterator[list[Stack]]:
    """Groups of the same shape and parts, each of about `TOGETHER` numbers at most."""
    groups: dict[tuple, list[Stack]] = defaultdict(list)
    for stack in stacks:
        groups[(stack.parameter.shape, stack.parts)].append(stack)
    for group in groups.values():
        size = max(1, TOGETHER // group[0].parameter.numel())
        for first in range(0, len(group), size):
            yield group[first : first + size]
