"""Tensors that are split over ranks (the DTensors of FSDP2): all of one, and one rank's share of a whole."""

from typing import Any

from torch import Tensor, nn


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
