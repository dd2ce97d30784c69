"""The families of Hugging Face models: what a `model_type` means, its keys in config.json, the names of its tensors."""

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
    normalize: str | None
    """The config's key for bringing the chosen experts' weights to sum 1; None always does."""
    block: str
    """The module that holds router and experts."""
    gate: str
    up: str
    down: str
    shared: str | None = None
    """The config's key for the hidden width of a gated shared expert; None: there is none."""
    router: str = "gate"
    """The module of the router, in the block."""
    stacked: bool = False
    """Whether `gate` is one tensor with gate and up projections of all experts, by inputs, and `down` likewise."""
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """That of `MoESpec`."""


@dataclass(frozen=True)
class Family:
    """What a `model_type` means."""

    model_type: str
    stem: str
    """Of the class names: Llama of LlamaForCausalLM."""
    ending: str = "ForCausalLM"
    """Of the class of the language model."""
    qk_norm: Literal["head", "full"] | None = None
    attention_bias: bool = False
    always: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `Shape` that the family always has, without a key in its config."""
    window: Literal["none", "all", "switched", "layers", "types", "switched_types"] = "none"
    """No window; `sliding_window` in all layers; the same if `use_sliding_window`; or then from one layer on; or in
    those that `layer_types` says, always or if `use_sliding_window`."""
    ropes: Literal["one", "by_type"] = "one"
    """Whether `rope_parameters` are one mapping, or one for each kind of `layer_types`."""
    nope: bool = False
    """Whether `no_rope_layers` may list layers without rotary positions."""
    experts: Experts | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes where a key is absent, if not what it takes for most families."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that would change the arithmetic, with the only value there is code for."""
    harmless: frozenset[str] = frozenset()
    """Keys on which the output does not depend in this family alone."""
    scaled: bool = True
    """Whether there is code for its `rope_scaling`."""
    fused: bool = False
    """Whether its checkpoints have queries, keys and values in one matrix, and gate and up projections in another."""
    heads: Literal["any", "divide", "fill"] = "any"
    """Their number and width are free, their number divides the hidden size, or both together are the hidden size."""
    classifies: bool = True
    """Whether transformers has the family as a sequence classifier."""
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """Other keys in place of those in `FIELDS`; None: it has no such key."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of the names of tensors, in place of Llama's."""
    prefix: str = ""
    """What names of tensors begin with that some checkpoints leave out."""
    transposed: bool = False
    """Whether matrices of layers are stored by their inputs."""
    vision: bool = False
    """Whether it has a vision tower, whose keys and tensors are those of `hf_vision`."""

    @property
    def architecture(self) -> str:
        """The class of the language model."""
        return f"{self.stem}{self.ending}"

    @property
    def classifier(self) -> str:
        """The class of the model with a score in place of the output head."""
        return f"{self.stem}ForSequenceClassification"


# fmt: off
_MIXTRAL = Experts(("num_local_experts", "num_experts"), "intermediate_size", None, "block_sparse_moe",
                   gate="w1", up="w3", down="w2")
# transformers 4 writes the first name of the number of experts, 5 the second.
_QWEN3_MOE = Experts(("num_experts", "num_local_experts"), "moe_intermediate_size", "norm_topk_prob", "mlp",
                     gate="gate_proj", up="up_proj", down="down_proj")
_QWEN2_MOE = replace(_QWEN3_MOE, shared="shared_expert_intermediate_size")
_OLMOE = replace(_QWEN3_MOE, width="intermediate_size")

_GPT_OSS = Experts(("num_local_experts", "num_experts"), "intermediate_size", None, "mlp", gate="gate_up_proj",
                   up="gate_up_proj", down="down_proj", router="router", stacked=True, activation="clamped_swiglu")
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "biases": True}
_GEMMA3 = {"norm_order": "both", "norm_offset": 1.0, "embed_scale": "sqrt_width", "activation": "geglu"}

