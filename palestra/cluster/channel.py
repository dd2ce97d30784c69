"""How weights travel: a channel keeps the newest versions, whole and checksummed, for whoever fetches them."""

import itertools
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from palestra.errors import PalestraError, UsageError

ALIGNMENT = 64  # bytes: every dtype can be viewed there, and copies are of whole cache lines
CHUNK = 32 << 20  # bytes with a checksum of their own, and of one collective
COPIERS = 2  # threads: one copies while another computes a checksum
ROW = 8 << 10


class ChannelError(PalestraError):
    """A version that is not there, not whole, or not what was published; another fetch may succeed."""


class Entry(NamedTuple):
    """A tensor, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Source(Protocol):
    """Named tensors in an order that `metadata` knows beforehand."""

    def metadata(self) -> Sequence[Entry]: ...
    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class MappingSource:
    """A mapping, such as a state dict, as a source."""

    def __init__(self, weights: Mapping[str, Tensor]):
        self._weights = weights

    def metadata(self) -> Sequence[Entry]:
        return [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._weights.items())


Weights = Source | Mapping[str, Tensor]


class WeightChannel(Protocol):
    """One writer's versions, for any number of readers that come and go.

    A fetched tensor is of its version for as long as it is used. An error can come with any of them: apply a version
    when the iterator has ended.
    """

    @property
    def address(self) -> str:
        """What `open_channel` takes in another process."""
        ...

    def publish(self, version: int, source: Weights) -> None: ...
    def newest(self) -> int:
        """The newest whole version; -1 before the first."""
        ...

    def fetch(self, version: int) -> Iterator[tuple[str, Tensor]]: ...
    def close(self) -> None: ...


def open_channel(address: str) -> WeightChannel:
    """The reader's end of a writer's `address`."""
    kind, _, rest = address.partition(":")
    from palestra.cluster.broadcast import BroadcastReader
    from palestra.cluster.files import Files
    from palestra.cluster.memory import CudaMemory, SharedMemory

    readers = {"shm": SharedMemory, "cuda": CudaMemory, "files": Files, "broadcast": BroadcastReader}
    if not rest or kind not in readers:
        raise UsageError(
            f"{address!r} is not the address of a weight channel: expected shm:FOLDER, cuda:FOLDER, files:FOLDER, "
            "files:s3://BUCKET/PATH or broadcast:HOST:PORT"
        )
    return readers[kind](rest)


def fetch_newest(channel: WeightChannel) -> tuple[int, dict[str, Tensor]]:
    """The newest version, whole; one that is replaced while it is fetched is followed by its successor."""
    while True:
        if (version := channel.newest()) < 0:
            raise ChannelError(f"{channel.address} has no version yet: publish one first")
        try:
            return version, dict(channel.fetch(version))
        except ChannelError:
            if channel.newest() == version:
                raise


def as_source(weights: Weights) -> Source:
    """Weights as a source, whichever of the two they are."""
    return MappingSource(weights) if isinstance(weights, Mapping) else weights


def check_newer(version: int, newest: int) -> None:
    """Refuse a version that is not newer than the newest."""
    if version <= newest:
        raise UsageError(f"version {version} is not newer than {newest}, the newest one: versions only grow")


@dataclass(frozen=True)
class Layout:
    """Where tensors are in one flat buffer of bytes."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, source: Source) -> Self:
        layout = cls(tuple(Entry(*entry) for entry in source.metadata()))
        if len({entry.name for entry in layout.entries}) < len(layout.entries):
            raise UsageError("weights whose metadata has a name twice: give each tensor a name of its own")
        return layout

    @classmethod
    def load(cls, rows: list[list[Any]]) -> Self:
        return cls(tuple(Entry(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in rows))

    def dump(self) -> list[list[Any]]:
        """Rows for JSON."""
        return [[name, list(shape), str(dtype).removeprefix("torch.")] for name, shape, dtype in self.entries]

    @cached_property
    def offsets(self) -> list[int]:
        """The byte at which each tensor begins, and at the end their total."""
        sizes = (-(-entry.nbytes // ALIGNMENT) * ALIGNMENT for entry in self.entries)
        return list(itertools.accumulate(sizes, initial=0))

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """Begin and end of what has a checksum of its own: `CHUNK` bytes each, but for the last."""
        total = self.offsets[-1]
        return [(start, min(start + CHUNK, total)) for start in range(0, total, CHUNK)]

    def matched(self, source: Source) -> Iterator[tuple[Entry, Tensor]]:
        """The tensors of a source; one that is not as its metadata says is refused by name."""
        tensors = iter(source)
        for entry in self.entries:
            name, tensor = next(tensors, (None, None))
            if tensor is None or (name, tuple(tensor.shape), tensor.dtype) != entry:
                found = "nothing" if tensor is None else f"{name} {tuple(tensor.shape)} {tensor.dtype}"
                raise UsageError(
                    f"the source of weights announced {entry.name} {entry.shape} {entry.dtype} and gave {found}: "
                    "metadata() and iteration must agree"
                )
            yield entry, tensor.detach()
        if (more := next(tensors, None)) is not None:
            raise UsageError(f"the source of weights gave {more[0]}, which its metadata() does not have")

    def verify(self, sums: Sequence[int], expected: Sequence[int], what: str) -> None:
        """Refuse chunks whose checksums differ, by the tensors in the first of them."""
        for (start, stop), computed, known in zip(self.chunks, sums, expected, strict=True):
            if computed != known:
                spans = zip(self.entries, itertools.pairwise(self.offsets), strict=True)
                names = [entry.name for entry, (begin, end) in spans if begin < stop and end > start]
                raise damaged(what, names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}")


@dataclass(frozen=True)
class Buffer:
    """Bytes in which tensors are laid out."""

    layout: Layout
    flat: Tensor

    @cached_property
    def views(self) -> list[tuple[str, Tensor]]:
        """The tensors in it, by name."""
        places = zip(self.layout.entries, self.layout.offsets, strict=False)
        parts = ((entry, self.flat[offset : offset + entry.nbytes]) for entry, offset in places)
        return [(entry.name, part.view(entry.dtype).view(entry.shape)) for entry, part in parts]

    @cached_property
    def places(self) -> list[Tensor]:
        """The bytes of the tensors in it."""
        return [view.view(-1).view(torch.uint8) for _, view in self.views]

    @cached_property
    def chunks(self) -> list[Tensor]:
        """The bytes of its chunks."""
        return [self.flat[start:stop] for start, stop in self.layout.chunks]

    def pack(self, source: Source, pool: ThreadPoolExecutor) -> Iterator[Future[int]]:
        """Copy the tensors of a source into it; for each chunk its checksum, once the pool has copied it."""
        todo, parts = deque(zip(self.layout.chunks, self.chunks, strict=True)), list[_Part]()
        spans = itertools.pairwise(self.layout.offsets)
        for (_, tensor), place, (begin, end) in zip(self.layout.matched(source), self.places, spans, strict=True):
            if len(place):
                parts.append((begin, len(place), place, _bytes(tensor)))
            while todo and todo[0][0][1] <= end:
                (start, stop), chunk = todo.popleft()
                if any(part[3].is_cuda for part in parts):
                    torch.cuda.current_stream().synchronize()  # the pool's threads have another stream
                yield pool.submit(_fill, chunk, start, parts)
                parts = [part for part in parts if part[0] + part[1] > stop]


def _bytes(tensor: Tensor) -> Tensor:
    """A tensor's own bytes, or those of a copy where they do not lie as its values are read."""
    plain = tensor.resolve_conj().resolve_neg() if tensor.is_complex() else tensor
    return plain.contiguous().view(-1).view(torch.uint8)


_Part = tuple[int, int, Tensor, Tensor]
"""The byte at which a tensor begins, how many it has, its place in the buffer, and the tensor, both as bytes."""


def _fill(chunk: Tensor, start: int, parts: list[_Part]) -> int:
    """Copy what a chunk has of some tensors; its checksum."""
    targets, sources, stop = [], [], start + chunk.numel()
    for begin, size, target, source in parts:
        if begin < start or begin + size > stop:
            cut = slice(max(0, start - begin), min(size, stop - begin))
            target, source = target[cut], source[cut]
        targets.append(target)
        sources.append(source)
    torch._foreach_copy_(targets, sources)
    return checksum(chunk)


def damaged(what: str, names: str) -> ChannelError:
    """The error for bytes that are not those that were published."""
    return ChannelError(f"{what} is damaged in {names}: its checksum differs. Fetch again, or publish a newer version")


def checksum(data: Tensor) -> int:
    """A checksum of contiguous bytes at the speed of memory: CRC-32 of the sums of 8-byte words in each 8 KiB.

    A changed word, a page of another version and moved pages show. CRC-32 of all bytes is seven times slower than
    copying them (docs/log.md).
    """
    rows = data.numel() // ROW * ROW
    crc = zlib.crc32(data[:rows].view(torch.int64).view(-1, ROW // 8).sum(1).cpu().numpy().data) if rows else 0
    return zlib.crc32(data[rows:].cpu().numpy().data, crc)
