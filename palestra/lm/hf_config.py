"""config.json to Shape and back, by family: every key that changes the arithmetic is understood or refused."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from palestra.errors import UsageError
from palestra.lm.hf_families import (
    ACTIVATIONS,
    DEFAULTS,
    FAMILIES,
    FIELDS,
    FIXED,
    HARMLESS,
    KINDS,
    SCALINGS,
    Experts,
    Family,
)
from palestra.lm.hf_vision import language_part, read_vision, written_vision
from palestra.runs.store import read_json
from palestra.spec.renames import translated
from palestra.spec.shape import MoESpec, RopeScaling, Shape


class UnsupportedModel(UsageError):
    """A config that asks for arithmetic which the transformer does not have."""


MOST = {"num_hidden_layers": 1000, "num_experts": 1024, "num_local_experts": 1024}
"""Far beyond any model there is; a config that asks for more is damaged, and building its model would take minutes."""
MOST_PARAMETERS = 10**14
QUANTIZATION = "quantization_config"
OWN = "palestra"
"""The `model_type` of a shape that no family expresses; transformers does not load it."""


def read_folder(folder: Path) -> tuple[dict[str, Any], Shape]:
    """The config.json of a model folder, and the shape that it describes."""
    path = folder / "config.json"
    if not path.exists():
        raise UsageError(f"{folder} is not a model folder: it has no config.json")
    config = read_json(path)
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a mapping")
    return config, read_config(config, str(path))


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the config is of a model that scores sequences."""
    return "ForSequenceClassification" in str(config.get("architectures"))


def read_config(config: Mapping[str, Any], where: str) -> Shape:
    """The shape that a config.json describes; whatever is not understood is an error that names each such key."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or model_type not in (*FAMILIES, OWN):
        raise UnsupportedModel(
            f"{where} has model_type {model_type!r}, which is not supported; supported are: {', '.join(FAMILIES)}"
        )
    family = FAMILIES.get(model_type)
    shape, problems = _read(config, family)
    if family is not None:
        classes = [family.architecture, family.classifier] if family.classifies else [family.architecture]
        if architectures is not None and architectures not in [[name] for name in classes]:
            raise UnsupportedModel(
                f"{where} has architectures {architectures}, which is not supported for model_type {model_type}; "
                f"expected {' or '.join(classes)}"
            )
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
        if is_classifier(config) and count != 1:
            problems.append(f"a classifier into {count} labels (expected one label: the score of a reward model)")
    if shape is None or problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise UnsupportedModel(f"{where} describes a {model_type} model that is not supported:{listed}")
    return shape


def write_config(shape: Shape, family: Family) -> dict[str, Any]:
    """What config.json says of a canonical shape, in the layout that transformers 4 and 5 both read."""
    config: dict[str, Any] = {
        "model_type": family.model_type,
        **{key: getattr(shape, name) for name, (key, _) in _fields(family).items() if key is not None},
        **ACTIVATIONS[family.always.get("activation")],
        **family.fixed,
    }
    if "n_inner" in config:
        config["n_inner"] = None if shape.mlp == 4 * shape.width else shape.mlp
    if "positions" not in family.always:
        config |= _written_ropes(shape, family)
    if family.vision and shape.vision is not None:
        config |= written_vision(shape.vision, shape)
    if family.window == "types":
        config["sliding_window"] = shape.window or shape.context  # transformers wants one even where no layer has it
    if "rope_local_base_freq" in family.defaults:
        config["rope_local_base_freq"] = shape.local_rope_theta or shape.rope_theta
    if "query_pre_attn_scalar" in family.defaults:
        config["query_pre_attn_scalar"] = shape.query_pre_attn_scalar or shape.dim
    if family.nope:
        config["no_rope_layers"] = [int(layer not in (shape.nope_layers or ())) for layer in range(shape.layers)]
    if family.window not in ("none", "types"):
        config["sliding_window"] = shape.window
    if family.window in ("switched", "layers", "switched_types"):
        config["use_sliding_window"] = shape.window is not None
    if family.window == "layers":
        config["max_window_layers"] = shape.layers if shape.window is None else shape.window_from
    if family.window in ("types", "switched_types"):
        config["layer_types"] = [KINDS[shape.window_of(layer) is not None] for layer in range(shape.layers)]
    if family.experts is not None and shape.moe is not None:
        config[family.experts.count[0]] = shape.moe.experts
        config[family.experts.width] = shape.moe.mlp
        config["num_experts_per_tok"] = shape.moe.active
        if family.experts.normalize is not None:
            config[family.experts.normalize] = shape.moe.normalize
        if family.experts.shared is not None:
            config[family.experts.shared] = shape.moe.gated_shared
    return config


def _fields(family: Family) -> dict[str, tuple[str | None, type]]:
    """`FIELDS` with the family's keys."""
    return {name: (family.keys.get(key, key), kind) for name, (key, kind) in FIELDS.items()}