# In the order in which a family is sought for a shape: the plainest that expresses it.
_ROWS = (
    Family("llama", "Llama", heads="divide", fixed={"attention_bias": False, "mlp_bias": False}),
    Family("mistral", "Mistral", window="all", defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    Family("qwen2", "Qwen2", attention_bias=True, window="layers",
           defaults={"num_key_value_heads": 32, "sliding_window": 4096}),
    Family("qwen3", "Qwen3", qk_norm="head", window="layers", fixed={"attention_bias": False},
           defaults={"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128}),
    Family("mixtral", "Mixtral", window="all", experts=_MIXTRAL,
           defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    Family("qwen3_moe", "Qwen3Moe", qk_norm="head", window="switched", experts=_QWEN3_MOE,
           defaults={"num_key_value_heads": 4, "sliding_window": 4096},
           fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    Family("olmoe", "Olmoe", qk_norm="full", experts=_OLMOE, heads="fill", classifies=False,
           defaults={"rms_norm_eps": 1e-5}, fixed={"attention_bias": False, "clip_qkv": None}),
    Family("smollm3", "SmolLM3", nope=True, window="switched_types", fixed={"attention_bias": False, "mlp_bias": False},
           defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}),
    Family("olmo2", "Olmo2", qk_norm="full", always={"norm_order": "post"}, defaults={"rms_norm_eps": 1e-5},
           fixed={"attention_bias": False}),
    Family("qwen2_moe", "Qwen2Moe", attention_bias=True, window="switched_types", experts=_QWEN2_MOE,
           defaults={"num_key_value_heads": 16, "sliding_window": 4096},
           fixed={"qkv_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    Family("gemma3_text", "Gemma3", qk_norm="head", always=_GEMMA3, window="types", ropes="by_type",
           heads="divide", classifies=False,
           defaults={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "rope_theta": 1e6,
                     "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
           fixed={"attention_bias": False}, harmless=frozenset({"_sliding_window_pattern"})),
    Family("olmo3", "Olmo3", qk_norm="full", always={"norm_order": "post"}, window="types", ropes="by_type",
           defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 5e5},
           fixed={"attention_bias": False}),
    # Published with code of its own, which transformers has since.
    Family("phi3", "Phi3", window="all", fused=True, scaled=False, defaults={"rms_norm_eps": 1e-5},
           harmless=frozenset({"auto_map", "original_max_position_embeddings"})),
    Family("gpt_oss", "GptOss", always={"biases": True, "sinks": True}, window="types", experts=_GPT_OSS,
           defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2,
                     "rms_norm_eps": 1e-5, "rope_theta": 1.5e5, "rope_parameters": _YARN},
           fixed={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
           harmless=frozenset({"experts_per_token", "initial_context_length"})),
    Family("qwen2_5_vl", "Qwen2_5_VL", "ForConditionalGeneration", attention_bias=True, window="layers", vision=True,
           classifies=False, defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_window_layers": 80,
                                       "rms_norm_eps": 1e-5, "rope_theta": 1e6}),
    Family("gpt2", "GPT2", "LMHeadModel", always=_GPT2, heads="fill", fused=True, transposed=True,
           keys={"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
                 "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
                 "rms_norm_eps": "layer_norm_epsilon", "num_key_value_heads": None, "head_dim": None},
           defaults={"layer_norm_epsilon": 1e-5, "n_inner": None, "tie_word_embeddings": True},
           fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
                  "reorder_and_upcast_attn": False},
           harmless=frozenset({"n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
                               "summary_type", "summary_use_proj"}),
           prefix="transformer.",
           names={"model.embed_tokens": "transformer.wte", "model.positions": "transformer.wpe",
                  "model.layers": "transformer.h", "model.norm": "transformer.ln_f", "input_layernorm": "ln_1",
                  "post_attention_layernorm": "ln_2", "self_attn.qkv_proj": "attn.c_attn",
                  "self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ROWS}
"""By `model_type`."""

FIELDS: dict[str, tuple[str, type]] = {
    "vocab": ("vocab_size", int), "width": ("hidden_size", int), "mlp": ("intermediate_size", int),
    "layers": ("num_hidden_layers", int), "heads": ("num_attention_heads", int),
    "kv_heads": ("num_key_value_heads", int), "head_dim": ("head_dim", int),
    "context": ("max_position_embeddings", int), "norm_eps": ("rms_norm_eps", float),
    "tied": ("tie_word_embeddings", bool),
}
"""Fields of `Shape` that all families have under the same key."""
SCALINGS: dict[str, dict[str, tuple[str, type]]] = {
    "linear": {},
    "llama3": {"original_context": ("original_max_position_embeddings", int),
               "low": ("low_freq_factor", float), "high": ("high_freq_factor", float)},
    "yarn": {"original_context": ("original_max_position_embeddings", int),
             "low": ("beta_slow", float), "high": ("beta_fast", float)},
}
"""Fields of `RopeScaling` besides the factor, by `rope_type`."""
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "norm_topk_prob": False, "sliding_window": None, "use_sliding_window": False,
    "max_window_layers": 28, "no_rope_layer_interval": 4, "sliding_window_pattern": 6,
}
"""What transformers takes where a key is absent, for most families."""
ACTIVATIONS = {
    None: {"hidden_act": "silu"}, "geglu": {"hidden_activation": "gelu_pytorch_tanh"},
    "gelu": {"activation_function": "gelu_new"},
}
"""How configs say the activation of a shape."""
KINDS = ("full_attention", "sliding_attention")
"""Of `layer_types`: without a window, and with it."""
FIXED: dict[str, Any] = {
    "is_causal": True, "is_encoder_decoder": False, "add_cross_attention": False,
    "partial_rotary_factor": 1.0, "rope_interleaved": False, "pruned_heads": {},
}
"""Keys of every family that would change the arithmetic, with the only value there is code for."""
KEPT = frozenset({
    "attention_dropout", "attn_pdrop", "bos_token_id", "embd_pdrop", "initializer_range", "is_llama_config",
    "max_sequence_length", "output_router_logits", "pad_token_id", "pretraining_tp", "resid_pdrop",
    "router_aux_loss_coef", "router_jitter_noise",
    "tokenizer_class", "transformers.js_config", "use_cache", "video_token_id", "vision_token_id",
})
"""Keys on which the model's output does not depend (what training used, notes); a config written anew keeps them."""
HARMLESS = KEPT | {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures", "cache_implementation",
    "chunk_size_feed_forward", "do_sample", "dtype", "eos_token_id", "id2label", "is_decoder", "label2id",
    "max_length", "model_type", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
    "problem_type", "repetition_penalty", "return_dict", "task_specific_params", "temperature", "tie_encoder_decoder",
    "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "unsloth_fixed", "unsloth_version",
    "use_bfloat16",
}
"""Further such keys, which are not kept: they speak of one file, or of how transformers is to run it."""
# fmt: on

NORMS = {
    None: {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {"post_attention_layernorm": "attn_out_norm", "post_feedforward_layernorm": "mlp_out_norm"},
    "both": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
}
"""The norms of a layer by their names in Hugging Face models, for each order."""
