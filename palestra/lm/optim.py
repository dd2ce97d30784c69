"""Optimizers of language models: gradient clipping, AdamW, Muon (Jordan et al. 2024), a moving average of weights."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from palestra.data.mixture import stream_key
from palestra.errors import PalestraError
from palestra.lm.moments import SCALES, moments_of, streamed_step
from palestra.lm.parallel.names import stack_name
from palestra.lm.ranks import gathered, like, part, spread, whole
from palestra.rl.schedules import value
from palestra.spec.lm import AdamWSpec, MuonSpec, OptimSpec
from palestra.spec.schedule import in_fractions

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that is iterated: the steepest at 0 that leads all singular values to between about 0.7 and 1.2."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq", *SCALES)
"""What AdamW remembers of a parameter; scales where it is in 8 bits."""
TOGETHER = 2**26
"""How many numbers are orthogonalized at once: enough to fill a GPU, little compared with a model that has more."""


@dataclass(frozen=True)
class Stack:
    """A parameter (rows, columns) or (experts, rows, columns) in which matrices of `parts` rows each are stacked."""

    parameter: nn.Parameter
    momentum: Tensor
    parts: tuple[int, ...]


def stacked(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The parameters that Muon moves, by name, and the rows of the matrices in each: of every `Linear` and expert.

    The rows of embeddings, heads and routers belong to one token or expert each and are not a map between spaces: they
    stay with Adam, as Jordan found best.
    """
    parts: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        rows = getattr(module, "parts", {})  # of a `Linear`, or one that is split over ranks
        if hasattr(module, "weights"):
            parts |= {f"{prefix}weights.{part}": (count,) for part, count in rows.items()}
        elif rows:
            parts[f"{prefix}weight"] = tuple(rows.values())
        parts |= {f"{prefix}{part}": counts for part, counts in getattr(module, "stacks", {}).items()}  # of experts
    return parts


