"""Which rank holds what of a model and of a batch."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from palestra.lm.model import Attend, Transformer
from palestra.lm.parallel.collectives import Group, collect, exchange, total
from palestra.lm.parallel.expert import Experts, split_experts
from palestra.lm.parallel.pipeline import Pipeline
from palestra.lm.parallel.tensor import split_tensor

AXES = ("pipeline", "data", "shard", "context", "expert", "tensor")
"""The dimensions of the mesh, neighbors last; what FSDP spreads comes before what splits a tensor otherwise."""
UNIONS = {
    "batch": ("data", "shard", "expert"),  # who has other examples
    "parts": ("shard", "context", "expert"),  # who has other parts of the weights
    "shares": ("shard", "context"),  # who has other parts of the experts that a place on `expert` has
}


@dataclass(frozen=True)
class Layout:
    """Ranks in a mesh. Those that differ in `context` and `tensor` alone work on one micro-batch together."""

    meshes: Mapping[str, DeviceMesh]
    """The ranks along each axis or union of axes, this one among them."""
    schedule: str
    """In which order stages of a pipeline work."""

    @classmethod
    def of(cls, device: str, schedule: str = "1f1b", **sizes: int) -> "Layout":
        """All ranks, so many along each axis; 1 where nothing is said."""
        # It warns where a tensor is gathered along two axes, one after the other.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        mesh = init_device_mesh(device, tuple(sizes.get(axis, 1) for axis in AXES), mesh_dim_names=AXES)
        unions = {name: mesh[axes]._flatten(name) for name, axes in UNIONS.items()}
        return cls({axis: mesh[axis] for axis in AXES} | unions, schedule)

    def split(self, model: nn.Module) -> None:
        """Give every rank its part of the model, but for what FSDP spreads: see `mesh_of`."""
        for module in model.modules():
            if isinstance(module, Transformer):
                module.layout = self if self.slices > 1 else None
                if self.size("pipeline") > 1:
                    module.pipeline = Pipeline(module, self.group("pipeline"), self.schedule)
                if self.size("tensor") > 1:
                    split_tensor(module, self.meshes["tensor"])
                if self.size("expert") > 1:
                    split_experts(module, self._together("expert", "tensor"))

    @property
    def stages(self) -> int:
        """Of a pipeline."""
        return self.size("pipeline") * (1 if self.schedule == "1f1b" else 2)

    def mesh_of(self, module: nn.Module) -> DeviceMesh:
        """The ranks that FSDP spreads a module over; where `data` has several, each of them has a copy."""
        return self._together("data", "shares" if isinstance(module, Experts) else "parts")

    def _together(self, first: str, second: str) -> DeviceMesh:
        """Both as one mesh of two dimensions, or the only one that has several ranks."""
        several = [self.meshes[name] for name in (first, second) if self.size(name) > 1]
        return DeviceMesh._concatenate(several) if len(several) > 1 else (several or [self.meshes[second]])[0]

    def group(self, axis: str) -> Group:
        """The ranks along an axis, this one among them."""
        return self.meshes[axis].get_group()

    def size(self, axis: str) -> int:
        """How many ranks there are along an axis."""
        return self.meshes[axis].size()

    @property
    def slices(self) -> int:
        """Into how many parts the tokens of a micro-batch are split between the parts of the model that mix them."""
        return self.size("context") * self.size("tensor")

    def own(self, tokens: Tensor) -> Tensor:
        """The tokens (T, …) of this rank's place in the context, filled up to a common number with zeros."""
        each = self._each(len(tokens))
        padded = F.pad(tokens, (0,) * (2 * tokens.ndim - 1) + (each * self.size("context") - len(tokens),))
        return padded.split(each)[self.group("context").rank()]

    def all_tokens(self, x: Tensor, count: int) -> Tensor:
        """The first `count` tokens of a micro-batch, from this rank's share; all ranks do the same with them."""
        return collect(collect(x, self.group("tensor")), self.group("context"))[:count]

    def places(self, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Which of `index`, places among `count` tokens, are this rank's, and where these lie in its own."""
        each = self._each(count)
        first = each * self.group("context").rank()
        mine = ((index >= first) & (index < first + each)).nonzero()[:, 0]
        return mine, index[mine] - first

    def joined(self, values: Tensor) -> Tensor:
        """Values that one rank of the context has and that are 0 on the others."""
        return total(values, self.group("context"))

    def attend(self, attend: Attend, count: int) -> Attend:
        """Attention of `count` tokens that are spread over the context (Ulysses, Jacobs et al. 2023)."""
        return attend if self.size("context") == 1 and self._each(count) == count else _Ulysses(attend, self, count)

    def _each(self, count: int) -> int:
        """Tokens of each place in the context, which the tensor ranks there share evenly."""
        return -(-count // self.slices) * self.size("tensor")


@dataclass(frozen=True)
class _Ulysses:
    """Every rank attends from all tokens with some of the heads."""

    inner: Attend
    layout: Layout
    count: int

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q (T / c, H, dim), k and v (T / c, K, dim) → (T / c, H, dim)."""
        group = self.layout.group("context")
        ranks, each = group.size(), len(q)
        if k.shape[1] % ranks:  # fewer key heads than ranks: each rank gets a copy of those that its queries read
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        parts = [t.unflatten(1, (ranks, -1)).transpose(0, 1) for t in (q, k, v)]  # (c, T / c, heads / c, dim)
        heads = [part.shape[2] for part in parts]
        swapped = exchange(torch.cat(parts, dim=2), group).flatten(0, 1)[: self.count]  # (T, heads / c, dim)
        q, k, v = swapped.split(heads, dim=1)
        own = None if sinks is None else sinks.unflatten(0, (ranks, -1))[group.rank()]
        out = self.inner(layer, q, k, v, window, own)
        filled = F.pad(out, (0, 0, 0, 0, 0, each * ranks - self.count)).unflatten(0, (ranks, -1))
        return exchange(filled, group).transpose(0, 1).flatten(1, 2)
