"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022), and a vocabulary split
over ranks: every rank has some heads, some of the MLP's width and some of the vocabulary; between them, some tokens."""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from palestra.lm.head import chunk_rows, logits
from palestra.lm.layers import LayerNorm, Linear, RMSNorm, local
from palestra.lm.model import Block, Transformer
from palestra.lm.moe import MoE
from palestra.lm.parallel.collectives import Group, gather, scatter


def split_tensor(model: Transformer, mesh: DeviceMesh) -> None:
    """Give every rank of the mesh, which has one dimension, its share of each matrix, in place."""
    layers: Any = model.layers
    for block in layers:
        if not isinstance(block, Block):  # that of another stage of a pipeline
            continue
        attention: Any = block.attn
        attention.heads //= mesh.size()
        attention.kv //= mesh.size()
        attention.qkv, attention.o = ColumnParallel(attention.qkv, mesh), RowParallel(attention.o, mesh)
        if attention.sinks is not None:
            attention.sinks = split_parameter(attention.sinks, mesh, Shard(0))
        mlp: Any = block.mlp.shared if isinstance(block.mlp, MoE) else block.mlp
        if mlp is not None:
            mlp.gate_up, mlp.down = ColumnParallel(mlp.gate_up, mesh), RowParallel(mlp.down, mesh)
    if model.embed is not None:
        model.embed = split_parameter(model.embed, mesh, Shard(0))
    if model.positions is not None:
        model.positions = split_parameter(model.positions, mesh, Replicate())
    if model.head is not None:
        model.head = split_parameter(model.head, mesh, Shard(0))
    for module in model.modules():  # these see some of the tokens on each rank
        if isinstance(module, RMSNorm | LayerNorm | MoE):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, split_parameter(parameter, mesh, Replicate()))
    model.vocabulary = Vocabulary(mesh)