@torch.no_grad()
def muon_step(stacks: Sequence[Stack], lr: float, spec: MuonSpec) -> None:
    """One update of all that have a gradient: decoupled decay, then -lr · √max(1, rows / columns) · O.

    O is the orthogonalized momentum. With that factor (Jordan's) the learning rate means the same for every shape: how
    much an output changes. Rates tuned for 0.2·√max(rows, columns), which imitates Adam's size, are others.
    """
    for group in _alike([stack for stack in stacks if stack.parameter.grad is not None]):
        parameters, momenta = [stack.parameter for stack in group], [part(stack.momentum) for stack in group]
        gradients = [part(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1 - spec.momentum)
        ahead = [stack.momentum for stack in group]
        if spec.nesterov:
            ahead = [torch.empty_like(momentum) for momentum in ahead]
            torch._foreach_copy_([*map(part, ahead)], torch._foreach_lerp(gradients, momenta, spec.momentum))
        directions = torch.stack([whole(direction) for direction in ahead])  # (n, [experts,] rows, columns)
        parts = group[0].parts
        matrices = [rows.flatten(0, -3) for rows in directions.split(parts, dim=-2)]
        turned = {}
        for rows in dict.fromkeys(parts):  # those of one shape at once: queries, keys and values, gate and up
            batch = torch.cat([matrix for matrix in matrices if matrix.shape[-2] == rows])
            scale = max(1.0, rows / batch.shape[-1]) ** 0.5
            turned[rows] = iter((orthogonalize(batch, spec.ns_steps) * scale).chunk(parts.count(rows)))
        updates = torch.cat([next(turned[rows]) for rows in parts], dim=-2).view_as(directions).to(directions.dtype)
        mine = [part(parameter) for parameter in parameters]
        torch._foreach_mul_(mine, 1 - lr * spec.weight_decay)
        torch._foreach_add_(mine, [part(like(*pair)) for pair in zip(updates, parameters, strict=True)], alpha=-lr)


def orthogonalize(batch: Tensor, steps: int) -> Tensor:
    """For each matrix U·S·Vᵀ of the batch (n, rows, columns) U·S'·Vᵀ with S' near 1, by Newton–Schulz iteration.

    A singular value s becomes φ applied `steps` times to s / ‖S‖, with φ(x) = a·x + b·x³ + c·x⁵. Products are in bf16
    on a GPU: its error is small compared with the band in which S' lies anyway.
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


class Optimizer:
    """Moves the parameters of a model that require a gradient, in a run of a known number of steps.

    Made once the model is on its device, frozen where it is to be, and sharded. Weights are FP32, or bf16 where there
    is a `seed` for their stochastic rounding.
    """

    def __init__(self, model: nn.Module, spec: OptimSpec, steps: int, seed: int | None = None):
        self.spec, self.steps, self.seed = in_fractions(spec, steps), steps, seed
        self.skipped: float | Tensor = 0.0
        """Steps of the run that were none, as the device counts them."""
        self.parameters = _trained(model, narrow=seed is not None)
        self.offload = isinstance(spec, AdamWSpec) and spec.offload
        bits = 8 if isinstance(spec, AdamWSpec) and spec.state == "8bit" else 32
        parts = stacked(model) if isinstance(spec, MuonSpec) else {}
        muon = {name: p for name, p in self.parameters.items() if name in parts}
        self.stacks = {name: Stack(p, torch.zeros_like(p), parts[name]) for name, p in muon.items()}
        adam = {name: p for name, p in self.parameters.items() if name not in parts}
        self.adam = {name: moments_of(p, bits, host=self.offload) for name, p in adam.items()}
        plain = all(p.is_cuda and p.dtype == torch.float32 and part(p) is p for p in self.parameters.values())
        self._ahead = plain and not self.stacks and not self.offload and bits == 32
        """Whether the GPU decides by itself if a step is one: the host goes on to the next batch meanwhile."""

    def step(self, progress: float, norm: Tensor | None = None) -> dict[str, Any]:
        """One update of the weights, after which there are no gradients; `progress` of the run was done before it.

        Where the norm of the gradients is not finite, weights and state stay as they are (`skipped` is 1). `grad_norm`
        is the norm before clipping, `skipped_steps` counts the run's skipped steps; on a GPU they may still be tensors,
        to read which is to wait for it. `norm` is that of all gradients where other ranks have other parameters.
        """
        # A step takes the middle of what its schedule covers: no step is lost to a warm-up from 0 or a decay to 0.
        at = progress + 0.5 / self.steps
        schedules = {"lr": self.spec.lr} | ({"adam_lr": self.spec.adam_lr} if isinstance(self.spec, MuonSpec) else {})
        rates = {name: value(progress=at, **schedule.arguments()) for name, schedule in schedules.items()}
        parameters, most = list(self.parameters.values()), self.spec.max_grad_norm
        norm = gradient_norm(parameters) if norm is None else norm
        size = clip_ahead(parameters, most, norm) if self._ahead else clip_gradients(parameters, most, norm)
        bad = (~size.isfinite()).float() if isinstance(size, Tensor) else float(not math.isfinite(size))
        if isinstance(bad, Tensor) or not bad:
            found = bad if isinstance(bad, Tensor) else None
            self._adam_step(rates.get("adam_lr", rates["lr"]), round(progress * self.steps), found)
            if isinstance(self.spec, MuonSpec):
                muon_step(list(self.stacks.values()), rates["lr"], self.spec)
        for parameter in parameters:
            parameter.grad = None
        self.skipped = self.skipped + bad
        return {"grad_norm": size, **rates, "skipped": bad, "skipped_steps": self.skipped}

    @torch.no_grad()
    def _adam_step(self, lr: float, update: int, bad: Tensor | None) -> None:
        """AdamW; only parameters of two or more dimensions decay, and no biases. Nothing moves where `bad` is 1.

        By torch's function instead of `torch.optim.AdamW`, which imports torch._dynamo: 6 s on a slow core.
        """
        beta1, beta2 = self.spec.betas
        # Fused is 3 to 5 times as fast as the others on the CPU too.
        adam = partial(
            adamw, max_exp_avg_sqs=[], fused=True, amsgrad=False, maximize=False, lr=lr,
            beta1=beta1, beta2=beta2, eps=self.spec.eps,
        )  # fmt: skip
        at_once: dict[float, list[list[Tensor]]] = {0.0: [], self.spec.weight_decay: []}
        for name, moments in self.adam.items():
            p = self.parameters[name]
            if p.grad is None:
                continue
            decay = self.spec.weight_decay if p.ndim >= 2 and not name.endswith("_bias") else 0.0
            if self.offload or p.dtype.itemsize < 4 or moments["exp_avg"].dtype == torch.uint8:
                key = stream_key(self.seed or 0, "rounding", name, update) >> 1
                streamed_step(p, moments, partial(adam, weight_decay=decay), key)
            else:
                at_once[decay].append([part(tensor) for tensor in (p, p.grad, *moments.values())])
        for decay, rows in at_once.items():
            params, grads, steps, means, squares = map(list, zip(*rows, strict=True)) if rows else ([],) * 5
            adam(params, grads, means, squares, state_steps=steps, weight_decay=decay, found_inf=bad)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All that is remembered by the parameters' names, by what it is; what this rank has of it."""
        if self.offload and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the last step's copies to the host may be on their way
        columns = {key: {name: m[key] for name, m in self.adam.items() if key in m} for key in MOMENTS}
        return columns | {"momentum": {name: stack.momentum for name, stack in self.stacks.items()}}

    def state(self) -> dict[str, Any]:
        """All that is remembered, by the parameters' names; whole on every rank, and not copied where it is whole."""
        columns = {key: gathered(named) for key, named in self.tensors().items()}
        return {
            "adam": {name: {k: columns[k][name] for k in MOMENTS if name in columns[k]} for name in columns["step"]},
            "momentum": columns["momentum"],
            "skipped": int(self.skipped),
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Continue from `state()`, on as many ranks as there are now; `partial` where others have other parameters."""
        _same_names(state["adam"], self.adam, "AdamW's moments", partial)
        _same_names(state["momentum"], self.stacks, "Muon's momentum", partial)
        for name, moments in self.adam.items():
            if (saved := state["adam"].get(name)) is not None and saved.keys() != moments.keys():
                raise PalestraError(f"the checkpoint's moments of {name} have another precision: keep `optim.state`")
        for key in MOMENTS:
            column = {name: moments[key] for name, moments in state["adam"].items() if key in moments}
            spread(column, {name: moments[key] for name, moments in self.adam.items() if key in moments})
        spread(state["momentum"], {name: stack.momentum for name, stack in self.stacks.items()})
        self.skipped = state["skipped"]


class Ema:
    """The exponential moving average of the weights that are trained, without a trace of where they began.

    After t updates it is Σ dᵗ⁻ⁱ·wᵢ / Σ dᵗ⁻ⁱ over the weights w₁ … wₜ: a plain mean at first, the usual average with
    decay d in the end. That is Adam's bias correction, done by the size of the step instead of a division.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.count = decay, 0
        self.average = {name: p.detach().clone() for name, p in _trained(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the weights of a step into the average."""
        self.count += 1
        share = (1 - self.decay) / (1 - self.decay**self.count)
        torch._foreach_lerp_([*map(part, self.average.values())], [*map(part, _trained(model).values())], share)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averaged weights; after it its own again, to the bit."""

        @torch.no_grad()
        def swap() -> None:
            # Numbers are exchanged, not tensors: compiled code and captured graphs know parameters by their address.
            for name, parameter in _trained(model).items():
                own = parameter.detach().clone()
                parameter.copy_(self.average[name])
                self.average[name].copy_(own)

        swap()
        try:
            yield
        finally:
            swap()

    def state(self) -> dict[str, Any]:
        """The average, whole on every rank, and how many steps are in it."""
        return {"average": gathered(self.average), "count": self.count}

    def load_state(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Continue from `state()`."""
        _same_names(state["average"], self.average, "the moving average", partial)
        spread(state["average"], self.average)
        self.count = state["count"]


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], most: float | None, norm: Tensor | None = None) -> float:
    """The norm of all gradients as one vector; where it is finite and above `most` they are scaled down to that."""
    norm = gradient_norm(parameters) if norm is None else norm
    size = norm.item()
    if most is not None and most < size < math.inf:
        for alike in _alike_split(parameters):
            nn.utils.clip_grads_with_norm_(alike, most, norm)
    return size


def clip_ahead(parameters: Sequence[nn.Parameter], most: float | None, norm: Tensor) -> Tensor:
    """The same without reading the norm: the host does not wait for the device."""
    if most is not None:
        scale = torch.where(norm > most, most / (norm + 1e-6), 1.0)  # as torch's own function does
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)
    return norm


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of these gradients as one vector."""
    norms = []
    for alike in _alike_split(parameters):
        gradients = [p.grad for p in alike if p.grad is not None]
        if gradients[0].device.type == "cpu" or any(g.dtype.itemsize < 4 for g in gradients):
            # The CPU adds up one number after the other, off by 0.2 % for 30 million; rows first is exact enough.
            # Norms of bf16 would be rounded to bf16.
            gradients = [torch.linalg.vector_norm(g, dim=-1, dtype=_wide(g.dtype)) for g in gradients]
        norms.append(whole(nn.utils.get_total_norm(gradients)))
    return torch.stack(norms or [torch.zeros(())]).norm()


def _alike_split(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that have a gradient, in groups that are split over the same ranks."""
    meshes: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            meshes[getattr(p, "device_mesh", None)].append(p)
    return list(meshes.values())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _trained(model: nn.Module, *, narrow: bool = False) -> dict[str, nn.Parameter]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    coarse = [f"{name} is {p.dtype}" for name, p in trained.items() if p.dtype.itemsize < 4]
    if coarse and not narrow:
        raise ValueError(f"trained weights must be FP32, or be rounded with a seed: {coarse[0]}")
    return trained


def _same_names(saved: Mapping[str, Any], mine: Mapping[str, Any], what: str, partial: bool) -> None:
    names = set(map(stack_name, mine))
    unknown, absent = [] if partial else sorted(saved.keys() - names), sorted(names - saved.keys())
    if unknown or absent:
        difference = f"it has {unknown[0]}, which is not trained here" if unknown else f"{absent[0]} is missing"
        raise PalestraError(
            f"the checkpoint's {what} does not fit: {difference}. "
            "Resume with the model, the adapters and the optimizer that the run began with, or start a new run."
        )
