"""Storage of replay memories: files of rows beside checkpoints, sparse rows, and the sum tree of priorities.

Files, because a checkpoint of a memory of many gigabytes would otherwise write all of it again each time.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.errors import PalestraError
from palestra.runs.store import sync_folder
from palestra.runs.tree import flatten, read_safetensors, safetensors_chunks, unflatten

LIMIT = 2**30
"""Bytes of rows that are stored in the checkpoint itself."""


class DamagedShard(PalestraError):
    """A file of rows that a checkpoint needs is missing or damaged."""


def write_shard(folder: Path, number: int, rows: dict[str, Any]) -> dict[str, Any]:
    """Write one file under a temporary name and rename it; returns its entry in the checkpoint."""
    folder.mkdir(exist_ok=True)
    tree, leaves = flatten(rows)
    path = _path(folder, number)
    temporary = path.with_name(f".{path.name}.tmp")
    size = crc = 0
    with temporary.open("wb") as file:
        for chunk in safetensors_chunks(leaves):
            file.write(chunk)
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(folder)
    return {"number": number, "size": size, "crc32": crc, "tree": json.dumps(tree)}


def read_shard(folder: Path, shard: dict[str, Any]) -> dict[str, Any]:
    """The rows of a file, verified."""
    path = _path(folder, shard["number"])
    if not path.exists():
        raise DamagedShard(f"{path} is missing: it holds a part of the checkpoint's replay memory")
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    if path.stat().st_size != shard["size"] or crc != shard["crc32"]:
        raise DamagedShard(f"{path} is damaged (size or checksum): the checkpoint's replay memory cannot be restored")
    return unflatten(json.loads(shard["tree"]), read_safetensors(path))


def drop_shards(folder: Path, before: int) -> None:
    """Remove the files of lower numbers."""
    for path in folder.glob("rows_*.safetensors"):
        if int(path.stem.removeprefix("rows_")) < before:
            path.unlink()


def _path(folder: Path, number: int) -> Path:
    return folder / f"rows_{number:09d}.safetensors"


class Sparse:
    """A growing array of slots. Slot numbers start at 1: 0 in a column means none."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.data = torch.zeros((64, *shape), dtype=dtype, device=device)
        self.used = 0  # slots ever assigned
        self.free = np.zeros(0, np.int32)

    def put(self, rows: Tensor) -> np.ndarray:
        """Store rows; the numbers of their slots."""
        again = min(len(rows), len(self.free))
        fresh = len(rows) - again
        if self.used + fresh > len(self.data):
            more = max(len(self.data), fresh)
            self.data = torch.cat([self.data, self.data.new_zeros(more, *self.data.shape[1:])])
        slots = np.concatenate(
            [self.free[len(self.free) - again :], np.arange(self.used + 1, self.used + fresh + 1, dtype=np.int32)]
        )
        self.free = self.free[: len(self.free) - again]
        self.used += fresh
        self.data[torch.from_numpy(slots - 1).long().to(self.data.device)] = rows.to(self.data)
        return slots

    def get(self, slots: Tensor) -> Tensor:
        """The rows in slots."""
        return self.data[slots.long() - 1]

    def drop(self, slots: np.ndarray) -> None:
        """Free slots."""
        self.free = np.concatenate([self.free, slots])


WIDTH = 32  # children per node: a level costs a few NumPy calls whatever its width, so few levels are best


class SumTree:
    """Weights of `size` items, 0 at first. A node is recomputed from its children, so that rounding does not drift."""

    def __init__(self, size: int):
        self.size = size
        self.levels: list[np.ndarray] = []  # from the items to the root, each (nodes of the next level, WIDTH)
        while not self.levels or len(self.levels[-1]) > 1:
            size = -(-size // WIDTH)
            self.levels.append(np.zeros((size, WIDTH)))

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.levels[-1].sum())

    def weights(self, items: np.ndarray) -> np.ndarray:
        """The weights of some items."""
        return self.levels[0].reshape(-1)[items]

    def set(self, items: np.ndarray, weights: np.ndarray | float) -> None:
        """Set the weights of items; for a repeated item the last one counts."""
        self.levels[0].reshape(-1)[items] = weights
        for below, level in zip(self.levels[:-1], self.levels[1:], strict=True):
            items = items // WIDTH
            if len(items) > WIDTH:
                items = np.unique(items)
            level.reshape(-1)[items] = below[items].sum(axis=1)

    def find(self, at: np.ndarray) -> np.ndarray:
        """The items at which the running sum of weights passes `at`, each in [0, total); never one of weight 0."""
        node = np.zeros(len(at), np.int64)
        rows = np.arange(len(at))
        left = at
        for level in reversed(self.levels):
            children = level[node]  # (B, WIDTH)
            sums = children.cumsum(axis=1)
            # Rounding may leave a little more than the children's sum: then it is the last child above 0.
            last = WIDTH - 1 - (children[:, ::-1] > 0).argmax(axis=1)
            child = np.minimum((sums <= left[:, None]).sum(axis=1), last)
            left = left - (sums[rows, child] - children[rows, child])
            node = node * WIDTH + child
        return node

    def state(self) -> list[np.ndarray]:
        return [level.copy() for level in self.levels]

    def load_state(self, state: list[Any]) -> None:
        """Continue from `state()`."""
        self.levels = [level.copy() for level in state]