def _written_ropes(shape: Shape, family: Family) -> dict[str, Any]:
    config: dict[str, Any] = {"rope_theta": shape.rope_theta, "rope_scaling": None}
    if (scaling := shape.rope_scaling) is not None:
        written = {key: getattr(scaling, name) for name, (key, _) in SCALINGS[scaling.type].items()}
        config["rope_scaling"] = {"rope_type": scaling.type, "factor": scaling.factor, **written}
        if scaling.type == "yarn":
            config["rope_scaling"]["attention_factor"] = scaling.attention_factor
        if not scaling.truncate:
            config["rope_scaling"]["truncate"] = False
    full = {"rope_type": "default", **(config["rope_scaling"] or {}), "rope_theta": shape.rope_theta}
    if family.ropes == "by_type":
        local = shape.local_rope_theta
        sliding = full if local is None else {"rope_type": "default", "rope_theta": local}
        config["rope_parameters"] = dict(zip(KINDS, (full, sliding), strict=True))
    elif "rope_parameters" in family.defaults:  # else they would be those
        config["rope_parameters"] = full
    return config


def own_config(shape: Shape) -> dict[str, Any]:
    """A config.json for a shape that no family expresses."""
    return {"model_type": OWN, "architectures": ["PalestraForCausalLM"], "shape": shape.model_dump()}


def family_of(shape: Shape, preferred: str | None = None) -> Family | None:
    """The family, `preferred` if possible, whose config expresses all of the shape; None where there is none."""
    order = sorted(FAMILIES.values(), key=lambda family: family.model_type != preferred)
    wanted = canonical(shape)
    return next((family for family in order if _read(write_config(wanted, family), family) == (wanted, [])), None)


def canonical(shape: Shape) -> Shape:
    """The one shape of all that have the same parameters and the same forward pass."""
    moe, scaling = shape.moe, shape.rope_scaling
    full = [layer for layer in range(shape.layers) if shape.window_of(layer) is None]
    window = shape.window if len(full) < shape.layers else None
    scattered = window is not None and full != list(range(len(full)))
    if moe is not None:
        moe = moe.model_copy(update={"balance": 0.0, "z_loss": 0.0})
    if scaling is not None and scaling.type == "linear":
        scaling = RopeScaling(type="linear", factor=scaling.factor)
    elif scaling is not None and scaling.type == "llama3":
        scaling = scaling.model_copy(update={"attention_factor": None, "truncate": True})
    elif scaling is not None and scaling.attention_factor is None:
        scaling = scaling.model_copy(update={"attention_factor": _temperature(scaling.factor)})
    sizes = {"kv_heads": shape.kv, "head_dim": shape.dim, "mlp": shape.mlp if moe is None else moe.mlp}
    windows = {"window": window, "window_from": 0 if window is None or scattered else len(full)}
    lists = {"full_layers": full if scattered else None, "nope_layers": sorted({*(shape.nope_layers or ())}) or None}
    local, scalar = shape.local_rope_theta, shape.query_pre_attn_scalar
    same = window is None or (local == shape.rope_theta and scaling is None)
    ropes = {"rope_scaling": scaling, "local_rope_theta": None if same else local}
    if shape.positions is not None:
        ropes |= {"rope_theta": 10000.0, "rope_scaling": None, "local_rope_theta": None}
        lists["nope_layers"] = None
    others = {"query_pre_attn_scalar": None if scalar == shape.dim else scalar, "moe": moe}
    others["attention_bias"] = shape.attention_bias and not shape.biases
    return shape.model_copy(update={**sizes, **windows, **lists, **ropes, **others})