class ColumnParallel(nn.Module):
    """Some rows of every part of a `Linear`, for all tokens of the group."""

    def __init__(self, linear: Linear, mesh: DeviceMesh):
        super().__init__()
        self.group = mesh.get_group()
        self.parts = linear.parts
        sizes = list(self.parts.values())
        self.weights, self.biases = nn.ParameterDict(), nn.ParameterDict()
        for name, weight in zip(self.parts, linear.weight.split(sizes), strict=True):
            self.weights[name] = split_parameter(weight, mesh, Shard(0))
        if linear.bias is not None:
            for name, bias in zip(self.parts, linear.bias.split(sizes), strict=True):
                self.biases[name] = split_parameter(bias, mesh, Shard(0))

    def forward(self, x: Tensor) -> Tensor:
        """(T / t, D) → (T, outputs / t)."""
        weight = torch.cat([local(part) for part in self.weights.values()])
        bias = torch.cat([local(part) for part in self.biases.values()]) if self.biases else None
        return F.linear(gather(x, self.group), weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class RowParallel(nn.Module):
    """Some columns of a `Linear`; the sums over the group go to the ranks of the tokens."""

    def __init__(self, linear: Linear, mesh: DeviceMesh):
        super().__init__()
        self.group, self.parts = mesh.get_group(), linear.parts
        self.weight = split_parameter(linear.weight, mesh, Shard(1))
        self.bias = None if linear.bias is None else split_parameter(linear.bias, mesh, Replicate())

    def forward(self, x: Tensor) -> Tensor:
        """(T, inputs / t) → (T / t, D)."""
        out = scatter(F.linear(x, local(self.weight).to(x.dtype)), self.group)
        return out if self.bias is None else out + local(self.bias).to(x.dtype)


class Vocabulary:
    """The embedding and the head of a model whose vocabulary is split."""

    def __init__(self, mesh: DeviceMesh):
        self.group = mesh.get_group()

    def embed(self, tokens: Tensor, matrix: Tensor) -> Tensor:
        """(T) → (T / t, D): each rank looks up the tokens it has."""
        own = local(matrix)
        place = tokens - self.group.rank() * len(own)
        here = (place >= 0) & (place < len(own))
        return scatter(F.embedding(place.where(here, 0), own) * here[:, None].to(own.dtype), self.group)

    def own(self, x: Tensor) -> Tensor:
        """(T) → (T / t): what is of this rank's tokens."""
        return x.chunk(self.group.size())[self.group.rank()]

    def hidden(self, x: Tensor) -> Tensor:
        """(T / t, D) → (T, D): every rank scores all tokens with its part of the vocabulary."""
        return gather(x, self.group)

    def token_logprobs(
        self, hidden: Tensor, matrix: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """What `lm.head.token_logprobs` gives, the same on every rank."""
        return _SplitLogprobs.apply(hidden, local(matrix), targets, temperature, entropy, self.group)


class _SplitLogprobs(torch.autograd.Function):
    """Log-probabilities where each rank has the logits of some of the vocabulary, in chunks of tokens."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, unembed: Tensor, targets: Tensor, temperature: float, entropy: bool, group: Group
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.group = temperature, group
        parts = [
            _normalized(hidden[part], unembed, targets[part], temperature, group) for part in _chunks(hidden, unembed)
        ]
        logprobs, entropies, normalizers = (
            torch.cat(column) if column else hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
            for column in ([part[i] for part in parts] for i in range(3))
        )
        ctx.save_for_backward(hidden, unembed, targets, entropies, normalizers)
        ctx.set_materialize_grads(False)
        if not entropy:
            entropies = torch.zeros_like(entropies)
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, unembed, targets, entropies, normalizers = ctx.saved_tensors
        of_logprob, of_entropy = grads
        of_logprob = torch.zeros_like(entropies) if of_logprob is None else of_logprob
        to_hidden, to_unembed = torch.zeros_like(hidden), torch.zeros_like(unembed)
        first = ctx.group.rank() * len(unembed)
        for part in _chunks(hidden, unembed):
            log_p = logits(hidden[part], unembed).div_(ctx.temperature).sub_(normalizers[part, None])
            factor = -of_logprob[part, None]
            if of_entropy is not None:
                factor = factor - of_entropy[part, None] * (log_p + entropies[part, None])
            to_logits = log_p.exp_().mul_(factor)
            mine, place = _here(targets[part] - first, len(unembed))
            to_logits[mine, place] += of_logprob[part][mine]
            to_logits.div_(ctx.temperature)
            # The sum over the ranks is `gather`'s, which gave every rank all of `hidden`.
            to_hidden[part] = (to_logits @ unembed.to(to_logits.dtype)).to(hidden.dtype)
            to_unembed += (to_logits.t() @ hidden[part].to(to_logits.dtype)).to(unembed.dtype)
        return to_hidden, to_unembed, None, None, None, None


def _normalized(
    hidden: Tensor, unembed: Tensor, targets: Tensor, temperature: float, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """log p of the targets, entropies and log Z, by three sums over the group."""
    scores = logits(hidden, unembed).div_(temperature)
    most = scores.amax(-1)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    exponentials = (scores - most[:, None]).exp_()
    mine, place = _here(targets - group.rank() * len(unembed), len(unembed))
    chosen = torch.zeros_like(most)
    chosen[mine] = scores[mine, place]
    sums = torch.stack([exponentials.sum(-1), (exponentials * scores).sum(-1), chosen])
    dist.all_reduce(sums, group=group)
    normalizer = most + sums[0].log()
    return sums[2] - normalizer, normalizer - sums[1] / sums[0], normalizer


def _here(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which places are in this rank's part of the vocabulary, and where."""
    mine = ((place >= 0) & (place < size)).nonzero()[:, 0]
    return mine, place[mine]


def _chunks(hidden: Tensor, unembed: Tensor) -> list[slice]:
    rows = chunk_rows(len(unembed), hidden.device)
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def split_parameter(tensor: Tensor, mesh: DeviceMesh, *places: Placement) -> nn.Parameter:
    """A parameter of which every rank has the whole, split over them, a place for each dimension of the mesh."""
    # Every rank has the whole tensor already: nothing is sent.
    split = distribute_tensor(local(tensor.detach()), mesh, places, src_data_rank=None)
    return nn.Parameter(cast(Tensor, split), requires_grad=tensor.requires_grad)
