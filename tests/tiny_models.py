"""Tiny random checkpoints of every supported family, written by the real transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, CONTEXT, EOS = 96, 64, 2
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e3, "beta_fast": 8.0}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}


def _gpt2(**sizes: Any) -> transformers.GPT2Config:
    """GPT-2 has names of its own for sizes."""
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    names["max_position_embeddings"] = "n_positions"
    absent = {"intermediate_size", "num_key_value_heads"}
    return transformers.GPT2Config(**{names.get(key, key): sizes[key] for key in sizes if key not in absent})


# Windows are shorter than the sequences of the tests; scaled frequencies have wavelengths on both sides of the bounds.
_FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama2": (transformers.LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (
        transformers.LlamaConfig,
        {"rope_theta": 5e5, "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 16}},
    ),
    "llama_linear": (transformers.LlamaConfig, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "smollm2": (transformers.LlamaConfig, {"tie_word_embeddings": True, "rope_theta": 1e5, "rms_norm_eps": 1e-5}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 5, "head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2_yarn": (
        transformers.Qwen2Config,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**_EXPERTS, "head_dim": 16, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "olmoe": (transformers.OlmoeConfig, _EXPERTS),
    "mixtral": (
        transformers.MixtralConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        {"no_rope_layers": [0, 1, 0], "num_key_value_heads": 1, "head_dim": 16, "rope_theta": 1e4},
    ),
    "smollm3_window": (
        transformers.SmolLM3Config,
        {
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2": (
        transformers.Olmo2Config,
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "rope_theta": 5e5},
    ),
    "phi3": (transformers.Phi3Config, {"head_dim": 16, "sliding_window": 6, "resid_pdrop": 0.1}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        {**_EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, "head_dim": 16},
    ),
    "qwen2_moe_window": (
        transformers.Qwen2MoeConfig,
        {
            **_EXPERTS,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 3,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 11,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
        },
    ),
    "gemma3_wide": (
        transformers.Gemma3TextConfig,
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "head_dim": 6,
            "query_pre_attn_scalar": 6,
            "sliding_window": 9,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
    ),
    "olmo3": (
        transformers.Olmo3Config,
        {
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "head_dim": 16,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "olmo3_plain": (
        transformers.Olmo3Config,
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 7},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 5,
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 16, "truncate": False},
        },
    ),
    "gpt_oss_plain": (
        transformers.GptOssConfig,
        {
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "intermediate_size": 12,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "sliding_window": 9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e3},
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": (_gpt2, {"n_inner": 40}),
    "gpt2_untied": (_gpt2, {"num_attention_heads": 2, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}),
}
FAMILIES = tuple(_FAMILIES)


def tiny_checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """Write a random FP32 checkpoint of a family (one of FAMILIES) into the folder; the same one at every call.

    `changes` are to its config.
    """
    config, own = _FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(FAMILIES.index(family))
        model = transformers.AutoModelForCausalLM.from_config(config(**{**_SIZES, **own, **changes}))
        for name, parameter in model.named_parameters():
            # Far from the usual 0.02: logits that differ clearly, norms and biases that matter.
            mean, deviation = (
                (0.3 if "gemma" in family else 1.0, 0.2) if "norm" in name or "ln_" in name else (0.0, 0.3)
            )
            torch.nn.init.normal_(parameter, mean, deviation)
    model.save_pretrained(folder)
    return folder
