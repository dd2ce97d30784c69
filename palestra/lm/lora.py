"""Low-rank adapters (LoRA, Hu et al. 2021): added, merged, and as PEFT folders in and out."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.lm.hf import GENERATION_CONFIG, special_ids
from palestra.lm.layers import Linear
from palestra.lm.model import Transformer
from palestra.lm.ranks import whole
from palestra.runs.store import write_bytes, write_json
from palestra.spec.lm import LoraSpec, Matrix


class LoraLinear(Linear):
    """A `Linear` of which some parts have adapters: W + scale · B · A. Its weight keeps its name and is not trained."""

    def __init__(self, base: Linear, targets: list[str], rank: int, scale: float):
        nn.Module.__init__(self)
        self.parts, self.weight, self.bias, self.scale = base.parts, base.weight, base.bias, scale
        inputs, device = base.weight.shape[1], "cpu" if base.weight.is_meta else base.weight.device
        self.lora_a = nn.ParameterDict({part: torch.empty(rank, inputs, device=device) for part in targets})
        self.lora_b = nn.ParameterDict({part: torch.zeros(base.parts[part], rank, device=device) for part in targets})

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the precision of `x`."""
        pieces = list(super().forward(x).split(list(self.parts.values()), dim=-1))
        for place, part in enumerate(self.parts):
            if part in self.lora_a:
                low = F.linear(x, self.lora_a[part].to(x.dtype))
                pieces[place] = pieces[place] + F.linear(low, self.lora_b[part].to(x.dtype)) * self.scale
        return torch.cat(pieces, dim=-1)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The weight with its adapters added in FP32, in the weight's precision; whole where it is split."""
        merged = whole(self.weight.detach()).to(torch.float32, copy=True)
        for part, rows in zip(self.parts, merged.split(list(self.parts.values())), strict=True):
            if part in self.lora_a:
                rows.addmm_(whole(self.lora_b[part]).float(), whole(self.lora_a[part]).float(), alpha=self.scale)
        return merged.to(self.weight.dtype)


@torch.no_grad()
def add_lora(model: Transformer, spec: LoraSpec, generator: torch.Generator) -> None:
    """Give every targeted matrix an adapter and freeze all else. The model computes what it did, because B is zero.

    A is initialized on the CPU, so that a seed gives the same adapters on every device.
    """
    if adapted(model):
        raise UsageError("the model has LoRA adapters already: merge them into its weights before adding others")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    parts = {part for linear in linears.values() for part in linear.parts}
    absent = [target for target in spec.targets if target not in {"all", *parts}]
    if absent:
        raise UsageError(
            f"lora.targets: the model has no {' and no '.join(absent)} outside routed experts; "
            f"take of {', '.join(part for part in get_args(Matrix) if part in parts)}"
        )
    model.requires_grad_(False)
    for name, linear in linears.items():
        targets = [part for part in linear.parts if "all" in spec.targets or part in spec.targets]
        if not targets:
            continue
        lora = LoraLinear(linear, targets, spec.rank, spec.alpha / spec.rank)
        for a in lora.lora_a.values():
            bound = a.shape[1] ** -0.5  # as `nn.Linear` and PEFT begin: Kaiming's uniform with a = √5
            a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, lora)


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """The matrices that have adapters, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def merged_weights(model: Transformer) -> dict[str, Tensor]:
    """Parameters and buffers under the plain model's names, with adapters merged; what has none is not copied.

    This is what a generator is given and what a Hugging Face folder holds.
    """
    plain = {name: tensor for name, tensor in model.state_dict().items() if not _is_adapter(name)}
    return plain | {f"{name}.weight": module.merged_weight() for name, module in adapted(model).items()}


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone: `layers.0.attn.qkv.lora_a.q_proj` (rank, inputs), `….lora_b.q_proj` (outputs, rank), …"""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if _is_adapter(name)}


