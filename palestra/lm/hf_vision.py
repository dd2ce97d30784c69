"""The vision tower in Hugging Face folders of Qwen2.5-VL: its part of config.json, and the names of its tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

from palestra.data.media import MERGE, PATCH, THETA, TIMES
from palestra.lm.hf_families import HARMLESS
from palestra.spec.shape import Shape, VisionSpec

TOKENS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
DEFAULTS = dict(zip(TOKENS, (151652, 151655, 151653), strict=True))
"""What transformers takes where they are absent."""
_FIELDS = {
    "layers": ("depth", 32),
    "width": ("hidden_size", 3584),
    "heads": ("num_heads", 16),
    "mlp": ("intermediate_size", 3420),
    "window": ("window_size", 112),
}
_ONLY = {
    "hidden_act": "silu",
    "in_channels": 3,
    "in_chans": 3,
    "patch_size": PATCH,
    "spatial_patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": TIMES,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "axial"},
}
"""Keys that would change the arithmetic, with the only value there is code for."""
_WITHOUT_EFFECT = {"tokens_per_second"}  # on images


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model: flat as on the Hub, or nested as transformers 5 writes it."""
    nested = config.get("text_config")
    flat = {**(nested if isinstance(nested, dict) else {}), **config}
    ropes = {key: flat[key] for key in ("rope_scaling", "rope_parameters") if isinstance(flat.get(key), dict)}
    for key, rope in ropes.items():
        named = {name: "default" if value == "mrope" else value for name, value in rope.items()}
        flat[key] = {name: value for name, value in named.items() if name != "mrope_section"}
    return {key: value for key, value in flat.items() if key not in ("text_config", "vision_config", *TOKENS)}


def read_vision(config: Mapping[str, Any], width: int, problems: list[str]) -> dict[str, Any] | None:
    """The fields of a `VisionSpec`, or what is not understood, added to the problems."""
    given = config.get("vision_config")
    if not isinstance(given, dict):
        problems.append("vision_config is missing")
        return None
    known = {key for key, _ in _FIELDS.values()} | {"fullatt_block_indexes", "out_hidden_size"} | _ONLY.keys()
    for key, value in given.items():
        if key in _ONLY and value is not None and value != _ONLY[key]:
            problems.append(f"vision_config.{key} = {value!r:.60} (only {_ONLY[key]!r} is supported)")
        elif key not in known | HARMLESS | _WITHOUT_EFFECT and value:
            problems.append(f"vision_config.{key} = {value!r:.60} (not understood)")
    if given.get("out_hidden_size", 3584) != width:
        problems.append(f"vision_config.out_hidden_size is not hidden_size = {width}")
    fields = {name: given.get(key, default) for name, (key, default) in _FIELDS.items()}
    sizes = [value for value in fields.values() if type(value) is int and 0 < value < 2**20]
    if len(sizes) < len(fields):
        problems.append(f"vision_config has sizes that are not whole numbers: {fields}")
    fields["full_layers"] = list(given.get("fullatt_block_indexes", (7, 15, 23, 31)))
    sources = [source for source in (config, config.get("text_config")) if isinstance(source, Mapping)]
    places = [source.get(key) for source in sources for key in ("rope_scaling", "rope_parameters")]
    fields["sections"] = next((rope["mrope_section"] for rope in places if rope and "mrope_section" in rope), None)
    if fields["sections"] is None:
        problems.append("rope_scaling.mrope_section is missing")
    fields["tokens"] = [config.get(key, DEFAULTS[key]) for key in TOKENS]
    return fields


def written_vision(vision: VisionSpec, shape: Shape) -> dict[str, Any]:
    """What config.json says of a tower, besides what it says of the language model."""
    sizes = {key: getattr(vision, name) for name, (key, _) in _FIELDS.items()}
    only = {key: value for key, value in _ONLY.items() if key != "rope_parameters"}  # transformers 4 does not know it
    tower = {**sizes, **only, "fullatt_block_indexes": vision.full_layers, "out_hidden_size": shape.width}
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": vision.sections}
    return {
        **dict(zip(TOKENS, vision.tokens or DEFAULTS.values(), strict=True)),
        "rope_scaling": rope,
        "vision_config": {"model_type": "qwen2_5_vl_vision", **tower},
    }


def vision_names(vision: VisionSpec) -> Iterator[tuple[str, str]]:
    """The names of the tower's tensors, in checkpoints and here, but for those that have another form there."""
    for layer in range(vision.layers):
        theirs, ours = f"visual.blocks.{layer}", f"vision.blocks.{layer}"
        yield f"{theirs}.norm1.weight", f"{ours}.attn_norm.weight"
        yield f"{theirs}.norm2.weight", f"{ours}.mlp_norm.weight"
        for kind in ("weight", "bias"):
            yield f"{theirs}.attn.qkv.{kind}", f"{ours}.attn.qkv.{kind}"
            yield f"{theirs}.attn.proj.{kind}", f"{ours}.attn.o.{kind}"
            yield f"{theirs}.mlp.down_proj.{kind}", f"{ours}.mlp.down.{kind}"
    yield "visual.merger.ln_q.weight", "vision.norm.weight"
    for kind in ("weight", "bias"):
        yield f"visual.merger.mlp.0.{kind}", f"vision.merge.{kind}"
        yield f"visual.merger.mlp.2.{kind}", f"vision.out.{kind}"
