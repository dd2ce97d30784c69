"""The processes that train one model together: who computes what, and how their results become one."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from palestra.data.packing import balanced, micro_batches
from palestra.lm.batch import Batch
from palestra.lm.model import Block


@dataclass(frozen=True)
class Ranks:
    """`size` processes, of which this is number `rank`; one process alone needs no communication."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        """The processes that `torchrun` started, or this one alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=10))
        return cls(dist.get_rank(), size)

    @property
    def first(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def shard(self, model: nn.Module) -> None:
        """Spread parameters, gradients and optimizer state over the ranks (FSDP2), a block at a time."""
        if self.size == 1:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        for block in model.modules():
            if isinstance(block, Block):
                fully_shard(block)
        fully_shard(model, reshard_after_forward=False)  # the head reads the root's parameters after its forward
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # losses are divided by the global denominator already

    def micro_batches(self, batch: Batch, max_tokens: int, group: int) -> list[Batch]:
        """This rank's micro-batches of everybody's batch; every rank has as many, so that all meet in every layer."""
        sizes = batch.group_sizes(group)
        shares = balanced(sizes, self.size) if self.size > 1 else [list(range(len(sizes)))]
        limit = max(max_tokens, max(sizes))
        bins = [
            [[share[i] for i in part] for part in micro_batches([sizes[g] for g in share], limit)] if share else []
            for share in shares
        ]
        mine = [batch.select_groups(part, group) for part in bins[self.rank]]
        filler = batch.select_groups([0], group)
        filler = replace(filler, loss_mask=torch.zeros_like(filler.loss_mask))  # computed and without effect
        return mine + [filler] * (max(map(len, bins)) - len(mine))

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over the ranks of each number."""
        if self.size == 1:
            return dict(values)
        total = torch.stack([value.double() for value in values.values()])
        dist.all_reduce(total)
        return dict(zip(values, total.unbind(), strict=True))

    def gather(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters on every rank."""
        if self.size == 1:
            return dict(weights)
        from torch.distributed.tensor import DTensor

        return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in weights.items()}

    @torch.no_grad()
    def scatter(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Copy whole parameters into the model, each rank its part."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        parameters = dict(model.named_parameters())
        for name, value in weights.items():
            mine = parameters[name]
            if isinstance(mine, DTensor):
                value = distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements)
            mine.copy_(value)

    def from_first(self, value: Any) -> Any:
        """What the first rank says, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]
