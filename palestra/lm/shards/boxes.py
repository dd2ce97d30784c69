"""What a rank has of a model as boxes of the tensors of one process: any layout saves them, and any other loads them.

torch.distributed.checkpoint (DCP) plans who writes and who reads what; files are safetensors, nothing is pickled.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.errors import PalestraError
from palestra.lm.parallel.names import stack_name

Index = tuple[int | slice, ...]
FILE_BYTES = 2**30
"""A rank's file is serialized in memory: this much of it at a time."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor, and where it begins in the whole."""

    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it lies in the whole."""
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.tensor.shape, strict=True))

    def cut(self, index: Index) -> "Box | None":
        """What it has of `whole[index]`."""
        local: list[int | slice] = []
        offset = []
        for dim, (at, size) in enumerate(zip(self.offset, self.tensor.shape, strict=True)):
            wanted = index[dim] if dim < len(index) else slice(0, at + size)
            first, last = (wanted, wanted + 1) if isinstance(wanted, int) else (wanted.start, wanted.stop)
            start, stop = max(first, at), min(last, at + size)
            if start >= stop:
                return None
            local.append(start - at if isinstance(wanted, int) else slice(start - at, stop - at))
            offset += [] if isinstance(wanted, int) else [start - first]
        return Box(tuple(offset), self.tensor[tuple(local)])


@dataclass(frozen=True)
class Boxes:
    """All that a rank has of a tensor, as DCP asks for it."""

    whole: torch.Size
    boxes: tuple[Box, ...]

    def staged(self) -> "Boxes":
        """A copy in the host's memory."""
        return Boxes(self.whole, tuple(Box(box.offset, box.tensor.to("cpu", copy=True)) for box in self.boxes))

    def fill(self, source: Any) -> None:
        """Copy from the whole, a tensor or a slice of a safetensors file, of which only these parts are read."""
        for box in self.boxes:
            box.tensor.copy_(source[box.place])

    def cut(self, index: Index) -> "Boxes":
        """The boxes of `whole[index]`."""
        lengths = [i.stop - i.start for i in index if isinstance(i, slice)]
        cut = [box.cut(index) for box in self.boxes]
        return Boxes(torch.Size((*lengths, *self.whole[len(index) :])), tuple(box for box in cut if box is not None))

    def transposed(self) -> "Boxes":
        """The same of a tensor whose last two dimensions are swapped."""
        turned = (Box((*box.offset[:-2], *box.offset[:-3:-1]), box.tensor.mT) for box in self.boxes)
        return Boxes(torch.Size((*self.whole[:-2], *self.whole[:-3:-1])), tuple(turned))

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        chunks = {chunk.offsets: chunk for chunk in self.__create_chunk_list__()}  # parts of a stack count steps alike
        form = TensorProperties(dtype=self.boxes[0].tensor.dtype) if self.boxes else TensorProperties()
        return [
            WriteItem(
                MetadataIndex(name, at), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, form, self.whole)
            )
            for at, chunk in chunks.items()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offset), box.tensor.shape) for box in self.boxes]


def boxes(named: Mapping[str, Tensor]) -> dict[str, Boxes]:
    """A rank's tensors under the names that they have where nothing is split; scalars have a dimension."""
    rows: Counter[str] = Counter()
    stacks: dict[str, list[Box]] = {}
    shapes: dict[str, torch.Size] = {}
    for name, tensor in named.items():
        stack = stack_name(name)
        box = _box(tensor, rows[stack])
        stacks.setdefault(stack, []).extend([box] if box.tensor.numel() else [])
        rows[stack] += len(tensor) if tensor.ndim else 0
        shapes[stack] = torch.Size((rows[stack], *tensor.shape[1:]) if tensor.ndim else (1,))
    return {stack: Boxes(shapes[stack], tuple(found)) for stack, found in stacks.items()}


def _box(tensor: Tensor, rows: int) -> Box:
    """Where a tensor lies in a stack, `rows` after its begin."""
    split: Any = tensor.detach()
    if not tensor.ndim:
        return Box((0,), split.view(1))
    if not hasattr(split, "device_mesh"):
        return Box((rows, *[0] * (tensor.ndim - 1)), split)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, (first, *others) = compute_local_shape_and_global_offset(split.shape, split.device_mesh, split.placements)
    return Box((rows + first, *others), split.to_local())


def save(folder: Path, named: Mapping[str, Boxes], group: Any) -> None:
    """Write the boxes of all ranks of a group, each its own; of equal ones, one writes."""
    from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, HuggingFaceStorageWriter
    from torch.distributed.checkpoint import save as save_together

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Tensor:
            same = (box.tensor for box in named[index.fqn].boxes if box.offset == tuple(index.offset))
            return next(same).contiguous()

    class Writer(HuggingFaceStorageWriter):
        def _split_by_storage_plan(self, storage_plan: Any, items: list[Any]) -> dict[int, list[Any]]:
            return _files(items)

    writer = Writer(str(folder), save_distributed=True)
    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        save_together(dict(named), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:  # of all ranks that failed
        raise next(iter(error.failures.values()))[0] from error


def _files(items: Iterable[Any]) -> dict[int, list[Any]]:
    """What a rank writes, by file: one has room for one box of each tensor, and for so many bytes."""
    files: dict[tuple[int, int], list[Any]] = {}
    boxes_of: Counter[str] = Counter()
    written = 0
    for item in items:
        files.setdefault((boxes_of[item.index.fqn], written // FILE_BYTES), []).append(item)
        boxes_of[item.index.fqn] += 1
        written += item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
    return dict(enumerate(files.values(), 1))


def stored(folder: Path) -> dict[str, Tensor]:
    """The forms of what `save` wrote: tensors without memory."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    saved: Mapping[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.empty(form.size, dtype=form.properties.dtype, device="meta") for name, form in saved.items()}


def load(folder: Path, wanted: Mapping[str, Boxes], *, within: str = "", partial: bool = False) -> None:
    """Fill boxes from those that `save` wrote, whatever they were; each rank for itself.

    All tensors whose names begin with `within` are wanted, unless it is a `partial` model's that asks.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    class Planner(DefaultLoadPlanner):
        def lookup_tensor(self, index: Any) -> Tensor:
            return wanted[index.fqn].boxes[index.index].tensor

    reader = HuggingFaceStorageReader(str(folder))
    metadata = reader.read_metadata()
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    sizes = {name: tuple(saved[name].size) for name in saved if name.startswith(within)}
    mine = {name: tuple(boxes.whole) for name, boxes in wanted.items()}
    names = sorted(mine if partial else sizes.keys() | mine.keys())
    for name in names:
        if sizes.get(name) != mine.get(name):
            raise PalestraError(
                f"{folder} does not fit: {name} is {sizes.get(name, 'absent')} there and {mine.get(name, 'absent')} "
                "here. Resume with the model, the adapters and the optimizer that the run began with, or start anew."
            )
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(create_default_local_load_plan(dict(wanted), metadata), Planner()).wait()
