"""Hugging Face model folders, in and out: config.json, sharded safetensors, generation config and tokenizer."""

import errno
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.lm import hf_config, mxfp4
from palestra.lm.hf_families import FAMILIES, KEPT, NORMS, Family
from palestra.lm.hf_vision import vision_names
from palestra.lm.layers import MLP, Linear
from palestra.lm.model import Block, Transformer
from palestra.lm.moe import MoE
from palestra.lm.vision import FORM, VisionBlock
from palestra.runs.store import read_json, sync_folder, write_json
from palestra.spec.shape import Shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class DamagedModel(PalestraError):
    """A model folder whose weights are incomplete or do not fit its config."""


class Shards:
    """The tensors of a folder's safetensors files, less derived ones; only those asked for are read.

    A tensor in MXFP4 is seen as if it were stored in bf16, by its inputs.
    """

    def __init__(self, folder: Path, prefix: str = ""):
        """Names that do not begin with `prefix`, but for those of heads, are taken as if they did."""
        self.folder, self.prefix = folder, prefix
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of every tensor, by name."""
        self._files: dict[str, tuple[Any, str]] = {}
        for name in weight_files(folder):
            self._open(folder / name)
        for blocks in [name for name in self.shapes if name.endswith(mxfp4.BLOCKS)]:
            self._join(blocks.removesuffix(mxfp4.BLOCKS))

    def tensor(self, name: str) -> Tensor:
        """One tensor, in the precision it is stored in."""
        if name not in self._files:
            return mxfp4.dequantized(*(self.tensor(name + part) for part in (mxfp4.BLOCKS, mxfp4.SCALES))).mT
        file, stored = self._files[name]
        return file.get_tensor(stored)

    def slice(self, name: str) -> Any:
        """One tensor, of which only what it is indexed with is read; all of it where it is in MXFP4."""
        if name not in self._files:
            return self.tensor(name)
        file, stored = self._files[name]
        return file.get_slice(stored)

    def _join(self, name: str) -> None:
        blocks, scales = (self.shapes.pop(name + part, ()) for part in (mxfp4.BLOCKS, mxfp4.SCALES))
        if len(blocks) != 4 or blocks != (*scales, 16):
            raise DamagedModel(
                f"{self.folder}: {name} is in MXFP4 with blocks of shape {blocks} and scales of {scales}"
            )
        experts, rows, count = scales
        self.shapes[name] = (experts, 32 * count, rows)

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise DamagedModel(f"{path} is missing though {INDEX} names it; get the folder again") from error
        except SafetensorError as error:
            raise DamagedModel(f"{path} cannot be read ({error}); it is truncated or damaged: get it again") from error
        for tensor in file.keys():  # noqa: SIM118 (not a mapping)
            if tensor.endswith(_DERIVED):
                continue
            name = tensor if tensor.startswith((self.prefix, *_HEADS)) else self.prefix + tensor
            kind = file.get_slice(tensor).get_dtype()
            if kind not in _FLOATS and not (kind == "U8" and name.endswith((mxfp4.BLOCKS, mxfp4.SCALES))):
                raise UsageError(
                    f"{path}: {tensor} is stored as {kind}; quantized weights are not supported, only {_FLOATS}"
                )
            if name in self._files:
                raise DamagedModel(f"{self.folder}: {tensor} is in two files, {path.name} is one of them")
            self.shapes[name] = tuple(file.get_slice(tensor).get_shape())
            self._files[name] = file, tensor


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


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; what the disk refuses, such as a byte too many, is an OSError as elsewhere."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


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
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _write(folder: Path, shard: dict[str, Tensor], contents: list[list[str]]) -> None:
    contents.append(list(shard))
    path = folder / _unfinished(len(contents))
    write_file(path, shard)
    sync_folder(path)


def _unfinished(number: int) -> str:
    # The final name says how many there are, which is known at the end only.
    return f"model-{number:05d}.part"


MAX_SHARD_BYTES = 5_000_000_000
GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
# Rotary tables and masks that old versions of transformers stored; they follow from the config.
_DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_HEADS = ("lm_head.", "score.")


@dataclass(frozen=True)
class Pretrained:
    """What a model folder holds."""

    model: Transformer
    tokenizer: Path | None
    """The folder, where it has a tokenizer."""
    eos: tuple[int, ...]
    """The tokens that end a generation."""
    config: dict[str, Any]
    """config.json as it was read."""
    score: Tensor | None
    """The scalar head (1, D) of a reward model."""


@dataclass(frozen=True)
class Slot:
    """Where a stored tensor lies in one of the model's."""

    theirs: str
    ours: str
    index: tuple[int | slice, ...] = ()
    transposed: bool = False
    form: tuple[int, ...] = ()
    """What the last dimension is there, where it is several."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part of one of the model's tensors, as it is stored."""
        part = tensor[self.index]
        part = part.unflatten(-1, self.form) if self.form else part
        return part.mT if self.transposed else part