class _Keys:
    """A config of which every key must be read, or be known to be harmless; problems are collected."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ""):
        self.config, self.defaults, self.prefix = config, defaults, prefix
        self.asked: set[str] = set()
        self.problems: list[str] = []

    def take(self, key: str, kind: type, *aliases: str, nullable: bool = False) -> Any:
        """The value, or the default where it is absent. A null means absent too, unless it is `nullable`."""
        self.asked |= {key, *aliases}
        if nullable:
            value = self.config.get(key, self.defaults.get(key))
            return None if value is None else self._checked(key, value, kind)
        value = next((self.config[name] for name in (key, *aliases) if self.config.get(name) is not None), None)
        if value is None and key not in self.defaults:
            self.problems.append(f"{self.prefix}{key} is missing")
        return self.defaults.get(key) if value is None else self._checked(key, value, kind)

    def _checked(self, key: str, value: Any, kind: type) -> Any:
        if kind is float and type(value) is int and abs(value) < 2**53:
            return float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            self.problems.append(f"{self.prefix}{key} = {value!r:.60} (expected {kind.__name__})")
        elif kind is int and not 0 <= value <= MOST.get(key, 2**30):
            self.problems.append(f"{self.prefix}{key} = {value!r:.60} (expected 0 to {MOST.get(key, 2**30)})")
        return value

    def expect(self, key: str, only: Any) -> None:
        """Refuse any value but one; absent and null mean that one."""
        self.asked.add(key)
        value = self.config.get(key)
        if value is not None and value != only:
            self.problems.append(f"{self.prefix}{key} = {value!r} (only {only!r} is supported)")

    def refuse_rest(self, harmless: frozenset[str]) -> None:
        """Refuse keys that were not read, unless they are harmless or off: null, false, 0, empty."""
        for key, value in self.config.items():
            if key not in self.asked and key not in harmless and value:
                self.problems.append(f"{self.prefix}{key} = {value!r:.60} (not understood)")


def _read(config: Mapping[str, Any], family: Family | None) -> tuple[Shape | None, list[str]]:
    """The shape and the problems; without problems there is a shape. Without a family it is in our own form."""
    try:
        if family is None:
            shape, problems = Shape.model_validate(translated(config.get("shape"))), []
        else:
            shape, problems = _read_shape(config, family)
    except ValidationError as error:
        return None, [f"{'.'.join(map(str, e['loc']))} = {e['input']!r}: {e['msg']}" for e in error.errors()]
    if shape is not None:
        count = shape.model_copy(update={"vocab": shape.vocab or 1}).parameters()
        if shape.layers > MOST["num_hidden_layers"] or count > MOST_PARAMETERS:
            problems.append(f"{shape.layers} layers, {count:.1e} parameters: larger than any model there is")
    return shape, problems


def _read_shape(config: Mapping[str, Any], family: Family) -> tuple[Shape | None, list[str]]:
    whole, config = config, language_part(config) if family.vision else config
    keys = _Keys(config, {**DEFAULTS, **family.defaults})
    for key, only in {**FIXED, **ACTIVATIONS[family.always.get("activation")], **family.fixed}.items():
        keys.expect(key, only)
    if family.experts is not None and family.experts.stacked:
        _read_quantization(keys)
    refused = len(keys.problems)
    fields: dict[str, Any] = {"qk_norm": family.qk_norm, "attention_bias": family.attention_bias, **family.always}
    for name, (key, kind) in _fields(family).items():
        fields[name] = None if key is None else keys.take(key, kind, nullable=name in ("kv_heads", "head_dim"))
    fields["tied"] = fields["tied"] or is_classifier(config)
    width, heads = fields["width"], fields["heads"]
    if heads == 0:
        keys.problems.append("num_attention_heads = 0 (expected at least 1)")
    if len(keys.problems) == refused:  # else what was not read yet would seem not to be understood
        fields["mlp"] = 4 * width if fields["mlp"] is None else fields["mlp"]
        fields["kv_heads"] = heads if fields["kv_heads"] is None else fields["kv_heads"]
        fields["head_dim"] = width // heads if fields["head_dim"] is None else fields["head_dim"]
        if family.heads != "any" and width % heads:
            keys.problems.append(f"hidden_size = {width} is not a multiple of num_attention_heads = {heads}")
        if family.heads == "fill" and fields["head_dim"] * heads != width:
            keys.problems.append(f"head_dim = {fields['head_dim']} is not hidden_size / num_attention_heads")
        if "positions" not in family.always:
            fields |= _read_ropes(keys, family, fields["context"])
        if "query_pre_attn_scalar" in family.defaults:
            fields["query_pre_attn_scalar"] = keys.take("query_pre_attn_scalar", int)
        fields["nope_layers"] = _read_nope(keys, fields["layers"]) if family.nope else None
        if family.window in ("types", "switched_types"):
            fields["window"], fields["full_layers"] = _read_types(keys, family, fields["layers"])
        else:
            fields["window"], fields["window_from"] = _read_window(keys, family, fields["layers"])
        fields["moe"] = None if family.experts is None else _read_experts(keys, family.experts)
        fields["vision"] = read_vision(whole, fields["width"], keys.problems) if family.vision else None
        keys.refuse_rest(HARMLESS | family.harmless)
    if keys.problems:
        return None, keys.problems
    shape = canonical(Shape(**fields))
    return shape, [f"{'.'.join(map(str, path))}: {reason}" for path, reason in shape.all_conflicts()]


def _read_quantization(keys: _Keys) -> None:
    """Published gpt-oss has its experts in MXFP4, which are read as bf16."""
    keys.asked.add(QUANTIZATION)
    method = keys.config.get(QUANTIZATION) or {"quant_method": "mxfp4"}
    if not isinstance(method, dict) or method.get("quant_method") != "mxfp4":
        keys.problems.append(f"{QUANTIZATION} = {method!r:.60} (only mxfp4 is supported)")


def _read_ropes(keys: _Keys, family: Family, context: int) -> dict[str, Any]:
    """Bases and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    theta = keys.take("rope_theta", float)
    keys.asked |= {"rope_parameters", "rope_scaling"}
    names = ("rope_parameters", "rope_scaling")
    default = {} if any(map(keys.config.get, names)) else family.defaults.get("rope_parameters", {})
    given = {name: keys.config.get(name) or (default if name == "rope_parameters" else {}) for name in names}
    for name, value in given.items():
        if not isinstance(value, dict):
            keys.problems.append(f"{name} = {value!r} is not a mapping")
            return {}
    parameters, scaling = given.values()
    if family.ropes == "one":
        name = "rope_scaling" if scaling else "rope_parameters"
        theta, scaling = _read_rope(keys, family, name, scaling or parameters, theta, context)
        return {"rope_theta": theta, "rope_scaling": scaling}
    local = keys.take("rope_local_base_freq", float) if "rope_local_base_freq" in family.defaults else None
    by_kind = _Keys(parameters, {kind: {} for kind in KINDS}, "rope_parameters.")
    full, sliding = (by_kind.take(kind, dict) for kind in KINDS)
    by_kind.refuse_rest(frozenset())
    keys.problems += by_kind.problems
    if by_kind.problems:
        return {}
    full = _read_rope(keys, family, "rope_parameters.full_attention", {**full, **scaling}, theta, context)
    local = family.defaults["rope_theta"] if local is None else local
    sliding = _read_rope(keys, family, "rope_parameters.sliding_attention", sliding, local, context)
    if sliding[1] is not None and sliding != full:
        keys.problems.append("rope_parameters.sliding_attention is scaled (expected rope_type default)")
    local = None if sliding == full else sliding[0]
    return {"rope_theta": full[0], "rope_scaling": full[1], "local_rope_theta": local}


