"""Metrics between two log rows: every mean keeps its sum and its denominator, so parts add up to the whole.

A mean over micro-batches of different sizes, or over ranks, is the mean over the union of their elements, never a mean
of means. Torch tensors are reduced where they are and read once, at export: recording does not wait for the device.
One thread owns a `Stats`; other threads and ranks keep their own, and `Stats.merge` adds their states up.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

State = dict[str, tuple[str, float, float]]
"""What ranks exchange: key -> (reduction, value, denominator), plain numbers."""

# How two values of one key become one. Seconds add up within a process; over ranks the slowest counts, because it is
# the one the others waited for.
WITHIN = {"mean": "sum", "sum": "sum", "time": "sum", "min": "min", "max": "max", "last": "last"}
ACROSS = {**WITHIN, "time": "max"}


@dataclass(slots=True)
class Entry:
    """One key since the last export: a value and its denominator, each a float or a 0-d float64 torch tensor."""

    reduction: str
    value: Any
    count: Any


class Stats:
    """Collects metrics under scoped keys and exports them as one flat row of floats."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._prefix = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix every key recorded inside with `name/`; scopes nest."""
        outer = self._prefix
        self._prefix = f"{outer}{name}/"
        try:
            yield
        finally:
            self._prefix = outer

    def mean(self, key: str, values: Any, mask: Any = None, weight: Any = None) -> None:
        """Record elements to average: Σ weight·value / Σ weight over those that `mask` keeps.

        `values`, `mask` and `weight` broadcast. A mean already taken is recorded with its denominator as `weight`.
        What the mask leaves out may be NaN; a key with denominator 0 is absent from the export.
        """
        if mask is None and weight is None and isinstance(values, (float, int)):
            self._add(key, "mean", float(values), 1.0)
            return
        self._add(key, "mean", *_weighted_sum(values, mask, weight))

    def sum(self, key: str, values: Any, mask: Any = None) -> None:
        """Record elements to add up."""
        if mask is None and isinstance(values, (float, int)):
            self._add(key, "sum", float(values), 1.0)
            return
        self._add(key, "sum", *_weighted_sum(values, mask, None))

    def min(self, key: str, values: Any, mask: Any = None) -> None:
        """Record elements of which the smallest is exported (NaN if there is one)."""
        self._add(key, "min", *_extreme("min", values, mask))

    def max(self, key: str, values: Any, mask: Any = None) -> None:
        """Record elements of which the largest is exported (NaN if there is one)."""
        self._add(key, "max", *_extreme("max", values, mask))

    def last(self, key: str, value: Any) -> None:
        """Record one number; the latest one is exported (over ranks, that of the last rank)."""
        # clone: an optimizer may change the tensor in place before the export reads it
        self._add(key, "last", value.detach().double().clone() if _is_tensor(value) else float(value), 1.0)

    @contextmanager
    def timer(self, key: str) -> Iterator[None]:
        """Add the seconds spent inside to `time/<scope>/<key>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(key, "time", time.perf_counter() - start, 1.0)

    def export(self) -> dict[str, float]:
        """Return everything recorded since the last export, one float a key, and forget it."""
        row = {
            key: value / count if reduction == "mean" else value
            for key, (reduction, value, count) in self.state().items()
            if count != 0
        }
        self.reset()
        return row

    def reset(self) -> None:
        """Forget everything recorded since the last export."""
        self._entries = {}

    def state(self) -> State:
        """Return sums and denominators as plain numbers, for other ranks or a checkpoint; nothing is forgotten."""
        numbers = _read([part for entry in self._entries.values() for part in (entry.value, entry.count)])
        return {
            key: (entry.reduction, numbers[2 * i], numbers[2 * i + 1])
            for i, (key, entry) in enumerate(self._entries.items())
        }

    @classmethod
    def merge(cls, states: Iterable[State]) -> Self:
        """Add up the states of several ranks: the export is that of one process that saw all their elements."""
        merged = cls()
        for state in states:
            for key, (reduction, value, count) in state.items():
                merged._accumulate(key, reduction, value, count, ACROSS)
        return merged

    def _add(self, key: str, reduction: str, value: Any, count: Any) -> None:
        full = self._prefix + key
        self._accumulate(f"time/{full}" if reduction == "time" else full, reduction, value, count, WITHIN)

    def _accumulate(self, key: str, reduction: str, value: Any, count: Any, how: dict[str, str]) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = Entry(reduction, value, count)
            return
        if entry.reduction != reduction:
            raise ValueError(
                f"metric {key!r} is recorded as {reduction} but was {entry.reduction} before: use two keys"
            )
        entry.value = _combine(how[reduction], entry.value, value)
        entry.count = entry.count + count


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "detach")  # torch is never imported here unless a tensor came in


def _weighted_sum(values: Any, mask: Any, weight: Any) -> tuple[Any, Any]:
    """(Σ w·x, Σ w) in float64 over the broadcast shape, without the elements that the mask leaves out."""
    if mask is None and weight is None:
        if _is_tensor(values):
            return values.detach().double().sum(), float(values.numel())
        x = np.asarray(values, dtype=np.float64)
        return float(x.sum()), float(x.size)
    tensor = next((x for x in (values, mask, weight) if _is_tensor(x)), None)
    if tensor is None:
        x = np.asarray(values, dtype=np.float64)
        w = np.asarray(1.0 if weight is None else weight, dtype=np.float64)
        keep = np.asarray(True if mask is None else mask, dtype=bool)
        x, w, keep = np.broadcast_arrays(x, w, keep)
        return float((x * w).sum(where=keep)), float(w.sum(where=keep))
    import torch

    x = _tensor(values, tensor.device)
    w = _tensor(1.0 if weight is None else weight, tensor.device)
    if mask is None:
        x, w = torch.broadcast_tensors(x, w)
        return (x * w).sum(), w.sum()
    x, w, drop = torch.broadcast_tensors(x, w, ~_tensor(mask, tensor.device).bool())
    return (x * w).masked_fill(drop, 0.0).sum(), w.masked_fill(drop, 0.0).sum()


def _extreme(how: str, values: Any, mask: Any) -> tuple[Any, Any]:
    """(smallest or largest kept element, number of kept elements); of none, the value that loses to any other."""
    worst = math.inf if how == "min" else -math.inf
    tensor = next((x for x in (values, mask) if _is_tensor(x)), None)
    if tensor is None:
        x, keep = np.broadcast_arrays(np.asarray(values, dtype=np.float64), True if mask is None else mask)
        return float(getattr(x, how)(initial=worst, where=keep.astype(bool))), float(np.count_nonzero(keep))
    x = _tensor(values, tensor.device)
    if x.numel() == 0:
        return worst, 0.0
    if mask is None:
        return getattr(x, how)(), float(x.numel())
    import torch

    x, drop = torch.broadcast_tensors(x, ~_tensor(mask, tensor.device).bool())
    return getattr(x.masked_fill(drop, worst), how)(), (~drop).sum()


def _tensor(x: Any, device: Any) -> Any:
    """A float64 tensor on the device, in a way that does not wait for it (a copy of a Python number would)."""
    import torch

    if isinstance(x, (float, int)):
        return torch.full((), float(x), dtype=torch.float64, device=device)
    return torch.as_tensor(x, device=device).detach().double()


def _combine(how: str, a: Any, b: Any) -> Any:
    if how == "sum":
        return a + b
    if how == "last":
        return b
    if _is_tensor(a) or _is_tensor(b):
        import torch

        device = (a if _is_tensor(a) else b).device
        a, b = _tensor(a, device), _tensor(b, device)
        return torch.minimum(a, b) if how == "min" else torch.maximum(a, b)
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return min(a, b) if how == "min" else max(a, b)


def _read(parts: list[Any]) -> list[float]:
    """Read numbers and 0-d tensors as floats: one copy from each device, however many tensors there are."""
    tensors = [x for x in parts if _is_tensor(x)]
    if not tensors:
        return parts
    import torch

    read: dict[int, float] = {}
    for device in {x.device for x in tensors}:
        here = [x for x in tensors if x.device == device]
        read.update(zip(map(id, here), torch.stack([x.double() for x in here]).tolist(), strict=True))
    return [read[id(x)] if _is_tensor(x) else x for x in parts]
