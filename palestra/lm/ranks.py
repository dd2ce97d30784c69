"""The processes that train one model together: collectives, and tensors sharded over ranks."""

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from palestra.data.store import balanced, micro_batches
from palestra.lm.batch import Batch
from palestra.lm.model import Block, Transformer
from palestra.lm.scorer import ValueHead


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; a tensor that is not split is given back. All ranks call it together."""
    split: Any = tensor
    return split.full_tensor() if _is_split(tensor) else tensor


def like(full: Tensor, other: Tensor) -> Tensor:
    """`full`, which every rank has, split as `other` is; as it is where that is not split."""
    if not _is_split(other):
        return full
    from torch.distributed.tensor import distribute_tensor  # takes a second to import

    split: Any = other
    return distribute_tensor(full, split.device_mesh, split.placements, src_data_rank=None)


def split_again(model: nn.Module) -> None:
    """Drop the whole parameters that a forward pass without a backward pass has left in a model that is split.

    Before its weights change: the next forward pass would take the old ones for the new.
    """
    for module in model.modules():
        reshard = getattr(module, "reshard", None)  # of FSDP2
        if reshard is not None:
            reshard()


def _is_split(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


PATIENCE = timedelta(days=1)
"""How long ranks wait for the first, which tokenizes, samples and saves alone. A dead one is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """`size` processes, of which this is number `rank`; one process alone needs no communication."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        """The processes that were started together (by `torchrun`, or as `devices` asks), or this one alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            cuda = device.type == "cuda"
            if cuda:
                torch.cuda.set_device(device)
            # Collectives of objects and numbers on the host never wait for the GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
            atexit.register(_leave)  # not before: torch cannot join the same processes a second time
        return cls(dist.get_rank(), size)

    @property
    def first(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def shard(self, model: nn.Module) -> None:
        """Spread parameters, gradients and optimizer state over the ranks (FSDP2), a block at a time."""
        if self.size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        # Named, because torch would take the GPU of a machine that has one for a model on the CPU too.
        mesh = init_device_mesh(next(model.parameters()).device.type, (self.size,))
        for module in reversed(list(model.modules())):  # blocks before the transformer, which takes what is left
            if isinstance(module, Block | ValueHead | Transformer):
                # The head reads the transformer's own parameters after its forward pass.
                fully_shard(module, mesh=mesh, reshard_after_forward=not isinstance(module, Transformer))
                assert isinstance(module, FSDPModule)
                module.set_gradient_divide_factor(1.0)  # losses are divided by the global denominator already
                module.set_force_sum_reduction_for_comms(True)  # Gloo can add and nothing else

    def micro_batches(self, batch: Batch, max_tokens: int, group: int) -> list[tuple[Batch, float]]:
        """This rank's micro-batches of the common batch, each with 1, or 0 where its results do not count.

        Every rank has as many, so that all meet in every layer.
        """
        sizes = batch.group_sizes(group)
        limit = max(max_tokens, max(sizes))
        bins = [
            [[share[i] for i in part] for part in micro_batches([sizes[g] for g in share], limit)]
            for share in balanced(sizes, self.size)
        ]
        parts = [(batch.select_groups(part, group), 1.0) for part in bins[self.rank]]
        absent = max(map(len, bins)) - len(parts)
        if absent:
            parts += [(batch.select_groups([sizes.index(min(sizes))], group), 0.0)] * absent
        return parts

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over the ranks of each number, or of tensors of one shape."""
        if self.size == 1:
            return dict(values)
        total = torch.stack([value.double() for value in values.values()])
        dist.all_reduce(total)
        return dict(zip(values, total.unbind(), strict=True))

    def gather(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters on every rank."""
        return {name: whole(tensor) for name, tensor in weights.items()}

    @torch.no_grad()
    def scatter(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Copy whole parameters and buffers into the model, each rank its part."""
        mine = model.state_dict()
        for name, value in weights.items():
            mine[name].copy_(like(value.to(mine[name].device), mine[name]))

    def abandon(self) -> None:
        """Do not leave the process group at exit, after an error: that could wait for the others forever."""
        atexit.unregister(_leave)

    def from_first(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()  # torch aborts a process that ends with a group
