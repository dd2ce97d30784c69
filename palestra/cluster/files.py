"""Weights as files in a folder or an object store: every so-manieth version whole, those between as differences.

A version is `N.bin`, the tensors one after another, and `N.json`, which describes it and is written last. A difference
is the exclusive or with the version before, its bytes sorted by significance and compressed.
"""

import json
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.cluster.channel import ChannelError, Layout, Weights, as_source, check_newer, checksum, damaged
from palestra.data.remote import open_filesystem
from palestra.errors import PalestraError

Bytes = NDArray[np.uint8]


class Files:
    """A channel through a folder or a URL that fsspec writes.

    Nobody knows who reads an object: a version stays until two whole ones are newer.
    """

    def __init__(self, url: str, *, whole_every: int = 8):
        self._url = url if "://" in url else os.path.abspath(url)
        self._files: Any
        self._files, self._root = open_filesystem(self._url)
        self._whole_every = whole_every
        self._wholes: list[int] = []
        self._chain = 0  # differences since the last whole version
        self._last: tuple[int, dict[str, Bytes]] = (-1, {})  # the version this end has, to which differences apply
        self._layout: Layout | None = None
        self._publishing = threading.Lock()

    @property
    def address(self) -> str:
        return f"files:{self._url}"

    def publish(self, version: int, source: Weights) -> None:
        source = as_source(source)
        with self._publishing:
            newest = self.newest()
            check_newer(version, newest)
            layout, (base, previous) = Layout.of(source), self._last
            if base < 0 or base != newest or layout != self._layout or self._chain + 1 >= self._whole_every:
                base, previous = -1, {}
            # A failure on the way leaves no version to compute differences from: the next one is whole.
            self._last, current, rows = (-1, {}), {}, []
            with self._wrote(version):
                self._files.makedirs(self._root, exist_ok=True)
                with self._files.open(self._path(version, "bin"), "wb") as file:
                    for (name, shape, dtype), tensor in layout.matched(source):
                        copy = torch.empty(shape, dtype=dtype).copy_(tensor)
                        current[name] = data = copy.view(-1).view(torch.uint8).numpy()
                        packed, is_delta = _encode(data, previous.get(name), dtype.itemsize)
                        file.write(packed)
                        rows.append([is_delta, len(packed), checksum(torch.from_numpy(data))])
                header = {"version": version, "base": base, "layout": layout.dump(), "tensors": rows}
                path = self._path(version, "json")
                self._files.pipe_file(f"{path}.part", json.dumps(header).encode())
                self._files.mv(f"{path}.part", path)
            self._last, self._layout = (version, current), layout
            self._chain = 0 if base < 0 else self._chain + 1
            self._wholes += [version] if base < 0 else []
            self._prune()

    def newest(self) -> int:
        return max((version for version, suffix in self._listed() if suffix == "json"), default=-1)

    def fetch(self, version: int) -> Iterator[tuple[str, Tensor]]:
        what, (start, tensors) = f"version {version} in {self.address}", self._last
        chain = [self._header(version)]
        while (base := chain[0]["base"]) not in (-1, start):
            chain.insert(0, self._header(base))
        tensors = tensors if base == start else {}
        layout, current = Layout.load(chain[-1]["layout"]), {}
        with ExitStack() as stack:
            try:
                opened = (self._files.open(self._path(header["version"], "bin"), "rb") for header in chain)
                files = [stack.enter_context(file) for file in opened]
            except FileNotFoundError as error:
                raise self._gone(version) from error
            for index, entry in enumerate(layout.entries):
                try:
                    data = tensors.get(entry.name)
                    for header, file in zip(chain, files, strict=True):
                        is_delta, size, _ = header["tensors"][index]
                        data = _decode(file.read(size), data if is_delta else None, entry.dtype.itemsize)
                    if data is None or checksum(torch.from_numpy(data)) != chain[-1]["tensors"][index][2]:
                        raise ValueError("checksum")
                except (ValueError, zlib.error) as error:
                    self._last = (-1, {})
                    raise damaged(what, entry.name) from error
                current[entry.name] = data
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
                tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
                yield entry.name, tensor
        self._last = (version, current)

    def close(self) -> None:
        """The versions stay where they are."""

    def _header(self, version: int) -> dict[str, Any]:
        try:
            return json.loads(self._files.cat_file(self._path(version, "json")))
        except FileNotFoundError as error:
            raise self._gone(version) from error
        except ValueError as error:
            raise damaged(f"version {version} in {self.address}", self._path(version, "json")) from error

    def _gone(self, version: int) -> ChannelError:
        return ChannelError(f"version {version} is not in {self.address}: fetch the newest, {self.newest()}")

    def _path(self, version: int, suffix: str) -> str:
        return f"{self._root}/{version:010d}.{suffix}"

    def _listed(self) -> Iterator[tuple[int, str]]:
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return
        for path in paths:
            stem, _, suffix = path.rsplit("/", 1)[-1].partition(".")
            if stem.isdigit() and suffix in ("json", "bin"):
                yield int(stem), suffix

    def _prune(self) -> None:
        """Remove what no chain of the last two whole versions needs; descriptions first, so that nobody begins."""
        if len(self._wholes) < 2:
            return
        self._wholes = self._wholes[-2:]
        for version, suffix in sorted(self._listed(), key=lambda file: file[1], reverse=True):
            if version < self._wholes[0]:
                self._files.rm_file(self._path(version, suffix))

    @contextmanager
    def _wrote(self, version: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            for suffix in ("bin", "json.part"):  # what is torn takes room
                with suppress(OSError):
                    self._files.rm_file(self._path(version, suffix))
            raise PalestraError(
                f"cannot write version {version} to {self.address}: {error}. Check free space and permissions, then "
                "publish the next version; readers keep the one before"
            ) from error


def _encode(data: Bytes, previous: Bytes | None, itemsize: int) -> tuple[bytes, bool]:
    """The bytes to write, and whether they are a difference."""
    if previous is not None:
        # Runs of zeros are all there is to find: Z_RLE finds them twice as fast as a search, in fewer bytes.
        deflate = zlib.compressobj(1, strategy=zlib.Z_RLE)
        packed = deflate.compress((data ^ previous).reshape(-1, itemsize).T.tobytes()) + deflate.flush()
        if len(packed) < data.size:
            return packed, True
    return data.tobytes(), False


def _decode(packed: bytes, previous: Bytes | None, itemsize: int) -> Bytes:
    """The inverse; ValueError or zlib.error for what cannot have been written."""
    if previous is None:
        return np.frombuffer(bytearray(packed), np.uint8)
    planes = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(itemsize, -1)
    return planes.T.reshape(-1) ^ previous
