"""Low-rank adapters (LoRA, rsLoRA, DoRA): added, merged, and as PEFT folders in and out."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.lm.hf import GENERATION_CONFIG, DamagedModel, special_ids
from palestra.lm.layers import Linear
from palestra.lm.model import Transformer
from palestra.lm.nf4 import Quantized
from palestra.lm.ranks import whole
from palestra.runs.store import read_json, write_bytes, write_json
from palestra.spec.lm import LoraSpec, Matrix


class LoraLinear(Linear):
    """A `Linear` of which some parts have adapters: W + scale · B · A. Its weight keeps its name and is not trained.

    With DoRA (Liu et al. 2024) each row of that sum has the norm that `lora_magnitude` learns, at first its own. With
    QLoRA W is `quantized`, and the weight is empty.
    """

    def __init__(self, base: Linear, targets: list[str], spec: LoraSpec):
        nn.Module.__init__(self)
        self.parts, self.weight, self.bias, self.spec, self.scale = base.parts, base.weight, base.bias, spec, spec.scale
        device, (_, inputs) = "cpu" if base.weight.is_meta else base.weight.device, base.weight.shape
        self.quantized = None
        if spec.quantize is not None:
            self.quantized = Quantized.of(base.weight, double=spec.double_quantize)
            self.weight = nn.Parameter(base.weight.new_empty(0), requires_grad=False)
        rows = {part: base.parts[part] for part in targets}
        self.lora_a = nn.ParameterDict({part: torch.zeros(spec.rank, inputs, device=device) for part in rows})
        self.lora_b = nn.ParameterDict({part: torch.zeros(n, spec.rank, device=device) for part, n in rows.items()})
        self.lora_magnitude = nn.ParameterDict({part: self._norms(part) for part in rows} if spec.dora else {})

    def forward(self, x: Tensor) -> Tensor:
        """The product, in the precision of `x`."""
        rows = list(self.parts.values())
        pieces = list(self._frozen(x).split(rows, dim=-1))
        for place, part in enumerate(self.parts):
            if part not in self.lora_a:
                continue
            low = F.linear(x, self.lora_a[part].to(x.dtype))
            change = F.linear(low, self.lora_b[part].to(x.dtype)) * self.scale
            if part in self.lora_magnitude:  # Equation 5 and §4.3: no gradient through the norms
                factor = (self.lora_magnitude[part] / self._norms(part)).to(x.dtype)
                bias = 0.0 if self.bias is None else self.bias.to(x.dtype).split(rows)[place]
                change = (pieces[place] - bias) * (factor - 1) + change * factor
            pieces[place] = pieces[place] + change
        return torch.cat(pieces, dim=-1)

    def _frozen(self, x: Tensor) -> Tensor:
        if self.quantized is None:
            return super().forward(x)
        product = self.quantized.product(x)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    @torch.no_grad()
    def _norms(self, part: str) -> Tensor:
        """Of the rows of a part's W + scale · B · A, in FP32."""
        base = self.weight.detach() if self.quantized is None else self.quantized.whole()
        rows = base.split(list(self.parts.values()))[[*self.parts].index(part)].float()
        return torch.addmm(rows, self.lora_b[part].float(), self.lora_a[part].float(), alpha=self.scale).norm(dim=1)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """The weight with its adapters added in FP32, in the weight's precision; whole where it is split."""
        base = whole(self.weight.detach()) if self.quantized is None else self.quantized.whole()
        merged = base.to(torch.float32, copy=True)
        for part, rows in zip(self.parts, merged.split(list(self.parts.values())), strict=True):
            if part in self.lora_a:
                rows.addmm_(whole(self.lora_b[part]).float(), whole(self.lora_a[part]).float(), alpha=self.scale)
            if part in self.lora_magnitude:
                rows.mul_((self.lora_magnitude[part] / rows.norm(dim=1))[:, None])
        return merged.to(self.weight.dtype)


