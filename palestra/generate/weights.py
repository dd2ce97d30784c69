"""Weights on their way into a server: from a folder that it can read, or as safetensors over the wire."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from palestra.errors import UsageError
from palestra.lm.hf import load_pretrained
from palestra.lm.peft import WEIGHTS as ADAPTERS
from palestra.runs.tree import Leaf, flatten, safetensors_chunks

PIECE = 1 << 20


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a Hugging Face folder, of a checkpoint that has one as `model/`, or of a safetensors file."""
    folder = path / "model" if (path / "model").is_dir() else path
    if path.name == ADAPTERS or (folder / ADAPTERS).is_file():
        raise UsageError(
            f"{path} holds LoRA adapters alone, and a server takes whole weights: send those of the model with its "
            "adapters merged"
        )
    if path.is_file():
        return read_safetensors(path)
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{path} is no model: expected a folder with a config.json, a checkpoint, or a safetensors file"
        )
    return load_pretrained(folder).model.state_dict()


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, under the model's own parameter names."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UsageError(f"the weights are no safetensors file: {error}") from error


class SafetensorsBytes:
    """The bytes of a safetensors file of weights, in pieces of at most 1 MiB; tensors on the CPU are not copied."""

    def __init__(self, weights: Mapping[str, Tensor]):
        _, leaves = flatten(dict(weights))
        named = [Leaf(name, leaf.type_name, leaf.carrier) for name, leaf in zip(weights, leaves, strict=True)]
        self._chunks = [memoryview(chunk) for chunk in safetensors_chunks(named)]

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            for start in range(0, len(chunk), PIECE):
                yield bytes(chunk[start : start + PIECE])