def _read_rope(
    keys: _Keys, family: Family, name: str, rope_config: Mapping[str, Any], theta: float, context: int
) -> tuple[float | None, RopeScaling | None]:
    """One base and its scaling."""
    ends = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    defaults = {"rope_theta": theta, "original_max_position_embeddings": context, **ends}
    rope = _Keys(rope_config, {**defaults, "rope_type": rope_config.get("type", "default")}, f"{name}.")
    rope.asked.add("type")
    rope.expect("partial_rotary_factor", 1.0)
    theta, kind = rope.take("rope_theta", float), rope.take("rope_type", str)
    if kind != "yarn" or family.ropes == "by_type":
        rope.expect("truncate", True)
    scaling = None
    supported = tuple(SCALINGS) if family.scaled else ()
    if kind in supported:  # of a broken config it may be any value, hashable or not
        scaling = _read_scaling(rope, kind)
    elif kind != "default":
        rope.problems.append(f"{name}.rope_type = {kind!r} (supported: {', '.join(('default', *supported))})")
    rope.refuse_rest(frozenset({"original_max_position_embeddings"} if kind in ("default", "linear") else ()))
    keys.problems += rope.problems
    return theta, scaling


def _read_scaling(rope: _Keys, kind: Any) -> RopeScaling | None:
    fields = {"factor": rope.take("factor", float)}
    fields |= {name: rope.take(key, expected) for name, (key, expected) in SCALINGS[kind].items()}
    if kind == "yarn":
        keys = ("mscale", "mscale_all_dim", "attention_factor")
        scale, of_all, factor = (rope.take(key, float, nullable=True) for key in keys)
        if factor is None and scale and of_all and not rope.problems:
            factor = _temperature(fields["factor"], scale) / _temperature(fields["factor"], of_all)
        fields |= {"attention_factor": factor, "truncate": rope.take("truncate", bool)}
    return None if rope.problems else RopeScaling(type=kind, **fields)


