"""The processes that train one model together: collectives, and tensors sharded over ranks."""

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from palestra.data.store import balanced, micro_batches
from palestra.lm.batch import Batch
from palestra.lm.model import Block, Transformer
from palestra.lm.scorer import ValueHead
from palestra.lm.shards.boxes import boxes, load
from palestra.lm.shards.saver import SHARDS, OneSaver, Saver, Shards
from palestra.runs.loop import AT_ONCE, AtOnce

if TYPE_CHECKING:
    from palestra.lm.parallel.layout import Layout

Value = TypeVar("Value")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; a tensor that is not split is given back. All ranks call it together."""
    split: Any = tensor
    return split.full_tensor() if _is_split(tensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which may be the whole."""
    split: Any = tensor
    return split.to_local() if _is_split(tensor) else tensor


def like(full: Tensor, other: Tensor) -> Tensor:
    """`full`, which every rank has, split as `other` is; as it is where that is not split."""
    if not _is_split(other):
        return full
    from torch.distributed.tensor import distribute_tensor  # takes a second to import

    split: Any = other
    return distribute_tensor(full, split.device_mesh, split.placements, src_data_rank=None)


def gathered(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, under the names that they have where nothing is split. All ranks call it together."""
    from palestra.lm.parallel.names import joined

    return joined({name: whole(tensor) for name, tensor in named.items()})


@torch.no_grad()
def spread(full: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Copy what `gathered` gave into this rank's tensors; what is absent stays as it is."""
    for name, own in boxes(mine).items():
        if name in full:
            own.fill(full[name].reshape(own.whole))


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
    layout: "Layout | None" = None
    """Who holds what of a model, where there are several and they train one."""
    saver: Saver | OneSaver | AtOnce = AT_ONCE
    """Writes their checkpoints."""

    @classmethod
    def join(cls, device: torch.device, schedule: str = "1f1b", **sizes: int) -> "Ranks":
        """The processes that were started together (by `torchrun`, or as `devices` asks), or this one alone.

        `sizes` are those of the axes of a layout for training, `schedule` that of its pipeline.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(saver=OneSaver() if device.type == "cuda" else AT_ONCE)
        if not dist.is_initialized():
            cuda = device.type == "cuda"
            if cuda:
                torch.cuda.set_device(device)
            # Collectives of objects and numbers on the host never wait for the GPU.
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
            atexit.register(_leave)  # not before: torch cannot join the same processes a second time
        if not sizes:
            return cls(dist.get_rank(), size)
        from palestra.lm.parallel.layout import Layout  # takes a second to import

        layout = Layout.of(device.type, schedule, **sizes)
        group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        return cls(dist.get_rank(), size, layout, Saver(group))

    @property
    def first(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def shard(self, model: nn.Module) -> None:
        """Spread parameters, gradients and optimizer state over the ranks (FSDP2), a block at a time."""
        if self.size == 1:
            return
        assert self.layout is not None
        self.layout.split(model)
        if any(self.layout.size(axes) > 1 for axes in ("data", "parts", "tensor")):  # else nobody has the same layers
            self._shard(model, self.layout)
        self._materialize(model, self.layout)

    def _shard(self, model: nn.Module, layout: "Layout") -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        from palestra.lm.parallel.expert import Experts

        for module in reversed(list(model.modules())):  # blocks before the transformer, which takes what is left
            if isinstance(module, Experts | Block | ValueHead | Transformer):
                # The head reads the transformer's own parameters after its forward pass.
                whole = isinstance(module, Transformer)
                fully_shard(module, mesh=layout.mesh_of(module), reshard_after_forward=not whole)
                assert isinstance(module, FSDPModule)
                # Losses are divided by the global denominator already. A value head sees all tokens on every rank.
                same = layout.size("context") if isinstance(module, ValueHead) else 1
                module.set_gradient_divide_factor(float(same))
                module.set_force_sum_reduction_for_comms(True)  # Gloo can add and nothing else

    def _materialize(self, model: nn.Module, layout: "Layout") -> None:
        """Give a model that was split without memory its weights, each rank its part."""
        device = layout.meshes["data"].device_type
        for module in model.modules():
            if isinstance(module, Transformer) and module.source is not None:
                model._apply(lambda t: torch.zeros_like(t, device=device) if t.is_meta else t.to(device))
                module.source(module)
                module.source = None

    def micro_batches(self, batch: Batch, max_tokens: int, group: int) -> list[tuple[Batch, float]]:
        """This rank's micro-batches of the common batch, each with 1, or 0 where its results do not count.

        Every rank has as many, so that all meet in every layer.
        """
        sizes = batch.group_sizes(group)
        stages = 1 if self.layout is None else self.layout.stages
        if self.layout is not None and stages > 1:  # enough to keep them all at work
            max_tokens = min(max_tokens, sum(sizes) // (self.layout.size("batch") * stages))
        limit = max(max_tokens, max(sizes))
        bins = [
            [[share[i] for i in part] for part in micro_batches([sizes[g] for g in share], limit)]
            for share in balanced(sizes, 1 if self.layout is None else self.layout.size("batch"))
        ]
        mine = 0 if self.layout is None else self.layout.group("batch").rank()
        parts = [(batch.select_groups(part, group), 1.0) for part in bins[mine]]
        absent = -(-max(map(len, bins)) // stages) * stages - len(parts)
        if absent:
            parts += [(batch.select_groups([sizes.index(min(sizes))], group), 0.0)] * absent
        return parts

    def share_of(self, parts: Sequence[Value]) -> tuple[list[Value], int]:
        """This rank's part of what ranks with examples of their own divide, and how many the longest part has."""
        if self.layout is None:
            return list(parts), len(parts)
        ranks, stages = self.layout.size("batch"), self.layout.stages
        most = -(-len(parts) // ranks)
        return list(parts[self.layout.group("batch").rank() :: ranks]), -(-most // stages) * stages

    def sum(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over the ranks of each number, or of tensors of one shape."""
        if self.size == 1:
            return dict(values)
        total = torch.stack([value.double() for value in values.values()])
        assert self.layout is not None
        dist.all_reduce(total, group=self.layout.group("batch"))
        return dict(zip(values, total.unbind(), strict=True))

    def gather(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters on every rank."""
        mine = gathered(weights)
        if self.layout is None or self.layout.size("pipeline") == 1:
            return mine
        group = self.layout.group("pipeline")
        forms: list[dict[str, Any]] = [{} for _ in range(group.size())]
        dist.all_gather_object(forms, {name: (t.shape, t.dtype, t.device) for name, t in mine.items()}, group=group)
        owners = {name: stage for stage, names in enumerate(forms) for name in names}  # of what two have, the last
        for name, stage in owners.items():
            shape, dtype, device = forms[stage][name]
            own = stage == group.rank()
            tensor = mine[name].detach().contiguous() if own else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(tensor, group=group, group_src=stage)
            mine[name] = tensor
        return mine

    @property
    def partial(self) -> bool:
        """Whether other ranks have parameters that this one knows nothing of."""
        return self.layout is not None and self.layout.size("pipeline") > 1

    def keep(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        """What a checkpoint keeps of tensors: themselves, or copies on the host of what each of several ranks has."""
        if self.size == 1:
            return gathered(named)
        return Shards({name: mine.staged() for name, mine in boxes(named).items()})

    def restore(self, kept: Mapping[str, Tensor] | str, mine: Mapping[str, Tensor], checkpoint: Path | None) -> None:
        """Copy what `keep` gave into tensors, from a checkpoint of any layout: the tensors, or where they lie in it."""
        if not isinstance(kept, str):
            spread(kept, mine)
            return
        assert checkpoint is not None
        wanted = {f"{kept}/{name}": part for name, part in boxes(mine).items()}
        load(checkpoint / SHARDS, wanted, within=f"{kept}/", partial=self.partial)

    @torch.no_grad()
    def scatter(self, weights: Mapping[str, Tensor], model: nn.Module) -> None:
        """Copy whole parameters and buffers into the model, each rank its part."""
        spread(weights, model.state_dict())

    def abandon(self) -> None:
        """Do not leave the process group at exit, after an error: that could wait for the others forever."""
        atexit.unregister(_leave)

    def on_first(self, work: Callable[[], Value]) -> Value:
        """What `work` gives on the first rank, on every rank; or what it raises."""
        if self.size == 1:
            return work()
        value = error = None
        if self.first:
            try:
                value = work()
            except Exception as raised:
                error = raised
        value, error = self.from_first((value, error))
        if error is not None:
            raise error
        return value

    def from_first(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


ALONE = Ranks()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()  # torch aborts a process that ends with a group
