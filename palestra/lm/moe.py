"""Mixture of experts: a router sends every token to its k best experts; losses and biases keep their loads even."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.lm.layers import MLP, bilinear, clamped_swiglu, local, swiglu, wide
from palestra.spec.shape import MoESpec

if TYPE_CHECKING:
    from palestra.lm.batch import Batch
    from palestra.lm.model import Transformer

Gate = Callable[[Tensor], Tensor]
GATES: dict[str, Gate] = {"swiglu": swiglu, "bilinear": bilinear, "clamped_swiglu": clamped_swiglu}
FEWEST_ROWS = {torch.float32: 16, torch.bfloat16: 64}
"""On the CPU a product of fewer rows takes another kernel and rounds differently. Experts see at least this many: the
output for a token does not depend on how many others chose its expert."""


class MoE(nn.Module):
    """A router and its experts; the experts' matrices are stacked."""

    bias: Tensor | None
    """(E) what each expert's probability is raised by when experts are chosen."""

    def __init__(self, width: int, spec: MoESpec, *, biases: bool = False):
        super().__init__()
        self.spec = spec
        self.gate = GATES[spec.activation]
        self.router = nn.Parameter(torch.empty(spec.experts, width))
        self.gate_up = nn.Parameter(torch.empty(spec.experts, 2 * spec.mlp, width))
        self.down = nn.Parameter(torch.empty(spec.experts, width, spec.mlp))
        self.router_bias, self.gate_up_bias, self.down_bias = (
            nn.Parameter(torch.zeros(spec.experts, *size)) if biases else None
            for size in ((), (2 * spec.mlp,), (width,))
        )
        rows = (2 * spec.mlp,) if self.gate is clamped_swiglu else (spec.mlp, spec.mlp)
        self.stacks = {"gate_up": rows, "down": (width,)}  # the rows of an expert's matrices
        self.shared = MLP(width, spec.shared_width, self.gate, bias=biases) if spec.shared_width else None
        self.shared_gate = None if spec.gated_shared is None else nn.Parameter(torch.empty(1, width))
        self.register_buffer("bias", torch.zeros(spec.experts) if spec.bias_rate else None)

    @property
    def learns(self) -> bool:
        """Whether the router is trained."""
        return self.router.requires_grad

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, D) → (T, D), and the router's logits (T, E) in FP32 whatever the precision of `x`."""
        router = self._route(x, self.router, self.router_bias)
        weights, chosen = choose(router, self.spec.active, None if self.bias is None else self.bias.to(x.dtype))
        if self.spec.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)  # (T · k): the choices, one expert after the other
        back = order.argsort()  # where each token's choices have gone
        ends = torch.searchsorted(experts, torch.arange(self.spec.experts, device=x.device), right=True)
        out = self._experts(_Dispatch.apply(x, order // self.spec.active, back), ends)
        # Not `index_add`, which adds a token's parts in no fixed order on the GPU.
        parts = out.index_select(0, back).unflatten(0, chosen.shape)  # (T, k, D)
        mixed = (parts * weights[..., None].to(x.dtype)).sum(1)
        if self.shared is None:
            return mixed, router
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * self._route(x, self.shared_gate).sigmoid().to(x.dtype)
        return mixed + shared, router

    def _route(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        # Rounded to the precision of x first, as the generator's weights are: both must choose the same experts.
        bias = None if bias is None else wide(local(bias).to(x.dtype))
        return F.linear(wide(x), wide(local(matrix).to(x.dtype)), bias)

    def _experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Each expert on its rows (N, D), which end at `ends` (E) and follow those of the expert before it."""
        return self.apply_experts(rows, ends, *map(local, stacked(self)))

    def apply_experts(self, rows: Tensor, ends: Tensor, *parameters: Tensor) -> Tensor:
        """The experts with these matrices and biases, as `stacked` gives them, on their rows."""
        gate_up, down, *biases = (parameter.to(rows.dtype) for parameter in parameters)
        if rows.is_cuda and multiplies_groups(rows.dtype, rows.shape[1], self.spec.mlp):
            return grouped(rows, ends, gate_up, down, self.gate, *biases)
        pieces, start = [rows[:0]], 0
        for end, *expert in zip(ends.tolist(), *(stack.unbind() for stack in (gate_up, down, *biases)), strict=True):
            if start < end:
                pieces.append(self._expert(rows[start:end], *expert))
            start = end
        return torch.cat(pieces)

    def _expert(self, x: Tensor, *expert: Tensor) -> Tensor:
        fewest = FEWEST_ROWS.get(x.dtype, 0) if x.device.type == "cpu" else 0
        return self.expert(F.pad(x, (0, 0, 0, max(0, fewest - len(x)))), *expert)[: len(x)]

    def expert(
        self, x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None = None, out_bias: Tensor | None = None
    ) -> Tensor:
        """One expert of all rows (N, D)."""
        return F.linear(self.gate(F.linear(x, first, bias)), second, out_bias)


def multiplies_groups(dtype: torch.dtype, width: int, mlp: int) -> bool:
    """Whether a GPU has a kernel for experts of these sizes, which takes the bounds from the device: nothing waits.

    It wants rows of a multiple of 16 bytes.
    """
    return dtype == torch.bfloat16 and width % 8 == 0 and mlp % 8 == 0


def stacked(experts: Any) -> list[Tensor]:
    """The parameters of all experts: two matrices, and their biases where there are."""
    parameters = experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias
    return [parameter for parameter in parameters if parameter is not None]


class RouterElsewhere(nn.Module):
    """What every rank knows of a router that another stage of a pipeline has: all of them count its choices."""

    bias: Tensor | None

    def __init__(self, moe: MoE):
        super().__init__()
        self.spec, self.learns = moe.spec, moe.learns
        self.register_buffer("bias", moe.bias)


def grouped(rows: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, gate: Gate, *biases: Tensor) -> Tensor:
    """All experts in two products: rows (N, D) up to `ends` (E) with gate_up (E, 2F, D) and down (E, D, F) → (N, D).

    Biases are (E, 2F) and (E, D).
    """
    bounds = ends.to(torch.int32)
    hidden = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=bounds)
    if not biases:
        return F.grouped_mm(gate(hidden), down.transpose(1, 2), offs=bounds)
    expert = torch.searchsorted(ends, torch.arange(len(rows), device=rows.device), right=True)
    first, second = (F.embedding(expert, bias) for bias in biases)  # whose gradients are added in a fixed order
    return F.grouped_mm(gate(hidden + first), down.transpose(1, 2), offs=bounds) + second


class _Dispatch(torch.autograd.Function):
    """The rows of `x` (T, D) at `tokens` (T · k); each occurs k times, those of the first at `back[:k]`, and so on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.tokens = len(x)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        # Torch's own would add a token's copies in no fixed order.
        return grads[0][back].unflatten(0, (ctx.tokens, -1)).sum(1), None, None


def choose(router: Tensor, active: int, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and numbers (…, k) of the experts that logits (…, E) choose; of equals the first.

    The weights are softmax probabilities over all experts. `bias` (…, E) counts in the choice alone (DeepSeek-V3,
    equation 16).
    """
    probabilities = router.softmax(-1)
    preference = probabilities.detach() if bias is None else probabilities.detach() + bias
    chosen = preference.sort(dim=-1, descending=True, stable=True).indices[..., :active]
    return probabilities.gather(-1, chosen), chosen


@dataclass(frozen=True)
class RouterTerms:
    """What the routers of a model add to the loss of a batch."""

    total: Tensor
    """Weighted losses, summed over tokens and layers."""
    terms: dict[str, Tensor]
    """Sums over tokens of the layers' mean losses, for people: `router/balance` is 1 a token where loads are even."""
    load: Tensor
    """(L, E) how many tokens each expert got."""


def router_terms(model: "Transformer", router: Tensor | None, batch: "Batch") -> RouterTerms | None:
    """The losses and loads of router logits (L, T, E), weighted as the model's spec says; None without experts."""
    spec = model.shape.moe
    if spec is None or router is None:
        return None
    bias = selection_bias(model)
    balance, z = balance_loss(router, batch.lengths, spec.active, bias), z_loss(router)
    terms = {"router/balance": balance.detach() / len(router), "router/z": z.detach() / len(router)}
    return RouterTerms(spec.balance * balance + spec.z_loss * z, terms, expert_load(router, spec.active, bias))


def balance_loss(router: Tensor, lengths: list[int], active: int, bias: Tensor | None = None) -> Tensor:
    """Switch Transformer, equation 4, of each sequence by itself, times its length; summed over sequences and layers.

    `router` are logits (L, T, E) and `bias` (L, E) what their choice was biased with. Divided by T it is the mean over
    tokens, and L where every sequence has even loads. Splitting a batch between sequences splits the sum.
    """
    probabilities, used = router.softmax(-1), _used(router, active, bias)
    long = torch.tensor(lengths, device=router.device)
    sequences = torch.repeat_interleave(torch.arange(len(long), device=router.device), long, output_size=sum(lengths))
    counts = router.new_zeros(len(router), len(long), router.shape[-1]).index_add(1, sequences, used)  # (L, B, E)
    # f of each expert, 1 where loads are even. Σ over t of p · f is n · Σ over e of f · P: P is the mean of p.
    fractions = counts * (router.shape[-1] / active) / long[:, None]
    return (probabilities * fractions[:, sequences]).sum()


def z_loss(router: Tensor) -> Tensor:
    """The square of log Σ exp of the logits (L, T, E), summed over tokens and layers (ST-MoE, equation 5)."""
    return router.logsumexp(-1).square().sum()


def expert_load(router: Tensor, active: int, bias: Tensor | None = None) -> Tensor:
    """How many tokens each expert of each layer got (L, E), of logits (L, T, E)."""
    return _used(router, active, bias).sum(1)


def _used(router: Tensor, active: int, bias: Tensor | None) -> Tensor:
    """1 where a token's logits (L, T, E) chose an expert, else 0."""
    _, chosen = choose(router.detach(), active, None if bias is None else bias[:, None])
    return torch.zeros_like(router).scatter(-1, chosen, 1.0)


def selection_bias(model: "Transformer") -> Tensor | None:
    """The biases (L, E) that the model's routers choose with; none where loads are not balanced by biases."""
    biases = [layer.bias for layer in _layers(model) if layer.bias is not None]
    return torch.stack(biases).to(model.dtype) if biases else None


@torch.no_grad()
def update_bias(model: "Transformer", load: Tensor) -> None:
    """Make experts with more than the mean load (L, E) less likely to be chosen, the others more (DeepSeek-V3 §2.1.2).

    Loads are those of a whole step, over all micro-batches and ranks. Without biases there is nothing to do.
    """
    for layer, counts in zip(_layers(model), load, strict=True):
        if layer.bias is not None and layer.learns:  # adapters leave a frozen router as it is
            layer.bias += layer.spec.bias_rate * (counts.mean() - counts).sign()


def _layers(model: "Transformer") -> list["MoE | RouterElsewhere"]:
    return [module for module in model.modules() if isinstance(module, MoE | RouterElsewhere)]
