"""Expert parallelism: every rank has some of a layer's experts, and tokens travel to the ranks of those they chose."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from palestra.lm.layers import local
from palestra.lm.model import Block, Transformer
from palestra.lm.moe import MoE, stacked
from palestra.lm.parallel.collectives import exchange
from palestra.lm.parallel.tensor import split_parameter


def split_experts(model: Transformer, mesh: DeviceMesh) -> None:
    """Give every rank its share of each layer's experts, in place; `mesh` is `expert`, or `expert` and `tensor`."""
    for block in model.layers:
        if isinstance(block, Block):
            assert isinstance(block.mlp, MoE)
            block.mlp = SplitMoE(block.mlp, mesh)


class Experts(nn.Module):
    """This rank's experts: a module of its own, because fewer ranks share them than share the rest of a layer."""

    def __init__(self, moe: MoE, mesh: DeviceMesh):
        super().__init__()
        self.stacks = moe.stacks
        places = [Shard(0), Replicate()][: mesh.ndim]
        self.gate_up, self.down, self.gate_up_bias, self.down_bias = (
            None if parameter is None else split_parameter(parameter, mesh, *places)
            for parameter in (moe.gate_up, moe.down, moe.gate_up_bias, moe.down_bias)
        )

    def forward(self, rows: Tensor, ends: Tensor, apply: Callable[..., Tensor]) -> Tensor:
        """What `apply` makes of rows and these experts."""
        parameters = [local(parameter) for parameter in stacked(self)]
        # Where no token has chosen one of them, they have a gradient all the same, of 0: all ranks meet to add them up.
        nothing = torch.stack([parameter.flatten()[:0].sum() for parameter in parameters]).sum()
        return apply(rows, ends, *parameters) + nothing.to(rows.dtype)


class SplitMoE(MoE):
    """A router that sends tokens to the ranks of their experts."""

    def __init__(self, moe: MoE, mesh: DeviceMesh):
        nn.Module.__init__(self)
        self.spec, self.gate, self.shared, self.router = moe.spec, moe.gate, moe.shared, moe.router
        self.shared_gate, self.router_bias = moe.shared_gate, moe.router_bias
        self.register_buffer("bias", moe.bias)
        self.experts, self.group = Experts(moe, mesh), mesh["expert"].get_group()

    def _experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        ranks, own = self.group.size(), self.spec.experts // self.group.size()
        counts = ends.diff(prepend=ends.new_zeros(1))  # (E)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)  # (ranks · own): from each rank, for each of mine
        sends, takes = (part.view(ranks, own).sum(1).tolist() for part in (counts, theirs))
        arrived = exchange(rows, self.group, sends, takes)
        # From rank by rank to expert by expert.
        expert = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(theirs)
        order = expert.argsort(stable=True)
        ends = theirs.view(ranks, own).sum(0).cumsum(0)
        out = self.experts(arrived[order], ends, self.apply_experts)
        return exchange(out[order.argsort()], self.group, takes, sends)