@torch.no_grad()
def add_lora(model: Transformer, spec: LoraSpec, generator: torch.Generator) -> None:
    """Give every targeted matrix an adapter; all else but `modules_to_save` is frozen.

    The model computes what it did, because B is zero, up to the rounding of weights in 4 bits. A is initialized on the
    CPU, so that a seed gives the same adapters on every device.
    """
    if adapted(model):
        raise UsageError("the model has LoRA adapters already: merge them into its weights before adding others")
    every = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    linears = {name: module for name, module in every.items() if not name.startswith("vision.")}  # the tower is frozen
    parts = {part for linear in linears.values() for part in linear.parts}
    absent = [target for target in spec.targets if target not in {"all", *parts}]
    if absent:
        raise UsageError(
            f"lora.targets: the model has no {' and no '.join(absent)} outside routed experts; "
            f"take of {', '.join(part for part in get_args(Matrix) if part in parts)}"
        )
    if "lm_head" in spec.modules_to_save and model.head is None:
        raise UsageError("lora.modules_to_save: the model's lm_head is tied to its embedding: take embed_tokens")
    model.requires_grad_(False)
    for module in spec.modules_to_save:
        getattr(model, _WHOLE[module]).requires_grad_(True)
    for name, linear in linears.items():
        targets = [part for part in linear.parts if "all" in spec.targets or part in spec.targets]
        if not targets and spec.quantize is None:
            continue
        lora = LoraLinear(linear, targets, spec)
        for a in lora.lora_a.values():
            bound = a.shape[1] ** -0.5  # as `nn.Linear` and PEFT begin: Kaiming's uniform with a = √5
            a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, lora)


def frozen_copy(model: Transformer) -> Transformer:
    """A copy in the precision of the arithmetic that stays as the model began: without its adapters, which are new.

    They would not be nothing there: a learned norm of DoRA, rounded to bf16, is another one.
    """
    frozen = deepcopy(model).requires_grad_(False).to(model.dtype)
    for module in adapted(frozen).values():
        for adapters in (module.lora_a, module.lora_b, module.lora_magnitude):
            adapters.clear()
    return frozen


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
    """The adapters alone: `layers.0.attn.qkv.lora_a.q_proj` (rank, inputs), `….lora_b.q_proj` (outputs, rank), …

    And `embed` and `head` where they are trained beside them.
    """
    beside = {_WHOLE[module] for lora in [*adapted(model).values()][:1] for module in lora.spec.modules_to_save}
    return {name: p.detach() for name, p in model.named_parameters() if _is_adapter(name) or name in beside}


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
    return ".lora_" in name


