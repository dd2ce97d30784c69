"""Weights in the memory of one host, mapped by writer and readers, or in that of one GPU, shared by CUDA IPC.

A version is a file that the writer fills under a hidden name and then gives its number as a name. Who reads it holds a
shared lock on the file, who overwrites it an exclusive one: the kernel drops the locks of a process that dies.
"""

import fcntl
import json
import mmap
import os
import shutil
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from palestra.cluster.channel import COPIERS, Buffer, ChannelError, Layout, Weights, as_source, check_newer, checksum
from palestra.errors import PalestraError, UsageError

ROOT = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
PREFIX = "palestra-weights-"
HEAD = struct.Struct("<qqq")  # version (-1 while it is written), where the JSON begins, its bytes
START = mmap.ALLOCATIONGRANULARITY  # where the tensors begin


class SharedMemory:
    """A channel between the processes of one host. A writer has a folder of its own, a reader opens a writer's."""

    scheme = "shm"

    def __init__(self, folder: str | None = None):
        self._guard = None
        if folder is None:
            folder, self._guard = _claim()
            weakref.finalize(self, _remove, folder, os.getpid())
        self._folder = Path(folder)
        self._slots: list[_Slot] = []
        self._publishing = threading.Lock()
        self._copiers = ThreadPoolExecutor(COPIERS, "copy weights")  # kept: torch takes milliseconds in a new thread

    @property
    def address(self) -> str:
        return f"{self.scheme}:{self._folder}"

    def publish(self, version: int, source: Weights) -> None:
        if self._guard is None:
            raise UsageError(f"{self.address} is open for reading here: publish where it was made")
        source = as_source(source)
        with self._publishing:
            check_newer(version, self.newest())
            layout = Layout.of(source)
            slot = self._free_slot(layout.offsets[-1])
            if slot.buffer.layout != layout:
                slot.buffer = Buffer(layout, slot.buffer.flat)
            try:
                sums = list(slot.buffer.pack(source, self._copiers))
                header = {"layout": layout.dump(), "sums": [each.result() for each in sums], "handle": slot.handle}
                data, start = json.dumps(header).encode(), START + (0 if slot.handle else slot.buffer.flat.numel())
                with _room(self._folder, len(data)):
                    os.pwrite(slot.file, data, start)
                os.pwrite(slot.file, HEAD.pack(version, start, len(data)), 0)
                slot.path, slot.version = slot.path.rename(self._folder / str(version)), version
            finally:
                fcntl.flock(slot.file, fcntl.LOCK_UN)

    def newest(self) -> int:
        try:
            return max((int(name) for name in os.listdir(self._folder) if name.isdigit()), default=-1)
        except FileNotFoundError as error:
            raise ChannelError(f"{self.address} is gone: its writer ended. Open the address of the next one") from error

    def fetch(self, version: int) -> Iterator[tuple[str, Tensor]]:
        try:
            file = os.open(self._folder / str(version), os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                written, start, length = HEAD.unpack(os.pread(file, HEAD.size, 0))
                if written != version:  # overwritten since it was opened
                    raise BlockingIOError
                header = json.loads(os.pread(file, length, start))
                layout = Layout.load(header["layout"])
                buffer = Buffer(layout, self._attach(file, layout.offsets[-1], header["handle"]))
            finally:
                os.close(file)
        except (FileNotFoundError, BlockingIOError) as error:
            newest = self.newest()
            raise ChannelError(f"version {version} is not in {self.address}: fetch the newest, {newest}") from error
        sums = [checksum(chunk) for chunk in buffer.chunks]
        layout.verify(sums, header["sums"], f"version {version} in {self.address}")
        yield from buffer.views

    def close(self) -> None:
        """Remove a writer's versions; tensors that were fetched stay as they are."""
        if self._guard is not None:
            self._slots = []
            _remove(str(self._folder), os.getpid())
            os.close(self._guard)
            self._guard = None

    def _free_slot(self, nbytes: int) -> "_Slot":
        """A slot that nobody reads, hidden and locked; of more such only one is kept."""
        newest, free = self.newest(), None
        for slot in [slot for slot in self._slots if slot.version < newest or newest < 0]:
            with suppress(BlockingIOError):
                fcntl.flock(slot.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if free is None and slot.buffer.flat.numel() >= nbytes:
                    free = slot
                else:
                    slot.path.unlink()
                    self._slots.remove(slot)
        if free is None:
            file, name = tempfile.mkstemp(prefix=".", dir=self._folder)
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                flat, handle = self._allocate(file, nbytes)
                free = _Slot(file, Path(name), Buffer(Layout(()), flat), handle)
            except BaseException:
                os.close(file)
                os.unlink(name)
                raise
            self._slots.append(free)
        os.pwrite(free.file, HEAD.pack(-1, 0, 0), 0)
        free.path = free.path.rename(self._folder / f".{free.file}")
        free.version = -1
        return free

    def _allocate(self, file: int, nbytes: int) -> tuple[Tensor, Any]:
        """A buffer that others can attach to, and what they need for that beside the file."""
        with _room(self._folder, nbytes):
            if hasattr(os, "posix_fallocate"):  # a page that cannot be had must be an error here, not a SIGBUS later
                os.posix_fallocate(file, 0, START + nbytes)
            else:
                os.truncate(file, START + nbytes)
        return _mapped(file, nbytes, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)), None

    def _attach(self, file: int, nbytes: int, handle: Any) -> Tensor:
        """The buffer of a locked file. Its mapping holds the file open, and so the lock, until no tensor uses it."""
        del handle
        return _mapped(file, nbytes, mmap.MAP_PRIVATE)


class CudaMemory(SharedMemory):
    """A channel between processes that use the same GPU: the versions stay on it, their files tell where."""

    scheme = "cuda"
    _own: ClassVar[weakref.WeakValueDictionary[str, Tensor]] = weakref.WeakValueDictionary()
    """The buffers of this process by their handles."""

    def _allocate(self, file: int, nbytes: int) -> tuple[Tensor, Any]:
        del file
        flat = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cuda")
        shared = [part.hex() if isinstance(part, bytes) else part for part in flat.untyped_storage()._share_cuda_()]
        self._own[str(shared)] = flat
        return flat, shared

    def _attach(self, file: int, nbytes: int, handle: Any) -> Tensor:
        del file
        torch.cuda.init()
        flat = self._own.get(str(handle))  # CUDA opens no memory of its own process
        if flat is None:
            shared: Any = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
            storage = torch.UntypedStorage._new_shared_cuda(*shared)
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy = flat[:nbytes].clone()  # the writer's memory ends with the writer
        torch.cuda.synchronize(flat.device)
        return copy


@dataclass(eq=False)
class _Slot:
    """A file that holds one version at a time, open as long as the slot is in use."""

    file: int
    path: Path
    buffer: Buffer
    handle: Any
    version: int = -1

    def __del__(self) -> None:
        os.close(self.file)


def _mapped(file: int, nbytes: int, flags: int) -> Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(file, nbytes, flags=flags, offset=START), dtype=torch.uint8)


@contextmanager
def _room(folder: Path, nbytes: int) -> Iterator[None]:
    """Turn a full file system into an error that says how much it has."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free
        raise PalestraError(
            f"no room for {nbytes:,} bytes of weights in {folder.parent}: {free:,} are free ({error.strerror}). Give "
            "it more (docker run --shm-size), or send weights through a folder"
        ) from error


def _claim() -> tuple[str, int]:
    """A folder of this writer, locked as long as it lives; those of writers that died are removed."""
    for left in ROOT.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or just removed by another writer
            guard = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(guard)
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=ROOT)
        with suppress(FileNotFoundError):  # another writer took it for one that was left, before it was locked
            guard = os.open(folder, os.O_RDONLY)
            fcntl.flock(guard, fcntl.LOCK_EX)
            os.stat(folder)
            return folder, guard


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)