def _temperature(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines with (Peng et al. 2023, equation 15)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _read_window(keys: _Keys, family: Family, layers: int) -> tuple[int | None, int]:
    """The window and the first layer that has it."""
    if family.window == "none":
        return None, 0
    window = keys.take("sliding_window", int, nullable=True)
    if family.window == "all":
        return window, 0
    first = 0
    switched_on = keys.take("use_sliding_window", bool)
    if family.window == "layers":
        first = keys.take("max_window_layers", int)
        keys.asked.add("layer_types")
        kinds = keys.config.get("layer_types")
        if kinds is not None and not isinstance(kinds, list):
            keys.problems.append(f"layer_types = {kinds!r:.60} is not a list")
        elif kinds is not None:
            first = next((i for i, kind in enumerate(kinds) if kind == "sliding_attention"), layers)
            if list(kinds) != ["full_attention"] * first + ["sliding_attention"] * (layers - first):
                keys.problems.append(f"layer_types = {kinds!r} (supported are full layers, then sliding ones)")
    elif not switched_on:
        keys.asked.add("max_window_layers")  # in real Qwen3-MoE configs, without a meaning there
    return (window, first) if switched_on and first < layers else (None, 0)


def _read_types(keys: _Keys, family: Family, layers: int) -> tuple[int | None, list[int] | None]:
    """The window and the layers that have full attention, by `layer_types`."""
    window = keys.take("sliding_window", int, nullable=True)
    if family.window == "types":
        every, switched_on = keys.take("sliding_window_pattern", int), True
        default = [KINDS[bool((layer + 1) % (every or 1))] for layer in range(layers)] if not keys.problems else []
    else:
        switched_on, default = keys.take("use_sliding_window", bool), [KINDS[False]] * layers
    keys.asked |= {"layer_types", "max_window_layers"}
    kinds = keys.config.get("layer_types")
    if kinds is None and switched_on and family.window != "types":
        keys.problems.append("layer_types is missing, with use_sliding_window = True")
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in KINDS for kind in kinds):
        keys.problems.append(f"layer_types = {kinds!r:.60} (expected one of {', '.join(KINDS)} for each layer)")
        return None, None
    full = [layer for layer in range(layers) if kinds[layer] == KINDS[False]]
    if len(full) < layers and not (switched_on and window):
        keys.problems.append("layer_types has sliding_attention (expected full_attention without sliding_window)")
    return (window, full) if len(full) < layers else (None, None)


def _read_nope(keys: _Keys, layers: int) -> list[int]:
    """The layers without rotary positions."""
    every = keys.take("no_rope_layer_interval", int)
    keys.asked.add("no_rope_layers")
    rotary = keys.config.get("no_rope_layers")
    if rotary is None and every:
        return list(range(every - 1, layers, every))
    if not isinstance(rotary, list) or len(rotary) < layers or not all(flag in (0, 1) for flag in rotary):
        keys.problems.append(f"no_rope_layers = {rotary!r:.60} (expected 0 or 1 for each of {layers} layers)")
        return []
    return [layer for layer in range(layers) if not rotary[layer]]


def _read_experts(keys: _Keys, experts: Experts) -> MoESpec | None:
    fields: dict[str, Any] = {
        "experts": keys.take(experts.count[0], int, *experts.count[1:]),
        "active": keys.take("num_experts_per_tok", int),
        "mlp": keys.take(experts.width, int),
        "normalize": True if experts.normalize is None else keys.take(experts.normalize, bool),
        "gated_shared": None if experts.shared is None else keys.take(experts.shared, int),
        "activation": experts.activation,
    }
    return None if keys.problems else MoESpec(**fields)