def load_pretrained(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Pretrained:
    """Load a model folder: arithmetic in `dtype`, parameters in `param_dtype`. Needs the memory of the model once."""
    folder = Path(folder)
    config, shape, shards, places = opened(folder)
    model = empty_model(shape, dtype, param_dtype, device)  # only now: a wrong config can ask for any size
    state = model.state_dict()
    for slot in places:
        slot.of(state[slot.ours]).copy_(shards.tensor(slot.theirs))
    score = shards.tensor("score.weight").to(device, param_dtype) if "score.weight" in shards.shapes else None
    return Pretrained(model, folder if has_tokenizer(folder) else None, read_eos(folder, config), config, score)


def opened(folder: Path) -> tuple[dict[str, Any], Shape, Shards, list[Slot]]:
    """The config, the shape and the files of a model folder, and where their tensors lie; checked that all fit."""
    config, shape = hf_config.read_folder(folder)
    family = FAMILIES.get(config["model_type"])
    shards, places = Shards(folder, "" if family is None else family.prefix), slots(shape, family)
    check_names(shards, places, shape, score=hf_config.is_classifier(config))
    return config, shape, shards, places


def save_pretrained(folder: Path, model: Transformer, **options: Any) -> None:
    """Write a model folder, which must not exist yet; the options are those of `save_weights`."""
    save_weights(folder, model.shape, model.state_dict(), **options)


def save_weights(
    folder: Path,
    shape: Shape,
    weights: Mapping[str, Tensor],
    *,
    tokenizer: Tokenizer | None,
    eos: Sequence[int],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    base_config: Mapping[str, Any] | None = None,
    score: Tensor | None = None,
) -> None:
    """Write a model folder from weights by the transformer's names, whole or not at all; it must not exist yet.

    transformers loads it, unless no family expresses the shape (`model_type: palestra`). `dtype` None stores the
    weights as they are; `base_config` is that of the model they come from; `score` makes it a reward model.
    """
    base = base_config or {}
    shape, family, config = described(shape, base, scores=score is not None)
    tensors = exported(shape, family, weights, dtype)
    scored = [] if score is None else [("score.weight", score.detach().to("cpu", dtype or score.dtype))]
    with written_whole(folder) as part:
        write_about(part, config, dtype or weights["embed"].dtype, tokenizer, eos, base)
        write_shards(part, chain(tensors, scored), max_shard_bytes)


def exported(
    shape: Shape, family: Family | None, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a family's checkpoint on the host, one by one, from weights by the transformer's names."""
    expected = {name: tensor.shape for name, tensor in skeleton(shape).state_dict().items()}
    wrong = [name for name, size in expected.items() if name not in weights or weights[name].shape != size]
    if wrong:
        raise DamagedModel(f"weights that are missing or do not have the sizes of {shape!r}: {', '.join(wrong[:20])}")
    buffers = buffers_of(shape)

    def tensor(slot: Slot) -> Tensor:
        part = slot.of(weights[slot.ours].detach())
        return part.to("cpu", part.dtype if slot.ours in buffers else dtype or part.dtype)

    return ((slot.theirs, tensor(slot)) for slot in slots(shape, family))


def described(shape: Shape, base: Mapping[str, Any], *, scores: bool) -> tuple[Shape, Family | None, dict[str, Any]]:
    """The shape that a folder has, the family that expresses it, and its config.json without tokens and precision."""
    shape = shape.model_copy(update={"tied": True}) if scores else shape  # a score stands in for the head
    family = hf_config.family_of(shape, base.get("model_type"))
    if family is None or (scores and not family.classifies):
        family, config = None, hf_config.own_config(shape)
    else:
        config = {key: value for key, value in base.items() if key in KEPT}
        config |= hf_config.write_config(hf_config.canonical(shape), family) | {"architectures": [family.architecture]}
    if scores:
        name = "PalestraForSequenceClassification" if family is None else family.classifier
        config |= {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return shape, family, config


def write_about(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    eos: Sequence[int],
    base: Mapping[str, Any],
) -> None:
    """Write the configs and the tokenizer."""
    special = special_ids(tokenizer, eos, base)
    precision = {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / "config.json", {**config, **special, **precision})
    write_json(folder / GENERATION_CONFIG, special)
    if tokenizer is not None:
        tokenizer.save(folder)


def empty_model(shape: Shape, dtype: torch.dtype, param_dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """A transformer on a device whose parameters hold nothing yet, in their own precision from the start."""
    model = skeleton(shape, dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(param_dtype)
    # `to_empty` as it is, but for `empty_like`, which imports sympy when it is given a tensor without memory.
    return model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def slots(shape: Shape, family: Family | None) -> list[Slot]:
    """Every tensor of a family's checkpoint of that shape; without a family, names are the transformer's own."""
    model = skeleton(shape)
    if family is None:
        return [Slot(name, name) for name in model.state_dict()]
    places = [Slot("model.embed_tokens.weight", "embed")]
    if shape.positions is not None:
        places.append(Slot("model.positions.weight", "positions"))
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block)
        places += _layer_slots(f"model.layers.{layer}", f"layers.{layer}", block, shape, family)
    places += _norm_slots("model.norm", "norm", shape)
    places += [] if shape.tied else [Slot("lm_head.weight", "head")]
    if model.vision is not None:
        places.append(Slot("visual.patch_embed.proj.weight", "vision.patches.weight", form=FORM))
        places += [Slot(*names) for names in vision_names(model.vision.spec)]
        for layer, block in enumerate(model.vision.blocks):
            assert isinstance(block, VisionBlock)
            places += _parts(f"visual.blocks.{layer}.mlp", f"vision.blocks.{layer}.mlp.gate_up", block.mlp.gate_up)
    renamed = partial(reduce, lambda name, pair: name.replace(*pair), family.names.items())
    return [replace(slot, theirs=renamed(slot.theirs)) for slot in places]


def buffers_of(shape: Shape) -> set[str]:
    """The names of selection biases, which keep their precision; families do not have them."""
    return {name for name, _ in skeleton(shape).named_buffers()}


def check_names(shards: Shards, places: Sequence[Slot], shape: Shape, *, score: bool) -> None:
    """Refuse stored tensors whose names or shapes are not those of the model."""
    state = skeleton(shape).state_dict()
    expected = {slot.theirs: tuple(slot.of(state[slot.ours]).shape) for slot in places}
    if score:
        expected["score.weight"] = (1, shape.width)
    stored, embed = set(shards.shapes), places[0].theirs
    if shape.tied and "lm_head.weight" in stored and not score:
        stored.remove("lm_head.weight")
        if not torch.equal(shards.tensor("lm_head.weight"), shards.tensor(embed)):
            raise DamagedModel(
                f"{shards.folder}: config.json says tie_word_embeddings, but lm_head.weight is stored and differs from "
                f"{embed}; set tie_word_embeddings to false to use it"
            )
    problems = [f"missing: {name}" for name in expected if name not in stored]
    problems += [f"not part of the model: {name}" for name in sorted(stored - set(expected))]
    for name in expected:
        if name in stored and shards.shapes[name] != expected[name]:
            problems.append(f"{name} has shape {shards.shapes[name]}, expected {expected[name]}")
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise DamagedModel(f"{shards.folder}: the weights do not fit config.json:{listed}{more}")


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies there."""
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def special_ids(tokenizer: Tokenizer | None, eos: Sequence[int], base: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json and generation_config.json say of special tokens; without a tokenizer, as `base` does."""
    return {
        "bos_token_id": base.get("bos_token_id") if tokenizer is None else tokenizer.bos,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": base.get("pad_token_id") if tokenizer is None else tokenizer.pad,
    }


def read_eos(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a generation: those of generation_config.json, else of config.json."""
    path = folder / GENERATION_CONFIG
    own = read_json(path) if path.exists() else {}
    if not isinstance(own, dict):
        raise UsageError(f"{path} is not a mapping")
    eos = config.get("eos_token_id") if own.get("eos_token_id") is None else own["eos_token_id"]
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(token) is not int or token < 0 for token in ids):
        raise UsageError(f"{folder}: eos_token_id = {eos!r:.60} (expected a token id, or a list of them)")
    return tuple(ids)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` that takes its name at the end; killed before, there is no `folder`."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already; remove it or choose another place for the model")
    part = folder.parent / f".{folder.name}.part-{uuid.uuid4().hex[:8]}"
    part.mkdir(parents=True)
    try:
        yield part
        sync_folder(part)
        part.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # gone already when all went well


def skeleton(shape: Shape, dtype: torch.dtype = torch.float32) -> Transformer:
    """A transformer without memory: only names and shapes."""
    with torch.device("meta"):
        return Transformer(shape, dtype)


def _layer_slots(theirs: str, ours: str, block: Block, shape: Shape, family: Family) -> Iterator[Slot]:
    for norm, place in NORMS[shape.norm_order].items():
        yield from _norm_slots(f"{theirs}.{norm}", f"{ours}.{place}", shape)
    fused, turned = family.fused, family.transposed
    yield from _parts(f"{theirs}.self_attn", f"{ours}.attn.qkv", block.attn.qkv, "qkv_proj" if fused else None, turned)
    yield from _parts(f"{theirs}.self_attn", f"{ours}.attn.o", block.attn.o, None, turned)
    if shape.sinks:
        yield Slot(f"{theirs}.self_attn.sinks", f"{ours}.attn.sinks")
    if shape.qk_norm is not None:
        for norm in ("q_norm", "k_norm"):
            yield Slot(f"{theirs}.self_attn.{norm}.weight", f"{ours}.attn.{norm}.weight")
    if family.experts is None or shape.moe is None:
        assert isinstance(block.mlp, MLP)
        gate_up = "gate_up_proj" if fused and shape.gated else None
        yield from _parts(f"{theirs}.mlp", f"{ours}.mlp.gate_up", block.mlp.gate_up, gate_up, turned)
        yield from _parts(f"{theirs}.mlp", f"{ours}.mlp.down", block.mlp.down, None, turned)
        return
    names, hidden = family.experts, shape.moe.mlp
    yield Slot(f"{theirs}.{names.block}.{names.router}.weight", f"{ours}.mlp.router")
    if shape.biases:
        yield Slot(f"{theirs}.{names.block}.{names.router}.bias", f"{ours}.mlp.router_bias")
    if names.stacked:
        for stack, name in ((names.gate, "gate_up"), (names.down, "down")):
            yield Slot(f"{theirs}.{names.block}.experts.{stack}", f"{ours}.mlp.{name}", transposed=True)
            if shape.biases:
                yield Slot(f"{theirs}.{names.block}.experts.{stack}_bias", f"{ours}.mlp.{name}_bias")
        return
    for e in range(shape.moe.experts):
        expert = f"{theirs}.{names.block}.experts.{e}"
        yield Slot(f"{expert}.{names.gate}.weight", f"{ours}.mlp.gate_up", (e, slice(0, hidden)))
        yield Slot(f"{expert}.{names.up}.weight", f"{ours}.mlp.gate_up", (e, slice(hidden, 2 * hidden)))
        yield Slot(f"{expert}.{names.down}.weight", f"{ours}.mlp.down", (e,))
    if names.shared is not None:
        assert isinstance(block.mlp, MoE)
        yield Slot(f"{theirs}.{names.block}.shared_expert_gate.weight", f"{ours}.mlp.shared_gate")
        for name in ("gate_up", "down"):
            linear = getattr(block.mlp.shared, name)
            yield from _parts(f"{theirs}.{names.block}.shared_expert", f"{ours}.mlp.shared.{name}", linear)


def _norm_slots(theirs: str, ours: str, shape: Shape) -> Iterator[Slot]:
    for kind in ("weight",) if shape.norm is None else ("weight", "bias"):
        yield Slot(f"{theirs}.{kind}", f"{ours}.{kind}")


def _parts(
    theirs: str, ours: str, linear: Linear, fused: str | None = None, transposed: bool = False
) -> Iterator[Slot]:
    """The matrices stacked in a `Linear`, or all of it by the name that it has where they are `fused`."""
    parts = linear.parts if fused is None else {fused: len(linear.weight)}
    for kind in ("weight", "bias") if linear.bias is not None else ("weight",):
        start = 0
        for part, rows in parts.items():
            index, turned = (slice(start, start + rows),), transposed and kind == "weight"
            yield Slot(f"{theirs}.{part}.{kind}", f"{ours}.{kind}", index, turned)
            start += rows
