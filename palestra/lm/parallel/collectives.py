"""Collectives with gradients. Tokens are the first dimension, of which every rank of a group has as many."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def gather(x: Tensor, group: Group) -> Tensor:
    """All ranks' tokens; each rank goes on differently with them, so their gradients are summed."""
    return x if group.size() == 1 else _Gather.apply(x, group)


def scatter(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, of which each gets its share of the tokens: the transpose of `gather`."""
    return x if group.size() == 1 else _Scatter.apply(x, group)


def collect(x: Tensor, group: Group) -> Tensor:
    """All ranks' tokens, with which every rank does the same: the gradient is that of its own."""
    return x if group.size() == 1 else _Collect.apply(x, group)


def total(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, with which every rank does the same: the gradient is what it is."""
    return x if group.size() == 1 else _Total.apply(x, group)


def copied(x: Tensor, group: Group) -> Tensor:
    """`x`, which all ranks have and use for different ends: its gradients are summed."""
    return x if group.size() == 1 else _Copied.apply(x, group)


def exchange(x: Tensor, group: Group, sends: Sequence[int] | None = None, takes: Sequence[int] | None = None) -> Tensor:
    """Row i of `x`, or the i-th of `sends` rows, goes to rank i; what came from the ranks, one after the other."""
    return x if group.size() == 1 else _Exchange.apply(x, group, sends, takes)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.rank, ctx.size = group.rank(), group.size()
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.size)[ctx.rank].contiguous(), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].clone()
        dist.all_reduce(out, group=ctx.group)
        return out, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sends: Sequence[int] | None, takes: Sequence[int] | None) -> Tensor:
        ctx.group, ctx.sends, ctx.takes = group, sends, takes
        return _exchanged(x, group, sends, takes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.group, ctx.takes, ctx.sends), None, None, None


def _gathered(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _scattered(x: Tensor, group: Group) -> Tensor:
    out = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def _exchanged(x: Tensor, group: Group, sends: Sequence[int] | None, takes: Sequence[int] | None) -> Tensor:
    out = x.new_empty(len(x) if takes is None else sum(takes), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), takes, sends, group=group)
    return out
