"""LoRA adapters as PEFT keeps them: `adapter_model.safetensors` and `adapter_config.json`, out and in."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.lm.hf import GENERATION_CONFIG, special_ids
from palestra.lm.lora import adapted, adapter_state, add_lora, load_adapter_state
from palestra.lm.model import Transformer
from palestra.runs.store import write_bytes, write_json
from palestra.spec.lora import LoraSpec, Matrix

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_BLOCKS = {
    **dict.fromkeys(("attn.qkv", "attn.o"), "self_attn"),
    **dict.fromkeys(("mlp.gate_up", "mlp.down"), "mlp"),
    **dict.fromkeys(("mlp.shared.gate_up", "mlp.shared.down"), "mlp.shared_experts"),  # as in DeepSeek-V3
}
"""The module that a matrix of a layer belongs to in a Hugging Face model."""

_READ = {"peft_type", "r", "lora_alpha", "target_modules", "bias", "init_lora_weights"}
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
}
"""Keys of PEFT's config that do not change what trained adapters compute; all others must be unset."""


def save_peft(
    folder: Path,
    model: Transformer,
    base: str,
    adapters: Mapping[str, Tensor] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    eos: Sequence[int] = (),
) -> None:
    """Write a model's adapters for PEFT; `base` says which model they belong to, as a Hub id or a folder.

    `adapters` are the model's own, whole, where those that it has are split over ranks. A `tokenizer` is written beside
    them with the tokens that end a generation: training may have changed its chat template, and what ends a turn.
    """
    from safetensors.torch import save

    modules = adapted(model)
    if not modules:
        raise UsageError("the model has no LoRA adapters to save")
    one = next(iter(modules.values()))
    rank = next(iter(one.lora_a.values())).shape[0]
    weights = {
        _peft_name(name): tensor.cpu().contiguous() for name, tensor in (adapters or adapter_state(model)).items()
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": one.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": [part for part in get_args(Matrix) if any(part in m.lora_a for m in modules.values())],
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(folder)
        write_json(folder / GENERATION_CONFIG, special_ids(tokenizer, eos, {}))
    write_bytes(folder / WEIGHTS, save(weights, {"format": "pt"}))
    write_bytes(folder / CONFIG, json.dumps(config, indent=2).encode())


def load_peft(folder: Path, model: Transformer) -> LoraSpec:
    """Add the adapters in a PEFT folder to a model that has none; what they are."""
    if not (folder / CONFIG).exists():
        raise UsageError(f"{folder} is not a folder of PEFT adapters: it has no {CONFIG}")
    spec = _read(json.loads((folder / CONFIG).read_text()), folder)
    add_lora(model, spec, torch.Generator())
    load_adapter_state(model, adapter_weights(folder, model))
    return spec


def adapter_weights(folder: Path, model: Transformer) -> dict[str, Tensor]:
    """The adapters in a PEFT folder, by the names they have in a model with such adapters."""
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).exists():
        raise UsageError(f"{folder} is not a folder of PEFT adapters: it has no {WEIGHTS}")
    names = {_peft_name(name): name for name in adapter_state(model)}
    return _renamed(load_file(folder / WEIGHTS), names, folder)


def _read(config: dict[str, Any], folder: Path) -> LoraSpec:
    odd = [key for key, value in config.items() if key not in _READ | _HARMLESS and value not in (None, False, [], {})]
    if config.get("peft_type") != "LORA":
        odd.append("peft_type")
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):  # others change the base model too
        odd.append("init_lora_weights")
    if odd:
        found = ", ".join(f"{key}: {json.dumps(config.get(key))}" for key in odd)
        raise UsageError(f"{folder / CONFIG}: adapters of this form are not supported ({found})")
    targets = config["target_modules"]
    named = ["all"] if targets == "all-linear" else targets
    if not (isinstance(named, list) and named and set(named) <= {"all", *get_args(Matrix)}):
        raise UsageError(f"{folder / CONFIG}: expected target_modules of {', '.join(get_args(Matrix))}, got {targets}")
    fields = {"rank": config["r"], "alpha": float(config["lora_alpha"]), "targets": named}
    return LoraSpec.model_validate(fields)


def _renamed(weights: dict[str, Tensor], names: dict[str, str], folder: Path) -> dict[str, Tensor]:
    unknown = sorted(weights.keys() - names.keys())
    if unknown:
        raise PalestraError(f"{folder / WEIGHTS}: the model has no place for {unknown[0]} ({len(unknown)} such)")
    return {names[name]: tensor for name, tensor in weights.items()}


def _peft_name(name: str) -> str:
    """layers.0.attn.qkv.lora_a.q_proj → base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight."""
    matrix, _, rest = name.partition(".lora_")
    layers, number, place = matrix.split(".", 2)
    letter, part = rest.split(".")
    return f"base_model.model.model.{layers}.{number}.{_BLOCKS[place]}.{part}.lora_{letter.upper()}.weight"