_WHOLE = {"embed_tokens": "embed", "lm_head": "head"}
"""Our names of the matrices that `modules_to_save` may name."""
_EMBED, _HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
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
_READ = {
    *("r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "modules_to_save", "ensure_weight_tying"),
    *_SUPPORTED,
}
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
    spec = next(iter(modules.values())).spec
    adapters = adapters or adapter_state(model)
    weights = {_peft_name(name, model): tensor.cpu().contiguous() for name, tensor in adapters.items()}
    if _EMBED in weights and model.head is None:
        weights[_HEAD] = weights[_EMBED].clone()  # PEFT reads both
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
        "modules_to_save": spec.modules_to_save or None,
        "ensure_weight_tying": bool(spec.modules_to_save) and model.head is None,
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
    config = peft_config(folder)
    spec = _read(config, folder)
    if spec.modules_to_save and model.head is None and not config.get("ensure_weight_tying"):
        raise UsageError(
            f"{folder / CONFIG}: modules_to_save without ensure_weight_tying gives the model a head that is not its "
            "embedding any more, which is not supported"
        )
    add_lora(model, spec, torch.Generator())
    load_adapter_state(model, adapter_weights(folder, model))
    return spec


def peft_config(folder: Path) -> dict[str, Any]:
    """What a PEFT folder says of its adapters."""
    if not (folder / CONFIG).exists():
        raise UsageError(f"{folder} is not a folder of PEFT adapters: it has no {CONFIG}")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise UsageError(f"{folder / CONFIG} is not a mapping")
    return config


def adapter_weights(folder: Path, model: Transformer) -> dict[str, Tensor]:
    """The adapters in a PEFT folder, by the names they have in a model with such adapters."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path, names = folder / WEIGHTS, {_peft_name(name, model): name for name in adapter_state(model)}
    if not path.exists():
        raise UsageError(f"{folder} is not a folder of PEFT adapters: it has no {WEIGHTS}")
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise DamagedModel(f"{path} cannot be read ({error}); it is truncated or damaged: get it again") from error
    if model.head is None and _EMBED in weights:
        weights.pop(_HEAD, None)  # the same
    if unknown := sorted(weights.keys() - names.keys()):
        raise PalestraError(f"{path}: the model has no place for {unknown[0]} ({len(unknown)} such)")
    return {names[name]: tensor for name, tensor in weights.items()}


def _read(config: dict[str, Any], folder: Path) -> LoraSpec:
    odd = [key for key, value in config.items() if key not in _READ | _HARMLESS and value not in (None, False, [], {})]
    odd += [key for key, (default, *known) in _SUPPORTED.items() if config.get(key, default) not in known]
    if odd:
        listed = ", ".join(f"{key}: {json.dumps(config.get(key))}" for key in odd)
        raise UsageError(f"{folder / CONFIG}: adapters of this form are not supported ({listed})")
    targets = config.get("target_modules")
    named = ["all"] if targets == "all-linear" else targets
    named = _endings(named) if isinstance(named, list) else named
    if not (isinstance(named, list) and named and set(named) <= {"all", *get_args(Matrix)}):
        raise UsageError(f"{folder / CONFIG}: expected target_modules of {', '.join(get_args(Matrix))}, got {targets}")
    beside = config.get("modules_to_save") or []
    whole = _endings(beside) if isinstance(beside, list) else None
    if whole is None or not set(whole) <= _WHOLE.keys():
        raise UsageError(f"{folder / CONFIG}: expected modules_to_save of {', '.join(_WHOLE)}, got {beside}")
    sizes = {"rank": config.get("r"), "alpha": config.get("lora_alpha")}
    scaled = {"rslora": bool(config.get("use_rslora")), "dora": bool(config.get("use_dora"))}
    try:
        return LoraSpec.model_validate({**sizes, **scaled, "targets": named, "modules_to_save": whole})
    except ValidationError as error:
        keys = {"rank": "r", "alpha": "lora_alpha"}
        wrong = ", ".join(f"{keys[str(e['loc'][0])]} = {e['input']!r}: {e['msg']}" for e in error.errors())
        raise UsageError(f"{folder / CONFIG}: {wrong}") from error


def _endings(modules: list[str]) -> list[Any]:
    """The last parts of names: PEFT may write paths in place of names, or both."""
    return sorted({str(name).rpartition(".")[2] for name in modules})


def _peft_name(name: str, model: Transformer) -> str:
    """layers.0.attn.qkv.lora_a.q_proj → base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight."""
    if name in _WHOLE.values():
        return {"embed": _EMBED, "head": _HEAD}[name]
    matrix, _, rest = name.partition(".lora_")
    layers, number, place = matrix.split(".", 2)
    letter, part = rest.split(".")
    ending = "lora_magnitude_vector" if letter == "magnitude" else f"lora_{letter.upper()}.weight"
    gated = model.shape.moe is not None and model.shape.moe.gated_shared is not None
    block = _BLOCKS[place].replace("shared_experts", "shared_expert") if gated else _BLOCKS[place]
    return f"base_model.model.model.{layers}.{number}.{block}.{part}.{ending}"
