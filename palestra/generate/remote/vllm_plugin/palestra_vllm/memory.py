"""Reads a version that `palestra.cluster.memory.SharedMemory` has published, without Palestra."""

import fcntl
import itertools
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator

import torch

HEAD = struct.Struct("<qqq")  # version, where the JSON begins, its bytes
ALIGNMENT = 64  # of each tensor, in bytes


def tensors(folder: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version, by name; they are the published memory itself, so copy them before the next."""
    file = os.open(os.path.join(folder, str(version)), os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)  # held until no tensor is in use: the mapping has the file open
        written, start, length = HEAD.unpack(os.pread(file, HEAD.size, 0))
        if written != version:
            raise RuntimeError(f"{folder} has version {written} in place of {version}")
        layout = json.loads(os.pread(file, length, start))["layout"]
        entries = [(name, shape, getattr(torch, dtype)) for name, shape, dtype in layout]
        sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in entries]
        offsets = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        memory = mmap.mmap(file, start, flags=mmap.MAP_PRIVATE)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    finally:
        os.close(file)
    for (name, shape, dtype), size, offset in zip(entries, sizes, offsets, strict=False):
        begin = mmap.ALLOCATIONGRANULARITY + offset
        yield name, flat[begin : begin + size].view(dtype).view(shape)
