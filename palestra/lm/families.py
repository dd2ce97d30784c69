"""The model families of Hugging Face, one row each: what their configs leave open and how they name weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Experts:
    """How a family writes its experts down."""

    count: tuple[str, ...]
    """The config's keys for the number of experts; the first is written."""
    width: str
    """The config's key for the hidden width of an expert."""
    normalise: str | None
    """The config's key for bringing the chosen experts' weights to sum 1; None always does."""
    block: str
    """The module that holds router and experts."""
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """What a `model_type` means."""

    model_type: str
    stem: str
    """Of the class names: Llama of LlamaForCausalLM."""
    qk_norm: Literal["head", "full"] | None = None
    attention_bias: bool = False
    window: Literal["none", "all", "switched", "layers"] = "none"
    """No window; `sliding_window` in all layers; the same if `use_sliding_window`; or in some layers."""
    experts: Experts | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes where a key is absent, if not what it takes for most families."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that would change the arithmetic, with the only value there is code for."""
    heads: Literal["any", "divide", "fill"] = "any"
    """Their number and width are free, their number divides the hidden size, or both together are the hidden size."""
    classifies: bool = True
    """Whether transformers has the family as a sequence classifier."""

    @property
    def architecture(self) -> str:
        """The class of the language model."""
        return f"{self.stem}ForCausalLM"

    @property
    def classifier(self) -> str:
        """The class of the model with a score in place of the output head."""
        return f"{self.stem}ForSequenceClassification"


_MIXTRAL = Experts(
    ("num_local_experts", "num_experts"), "intermediate_size", None, "block_sparse_moe", gate="w1", up="w3", down="w2"
)
_QWEN3_MOE = Experts(
    # transformers 4 writes the first name, 5 the second.
    ("num_experts", "num_local_experts"),
    "moe_intermediate_size",
    "norm_topk_prob",
    "mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
)
_OLMOE = replace(_QWEN3_MOE, width="intermediate_size")

# In the order in which a family is sought for a shape: the plainest that expresses it.
_ROWS = (
    Family(
        "llama",
        "Llama",
        fixed={"attention_bias": False, "mlp_bias": False},
        heads="divide",
    ),
    Family(
        "mistral",
        "Mistral",
        window="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "qwen2",
        "Qwen2",
        attention_bias=True,
        window="layers",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    Family(
        "qwen3",
        "Qwen3",
        qk_norm="head",
        window="layers",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
        fixed={"attention_bias": False},
    ),
    Family(
        "mixtral",
        "Mixtral",
        window="all",
        experts=_MIXTRAL,
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    ),
    Family(
        "qwen3_moe",
        "Qwen3Moe",
        qk_norm="head",
        window="switched",
        experts=_QWEN3_MOE,
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
        fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    Family(
        "olmoe",
        "Olmoe",
        qk_norm="full",
        experts=_OLMOE,
        defaults={"rms_norm_eps": 1e-5},
        fixed={"attention_bias": False, "clip_qkv": None},
        heads="fill",
        classifies=False,
    ),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ROWS}
"""By `model_type`."""

DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "norm_topk_prob": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
"""What transformers takes where a key is absent, for most families."""
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "is_causal": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "pruned_heads": {},
}
"""Keys of every family that would change the arithmetic, with the only value there is code for."""
# fmt: off
KEPT = frozenset({
    "attention_dropout", "bos_token_id", "initializer_range", "is_llama_config", "max_sequence_length",
    "output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef", "router_jitter_noise",
    "tokenizer_class", "transformers.js_config", "use_cache",
})
"""Keys on which the model's output does not depend (what training used, notes); a config written anew keeps them."""
HARMLESS = KEPT | {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
    "chunk_size_feed_forward", "do_sample", "dtype", "eos_token_id", "id2label", "is_decoder", "label2id",
    "max_length", "model_type", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
    "problem_type", "repetition_penalty", "return_dict", "task_specific_params", "temperature", "tie_encoder_decoder",
    "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "unsloth_fixed", "unsloth_version",
    "use_bfloat16",
}
"""Further such keys, which are not kept: they speak of one file, or of how transformers is to run it."""
# fmt: on
