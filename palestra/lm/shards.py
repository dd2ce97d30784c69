"""The safetensors files of a checkpoint: one file, or shards with an index; read tensor by tensor, never a pickle."""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from palestra.errors import PalestraError, UsageError
from palestra.runs.store import read_json, write_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class DamagedModel(PalestraError):
    """A model folder whose weights are incomplete or do not fit its config."""


class Shards:
    """The tensors of a folder's safetensors files; only those asked for are read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of every tensor, by name."""
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in weight_files(self.folder):
                self._open(name, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the precision it is stored in."""
        return self._files[name].get_tensor(name)

    def _open(self, name: str, stack: ExitStack) -> None:
        path = self.folder / name
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except FileNotFoundError as error:
            raise DamagedModel(f"{path} is missing though {INDEX} names it; get the folder again") from error
        except SafetensorError as error:
            raise DamagedModel(f"{path} cannot be read ({error}); it is cut off or damaged: get it again") from error
        for tensor in file.keys():  # noqa: SIM118 (not a mapping)
            kind = file.get_slice(tensor).get_dtype()
            if kind not in _FLOATS:
                raise UsageError(
                    f"{path}: {tensor} is stored as {kind}; quantised weights are not supported, only {_FLOATS}"
                )
            if tensor in self._files:
                raise DamagedModel(f"{self.folder}: {tensor} is in two files, {name} is one of them")
            self.shapes[tensor] = tuple(file.get_slice(tensor).get_shape())
            self._files[tensor] = file


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's safetensors files; pickled weights are refused."""
    if (folder / SINGLE).exists():
        return [SINGLE]
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise DamagedModel(f"{folder / INDEX} has no weight_map, which says what is in which file")
        names = sorted({str(name) for name in index["weight_map"].values()})
        for name in names:
            if Path(name).name != name:
                raise DamagedModel(f"{folder / INDEX} names a file outside of the folder: {name!r}")
        return names
    if any(folder.glob("*.safetensors")):
        raise DamagedModel(f"{folder} has neither {SINGLE} nor {INDEX}, which says what is in which of its files")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UsageError(
            f"{folder} holds its weights as pickles (.bin, .pt, .pth), which can run any code when they are loaded. "
            "Convert them where that is safe: transformers' AutoModelForCausalLM.from_pretrained(SRC)"
            ".save_pretrained(DST) writes safetensors."
        )
    raise UsageError(f"{folder} holds no weights: expected {SINGLE}, or several safetensors files with {INDEX}")


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> None:
    """Write tensors as they come into files of at most `max_bytes` (a larger tensor gets its own), with an index.

    No more than one file's tensors are held at a time.
    """
    contents: list[list[str]] = []
    total = size = 0
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            _write(folder, shard, contents)
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    _write(folder, shard, contents)
    if len(contents) == 1:
        (folder / _unfinished(1)).rename(folder / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(contents, 1):
        final = f"model-{number:05d}-of-{len(contents):05d}.safetensors"
        (folder / _unfinished(number)).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)


def _write(folder: Path, shard: dict[str, Tensor], contents: list[list[str]]) -> None:
    contents.append(list(shard))
    path = folder / _unfinished(len(contents))
    save_file(shard, path, metadata={"format": "pt"})
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unfinished(number: int) -> str:
    # The final name says how many there are, which is known at the end only.
    return f"model-{number:05d}.part"
