"""Models of llama.cpp: GGUF files of the llama, qwen2 and qwen3 architectures, quantised or not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from palestra.errors import UsageError
from palestra.lm.hf_config import UnsupportedModel
from palestra.lm.rope import frequencies, pair_halves
from palestra.spec.shape import RopeScaling, Shape

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": "head"},
}
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

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names as the transformer has them, and FP32 weights."""
        yield "embed", self._tensor("token_embd.weight")
        for layer in range(self.shape.layers):
            theirs, ours = f"blk.{layer}", f"layers.{layer}"
            for kind in ("weight", "bias") if self.shape.attention_bias else ("weight",):
                q, k, v = (self._tensor(f"{theirs}.attn_{part}.{kind}") for part in "qkv")
                if self._neighbours:
                    q, k = pair_halves(q, self.shape.heads), pair_halves(k, self.shape.kv)
                yield f"{ours}.attn.qkv.{kind}", torch.cat([q, k, v])
            if self.shape.qk_norm is not None:
                yield f"{ours}.attn.q_norm.weight", self._tensor(f"{theirs}.attn_q_norm.weight")
                yield f"{ours}.attn.k_norm.weight", self._tensor(f"{theirs}.attn_k_norm.weight")
            yield f"{ours}.attn_norm.weight", self._tensor(f"{theirs}.attn_norm.weight")
            yield f"{ours}.attn.o.weight", self._tensor(f"{theirs}.attn_output.weight")
            yield f"{ours}.mlp_norm.weight", self._tensor(f"{theirs}.ffn_norm.weight")
            gate_up = torch.cat([self._tensor(f"{theirs}.ffn_gate.weight"), self._tensor(f"{theirs}.ffn_up.weight")])
            yield f"{ours}.mlp.gate_up.weight", gate_up
            yield f"{ours}.mlp.down.weight", self._tensor(f"{theirs}.ffn_down.weight")
        yield "norm.weight", self._tensor("output_norm.weight")
        if not self.shape.tied:
            yield "head", self._tensor("output.weight")

    @property
    def _neighbours(self) -> bool:
        # llama.cpp reorders the rows of q and k for the llama architecture alone.
        return not self.shape.attention_bias and self.shape.qk_norm is None

    def _tensor(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{self.path}: {name} is of type {tensor.tensor_type.name}, which cannot be dequantised"
            ) from error
        # GGUF gives dimensions from the fastest to the slowest.
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(*map(int, reversed(tensor.shape)))


def load_gguf(path: Path) -> GGUF:
    """Open a GGUF file; an architecture, a key or a tensor that is not understood is refused by name."""
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise UsageError(f"{path} cannot be read as GGUF ({error}); it is cut off or something else") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{path} has the architecture {architecture!r}, which is not supported; "
            f"those that are: {', '.join(_ARCHITECTURES)}"
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    prefix = f"{architecture}."
    keys = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    shape = _read_shape(keys, tensors, str(path)).model_copy(update=_ARCHITECTURES[architecture])
    if "rope_freqs.weight" in tensors:
        factors = torch.from_numpy(np.array(tensors["rope_freqs.weight"].data, dtype=np.float32))
        shape = shape.model_copy(update={"rope_scaling": _scaling_of(factors, shape, str(path))})
    about = {name: value for name, value in fields.items() if name.startswith("tokenizer.") or name == "general.name"}
    ends = (fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    found = GGUF(shape, about, tuple(dict.fromkeys(int(end) for end in ends if end is not None)), Path(path), tensors)
    _check_tensors(found)
    return found


def _read_shape(keys: dict[str, Any], tensors: Mapping[str, Any], where: str) -> Shape:
    unknown = dict(keys)

    def take(key: str, default: Any = None) -> Any:
        value = unknown.pop(key, default)
        if value is None:
            raise UnsupportedModel(f"{where} does not say {key}")
        return value

    if "token_embd.weight" not in tensors:
        raise UsageError(f"{where} has no tensor token_embd.weight: it holds no language model")
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


def _check_tensors(found: GGUF) -> None:
    layer = ["attn_norm", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "attn_q", "attn_k", "attn_v"]
    expected = {"token_embd.weight", "output_norm.weight"} | (set() if found.shape.tied else {"output.weight"})
    for number in range(found.shape.layers):
        expected |= {f"blk.{number}.{name}.weight" for name in layer}
        if found.shape.attention_bias:
            expected |= {f"blk.{number}.attn_{part}.bias" for part in "qkv"}
        if found.shape.qk_norm is not None:
            expected |= {f"blk.{number}.attn_{part}_norm.weight" for part in "qk"}
    missing, extra = expected - set(found.tensors), set(found.tensors) - expected - {"rope_freqs.weight"}
    if missing or extra:
        raise UnsupportedModel(
            f"{found.path}: tensors missing: {sorted(missing)[:10]}; tensors not understood: {sorted(extra)[:10]}"
        )