def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set the adapters to those of `adapter_state()`."""
    mine = adapter_state(model)
    sizes, wanted = ({name: list(tensor.shape) for name, tensor in s.items()} for s in (state, mine))
    for name in sorted(sizes.keys() | wanted.keys()):
        if sizes.get(name) != wanted.get(name):
            raise PalestraError(
                f"the adapters do not fit the model: {name} is {sizes.get(name, 'absent')} and the model's is "
                f"{wanted.get(name, 'absent')}. Load them with their rank and targets, into the model they belong to"
            )
    for name, tensor in state.items():
        mine[name].copy_(tensor)


def _is_adapter(name: str) -> bool:
    return ".lora_a." in name or ".lora_b." in name


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_BLOCKS = {
    **dict.fromkeys(("attn.qkv", "attn.o"), "self_attn"),
    **dict.fromkeys(("mlp.gate_up", "mlp.down"), "mlp"),
    **dict.fromkeys(("mlp.shared.gate_up", "mlp.shared.down"), "mlp.shared_experts"),  # as in DeepSeek-V3
}
"""The module that a matrix of a layer belongs to in a Hugging Face model."""

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": (None, "LORA"),
    "bias": ("none", "none"),
    "init_lora_weights": (True, True, False, "gaussian"),  # others change the base model too
}
"""Keys of PEFT's config: the value where it is absent, and those there is code for."""
_READ = {"r", "lora_alpha", "target_modules", *_SUPPORTED}
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

    `adapters` are the model's own, whole, where those that it has are split over ranks. A `tokenizer` is written
    with them, and the tokens that end a generation: training may have changed its chat template, and what ends a turn.
    """
    from safetensors.torch import save

    modules = adapted(model)
    if not modules:
        raise UsageError("the model has no LoRA adapters to save")
    first = next(iter(modules.values()))
    rank = next(iter(first.lora_a.values())).shape[0]
    adapters = adapters or adapter_state(model)
    weights = {_peft_name(name, model): tensor.cpu().contiguous() for name, tensor in adapters.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": first.scale * rank,
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
    names, weights = {_peft_name(name, model): name for name in adapter_state(model)}, load_file(folder / WEIGHTS)
    if unknown := sorted(weights.keys() - names.keys()):
        raise PalestraError(f"{folder / WEIGHTS}: the model has no place for {unknown[0]} ({len(unknown)} such)")
    return {names[name]: tensor for name, tensor in weights.items()}


def _read(config: dict[str, Any], folder: Path) -> LoraSpec:
    odd = [key for key, value in config.items() if key not in _READ | _HARMLESS and value not in (None, False, [], {})]
    odd += [key for key, (default, *known) in _SUPPORTED.items() if config.get(key, default) not in known]
    if odd:
        listed = ", ".join(f"{key}: {json.dumps(config.get(key))}" for key in odd)
        raise UsageError(f"{folder / CONFIG}: adapters of this form are not supported ({listed})")
    targets = config["target_modules"]
    named = ["all"] if targets == "all-linear" else targets
    if not (isinstance(named, list) and named and set(named) <= {"all", *get_args(Matrix)}):
        raise UsageError(f"{folder / CONFIG}: expected target_modules of {', '.join(get_args(Matrix))}, got {targets}")
    return LoraSpec.model_validate({"rank": config["r"], "alpha": float(config["lora_alpha"]), "targets": named})


def _peft_name(name: str, model: Transformer) -> str:
    """layers.0.attn.qkv.lora_a.q_proj → base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight."""
    matrix, _, rest = name.partition(".lora_")
    layers, number, place = matrix.split(".", 2)
    letter, part = rest.split(".")
    gated = model.shape.moe is not None and model.shape.moe.gated_shared is not None
    block = _BLOCKS[place].replace("shared_experts", "shared_expert") if gated else _BLOCKS[place]
    return f"base_model.model.model.{layers}.{number}.{block}.{part}.lora_{letter.upper()}.weight"
