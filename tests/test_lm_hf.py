"""Hugging Face folders: every family has the logits of transformers, round trips bit for bit, or is refused by name."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zygote
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import CONTEXT, FAMILIES, VOCAB, tiny_checkpoint
from torch import Tensor

from palestra.data.tokenizers import character_tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.lm.batch import Batch, forward
from palestra.lm.convert import convert
from palestra.lm.head import logits
from palestra.lm.hf import DamagedModel, Shards, check_names, load_pretrained, save_pretrained, save_weights, slots
from palestra.lm.hf_config import UnsupportedModel, canonical, family_of, own_config, read_config, write_config
from palestra.lm.hf_families import FAMILIES as FAMILY_ROWS
from palestra.lm.model import Transformer
from palestra.spec.shape import MoESpec, RopeScaling, Shape

transformers.utils.logging.disable_progress_bar()
LENGTHS = (17, 40, 3, 1, 16)
DENSE: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "mlp": 48,
    "context": CONTEXT,
    "vocab": VOCAB,
}
YARN = RopeScaling(type="yarn", factor=4.0, original_context=16, low=1.0, high=8.0, attention_factor=1.3)
GEMMA3: dict[str, Any] = {
    "qk_norm": "head", "norm_order": "both", "norm_offset": 1.0, "embed_scale": "sqrt_width", "activation": "geglu",
}  # fmt: skip
MOE: dict[str, Any] = {"experts": 4, "active": 2, "mlp": 24}
GPT_OSS: dict[str, Any] = {"biases": True, "sinks": True, "moe": MoESpec(**MOE, activation="clamped_swiglu")}
GPT2: dict[str, Any] = {
    "biases": True, "norm": "layer", "positions": "learned", "activation": "gelu", "kv_heads": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a family; only to be read."""
    root = tmp_path_factory.mktemp("families")
    return lambda family: root / family if (root / family).exists() else tiny_checkpoint(family, root / family)


@pytest.fixture
def copied(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a family's checkpoint to spoil: keys of its config changed, its tensors passed through a function."""

    def copy(family: str, tensors: Callable[[dict[str, Tensor]], None] | None = None, **config: Any) -> Path:
        folder = Path(shutil.copytree(checkpoint(family), tmp_path / family))
        if config:
            path = folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        if tensors is not None:
            stored = load_file(folder / "model.safetensors")
            tensors(stored)
            save_file(stored, folder / "model.safetensors")
        return folder

    return copy


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.no_grad()
def packed_logits(model: Transformer) -> Tensor:
    return logits(forward(model, Batch.pack(sequences())).hidden, model.unembed)


@torch.no_grad()
def padded_logits(folder: Path) -> Tensor:
    """The same from transformers, which pads."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in sequences()], batch_first=True)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return model(input_ids=tokens, attention_mask=mask.long()).logits[mask]


def arithmetic(folder: Path) -> dict[str, Any]:
    """What transformers reads from a config, less names, precision, and what other keys say already."""
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    other = {"_name_or_path", "dtype", "transformers_version", "max_window_layers", "no_rope_layer_interval"}
    other |= {"sliding_window_pattern", "_sliding_window_pattern"}
    unused = {"intermediate_size"} if "moe_intermediate_size" in config else set()
    unused |= {"rope_parameters"} if "'yarn'" in str(config.get("rope_parameters")) else set()  # all written out
    if config["model_type"] == "gpt2":
        return {key: value for key, value in config.items() if key not in other}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {key: value for key, value in config.items() if key not in other | unused} | {"head_dim": dim}


def assert_equal_logits(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=3e-5)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert set(a) == set(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)), name


def initialized(shape: Shape, seed: int = 0) -> Transformer:
    model = Transformer(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(
                parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3, torch.Generator().manual_seed(seed)
            )
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_family_packed_and_saved_anew_gives_the_logits_and_bits_of_transformers(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = checkpoint(family)
    loaded = load_pretrained(source)
    theirs = padded_logits(source)
    assert_equal_logits(packed_logits(loaded.model), theirs)
    assert loaded.eos == (2,)
    assert loaded.tokenizer is None

    saved = tmp_path / "saved"
    save_pretrained(
        saved, loaded.model, tokenizer=None, eos=loaded.eos, base_config=loaded.config, max_shard_bytes=30_000
    )
    assert_same_bits(stored_tensors(source), stored_tensors(saved))
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored_tensors(saved).values())
    for path in saved.glob("*.safetensors"):
        contents = load_file(path)
        assert {index["weight_map"][name] for name in contents} == {path.name}
        assert len(contents) == 1 or sum(t.nbytes for t in contents.values()) <= 30_000
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, saved))
    assert after["architectures"] == before["architectures"]
    assert after["bos_token_id"] == before["bos_token_id"]
    assert torch.equal(padded_logits(saved), theirs)
    assert load_pretrained(saved).model.shape == loaded.model.shape
    assert arithmetic(saved) == arithmetic(source)


@pytest.mark.parametrize("family", ["smollm3_window", "qwen2_moe", "gemma3", "olmo3", "gpt_oss", "gpt2_untied"])
def test_family_has_the_gradients_of_transformers(family: str, checkpoint: Callable[[str], Path]) -> None:
    loaded = load_pretrained(checkpoint(family))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
    tokens, factors = (
        sequences()[1],
        torch.randn(len(sequences()[1]), VOCAB, generator=torch.Generator().manual_seed(0)),
    )
    (logits(forward(loaded.model, Batch.pack([tokens])).hidden, loaded.model.unembed) * factors).sum().backward()
    (theirs(input_ids=torch.tensor([tokens])).logits[0] * factors).sum().backward()
    ours, expected = dict(loaded.model.named_parameters()), dict(theirs.named_parameters())
    compared = 0
    for slot in slots(loaded.model.shape, FAMILY_ROWS[loaded.config["model_type"]]):
        if slot.theirs in expected:  # transformers stacks routed experts
            gradient, reference = ours[slot.ours].grad, expected[slot.theirs].grad
            assert gradient is not None
            assert reference is not None
            scale = reference.abs().max().item()
            torch.testing.assert_close(slot.of(gradient), reference, rtol=1e-4, atol=1e-4 * scale)
            compared += 1
    assert compared > 30


@pytest.mark.parametrize("through", [torch.float32, torch.bfloat16])
def test_bf16_folder_loaded_and_saved_keeps_every_bit(
    through: torch.dtype, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    model = load_pretrained(checkpoint("qwen3_moe")).model
    save_pretrained(first, model, tokenizer=None, eos=(2,), dtype=torch.bfloat16)
    loaded = load_pretrained(first, dtype=torch.bfloat16, param_dtype=through)
    assert {p.dtype for p in loaded.model.parameters()} == {through}
    save_pretrained(second, loaded.model, tokenizer=None, eos=(2,), dtype=torch.bfloat16)
    assert_same_bits(stored_tensors(first), stored_tensors(second))
    assert {t.dtype for t in stored_tensors(first).values()} == {torch.bfloat16}
    assert transformers.AutoModelForCausalLM.from_pretrained(second).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "LlamaForCausalLM"),
        ({"tied": False, "rope_scaling": RopeScaling(type="linear", factor=2.0)}, "LlamaForCausalLM"),
        ({"rope_scaling": YARN}, "LlamaForCausalLM"),
        ({"rope_scaling": RopeScaling(type="llama3", factor=8.0, original_context=16)}, "LlamaForCausalLM"),
        ({"width": 40, "heads": 3, "kv_heads": 1, "head_dim": 16}, "MistralForCausalLM"),
        ({"window": 7}, "MistralForCausalLM"),
        ({"attention_bias": True, "head_dim": 16}, "Qwen2ForCausalLM"),
        ({"attention_bias": True, "window": 7, "window_from": 1}, "Qwen2ForCausalLM"),
        ({"qk_norm": "head"}, "Qwen3ForCausalLM"),
        ({"qk_norm": "head", "window": 7}, "Qwen3ForCausalLM"),
        ({"moe": MoESpec(**MOE, balance=0.01, z_loss=0.001)}, "MixtralForCausalLM"),
        ({"moe": MoESpec(**MOE, normalize=False), "qk_norm": "head"}, "Qwen3MoeForCausalLM"),
        ({"moe": MoESpec(**MOE), "qk_norm": "head", "window": 7, "head_dim": 16}, "Qwen3MoeForCausalLM"),
        ({"moe": MoESpec(**MOE, normalize=False), "qk_norm": "full"}, "OlmoeForCausalLM"),
        ({"moe": MoESpec(**MOE, gated_shared=20), "attention_bias": True}, "Qwen2MoeForCausalLM"),
        ({**GEMMA3, "window": 7, "full_layers": [1], "local_rope_theta": 500.0}, "Gemma3ForCausalLM"),
        ({**GEMMA3, "query_pre_attn_scalar": 5, "head_dim": 16}, "Gemma3ForCausalLM"),
        ({**GEMMA3, "window": 7, "window_from": 1, "rope_scaling": YARN}, "Gemma3ForCausalLM"),
        ({"norm_order": "post", "qk_norm": "full", "window": 7, "full_layers": [1]}, "Olmo3ForCausalLM"),
        ({"norm_order": "post", "qk_norm": "full"}, "Olmo2ForCausalLM"),
        ({"nope_layers": [1]}, "SmolLM3ForCausalLM"),
        ({**GPT_OSS, "window": 7, "full_layers": [1], "rope_scaling": YARN}, "GptOssForCausalLM"),
        ({**GPT_OSS, "tied": False}, "GptOssForCausalLM"),
        ({**GPT2, "mlp": 128}, "GPT2LMHeadModel"),
        ({"window": 7, "full_layers": [1]}, "SmolLM3ForCausalLM"),
    ],
)
def test_model_of_our_own_saved_is_of_the_plainest_family_that_expresses_it(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    model = initialized(Shape(**{**DENSE, **changes}))
    save_pretrained(tmp_path / "saved", model, tokenizer=None, eos=(3, 5))
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["architectures"] == [expected]
    assert_equal_logits(packed_logits(model), padded_logits(tmp_path / "saved"))
    assert load_pretrained(tmp_path / "saved").eos == (3, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"nope_layers": [0], "qk_norm": "head"},
        {"sinks": True},
        {"biases": True, "moe": MoESpec(**MOE, shared=1)},
        {"norm": "layer", "qk_norm": "head"},
        {"positions": "learned", "activation": "gelu"},
        {"moe": MoESpec(**MOE, activation="clamped_swiglu")},
        {"norm_order": "post"},
        {"norm_offset": 1.0, "embed_scale": "sqrt_width", "activation": "geglu", "query_pre_attn_scalar": 3},
        {"window": 7, "window_from": 1, "local_rope_theta": 500.0},
        {"norm_order": "both", "moe": MoESpec(**MOE)},
        {"qk_norm": "full"},
        {"qk_norm": "head", "attention_bias": True},
        {"moe": MoESpec(**MOE, activation="bilinear")},
        {"moe": MoESpec(**MOE, normalize=False)},
        {"moe": MoESpec(**MOE, shared=1)},
        {"moe": MoESpec(**MOE, gated_shared=20)},
        {"moe": MoESpec(**MOE, bias_rate=0.001)},
        {"moe": MoESpec(**MOE), "window": 7, "window_from": 1},
    ],
)
def test_shape_of_no_family_saved_is_our_own_type_and_loads_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = initialized(Shape(**{**DENSE, **changes}))
    save_pretrained(tmp_path / "saved", model, tokenizer=None, eos=(2,))
    assert json.loads((tmp_path / "saved/config.json").read_text())["model_type"] == "palestra"
    back = load_pretrained(tmp_path / "saved")
    assert back.model.shape == model.shape
    assert_same_bits(dict(model.state_dict()), dict(back.model.state_dict()))
    with pytest.raises(ValueError, match="palestra"):
        transformers.AutoConfig.from_pretrained(tmp_path / "saved")


def shapes() -> st.SearchStrategy[Shape]:
    scaling = st.none() | st.builds(
        RopeScaling,
        type=st.sampled_from(["linear", "llama3", "yarn"]),
        factor=st.sampled_from([2.0, 8.0]),
        original_context=st.sampled_from([16, 8192]),
        attention_factor=st.none() | st.just(1.5),
        truncate=st.booleans(),
    )
    moe = st.none() | st.builds(
        MoESpec,
        experts=st.integers(2, 8),
        active=st.integers(1, 2),
        mlp=st.just(24),
        normalize=st.booleans(),
        balance=st.sampled_from([0.0, 0.1]),
        shared=st.sampled_from([0, 0, 1]),
    )
    return st.builds(
        Shape,
        layers=st.integers(1, 4),
        width=st.sampled_from([32, 40]),
        heads=st.sampled_from([3, 4]),
        kv_heads=st.none() | st.just(1),
        head_dim=st.sampled_from([8, 16]),
        mlp=st.just(48),
        context=st.just(64),
        vocab=st.just(96),
        tied=st.booleans(),
        rope_scaling=scaling,
        qk_norm=st.sampled_from([None, "head", "full"]),
        norm_order=st.sampled_from([None, "post", "both"]),
        norm_offset=st.sampled_from([None, 1.0]),
        embed_scale=st.sampled_from([None, "sqrt_width"]),
        query_pre_attn_scalar=st.sampled_from([None, 8, 9]),
        local_rope_theta=st.sampled_from([None, 1e4, 1e5]),
        attention_bias=st.booleans(),
        biases=st.booleans(),
        sinks=st.booleans(),
        norm=st.sampled_from([None, None, "layer"]),
        positions=st.sampled_from([None, None, "learned"]),
        window=st.none() | st.integers(1, 9),
        window_from=st.integers(0, 4),
        full_layers=st.none() | st.lists(st.integers(0, 3)),
        nope_layers=st.none() | st.lists(st.integers(0, 3)),
        moe=moe,
    )


@settings(max_examples=200, deadline=None)
@given(shape=shapes(), preferred=st.sampled_from([None, "llama", "mistral", "mixtral"]))
def test_config_of_any_shape_through_json_is_the_same_model(shape: Shape, preferred: str | None) -> None:
    family = family_of(shape, preferred)
    config = own_config(shape) if family is None else write_config(canonical(shape), family)
    back = read_config(json.loads(json.dumps(config)), "config.json")
    assert canonical(back) == canonical(shape)
    assert back.parameters() == shape.parameters()
    assert [back.window_of(i) for i in range(shape.layers)] == [shape.window_of(i) for i in range(shape.layers)]


# As published, in the layout of transformers 4, with the published number of parameters.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN25_15B = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 12,
    "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
    "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN25_7B = {
    **QWEN25_15B, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip
QWEN25_MATH_7B = {
    **QWEN25_7B, "max_position_embeddings": 4096, "rope_theta": 10000, "sliding_window": 4096,
    "transformers_version": "4.43.1",
}  # fmt: skip
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
OLMOE_7B = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
}  # fmt: skip
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False,
    "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
OLMO2_7B = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
PHI3_MINI = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
QWEN15_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
    "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
OLMO3_7B = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "max_position_embeddings": 65536,
    "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": {"attention_factor": 1.2079441541679836,
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "use_cache": True, "vocab_size": 100278,
}  # fmt: skip

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head",
    "model.layers.*.mlp.router", "model.embed_tokens"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
    "vocab_size": 201088,
}  # fmt: skip
GPT2_SMALL = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "task_specific_params": {"text-generation":
    {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "window"),
    [
        pytest.param(SMOLLM2_135M, 134_515_008, None, id="SmolLM2-135M"),
        pytest.param(LLAMA_31_8B, 8_030_261_248, None, id="Llama-3.1-8B"),
        pytest.param(MISTRAL_7B, 7_241_732_096, 4096, id="Mistral-7B-v0.1"),
        pytest.param(QWEN25_05B, 494_032_768, None, id="Qwen2.5-0.5B"),
        pytest.param(QWEN25_15B, 1_543_714_304, None, id="Qwen2.5-1.5B"),
        pytest.param(QWEN25_7B, 7_615_616_512, None, id="Qwen2.5-7B"),
        pytest.param(QWEN25_MATH_7B, 7_615_616_512, None, id="Qwen2.5-Math-7B"),
        pytest.param(QWEN3_06B, 596_049_920, None, id="Qwen3-0.6B"),
        pytest.param(QWEN3_30B_A3B, 30_532_122_624, None, id="Qwen3-30B-A3B"),
        pytest.param(OLMOE_7B, 6_919_161_856, None, id="OLMoE-1B-7B"),
        pytest.param(MIXTRAL_8X7B, 46_702_792_704, None, id="Mixtral-8x7B"),
        pytest.param(SMOLLM3_3B, 3_075_098_624, None, id="SmolLM3-3B"),
        pytest.param(OLMO2_7B, 7_298_617_344, None, id="OLMo-2-7B"),
        pytest.param(PHI3_MINI, 3_821_079_552, 2047, id="Phi-3-mini-4k"),
        pytest.param(QWEN15_MOE, 14_315_784_192, None, id="Qwen1.5-MoE-A2.7B"),
        pytest.param(GEMMA3_1B, 999_885_952, 512, id="Gemma-3-1B"),
        pytest.param(OLMO3_7B, 7_298_011_136, 4096, id="OLMo-3-7B"),
        pytest.param(GPT_OSS_20B, 20_914_757_184, 128, id="gpt-oss-20b"),
        pytest.param(GPT2_SMALL, 124_439_808, None, id="GPT-2"),
    ],
)
def test_published_config_of_transformers_4_has_the_published_number_of_parameters(
    config: dict[str, Any], parameters: int, window: int | None
) -> None:
    shape = read_config(config, "config.json")
    assert shape.parameters() == parameters
    assert shape.window == window


def test_absent_keys_mean_what_transformers_takes_for_the_family() -> None:
    gone = ("rms_norm_eps", "rope_theta", "num_key_value_heads", "sliding_window", "tie_word_embeddings", "head_dim")
    for config in (
        LLAMA_31_8B,
        MISTRAL_7B,
        QWEN25_05B,
        QWEN3_06B,
        QWEN3_30B_A3B,
        OLMOE_7B,
        MIXTRAL_8X7B,
        SMOLLM3_3B,
        OLMO2_7B,
        PHI3_MINI,
        GEMMA3_1B,
        OLMO3_7B,
        GPT_OSS_20B,
    ):
        heads = {"num_attention_heads": 32, "hidden_size": 4096}
        bare = {key: value for key, value in {**config, **heads}.items() if key not in gone and key != "rope_scaling"}
        shape = read_config(bare, "config.json")
        theirs = transformers.AutoConfig.for_model(**bare)
        assert shape.norm_eps == theirs.rms_norm_eps
        rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
        assert shape.rope_theta == rope["rope_theta"]
        assert shape.kv == theirs.num_key_value_heads
        assert shape.dim == (getattr(theirs, "head_dim", None) or 128)
        assert shape.window == getattr(theirs, "sliding_window", None)
        assert shape.tied == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (QWEN25_15B, {"use_mrope": True}, r"not supported:\n  use_mrope = True \(not understood\)$"),
        (QWEN25_15B, {"is_causal": False}, r"not supported:\n  is_causal = False \(only True is supported\)$"),
        (SMOLLM2_135M, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (SMOLLM2_135M, {"attention_bias": True}, "attention_bias = True"),
        (SMOLLM2_135M, {"mlp_bias": True}, "mlp_bias = True"),
        (SMOLLM2_135M, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (SMOLLM2_135M, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (SMOLLM2_135M, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (SMOLLM2_135M, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        (SMOLLM2_135M, {"sliding_window": 128}, "sliding_window = 128"),
        (SMOLLM2_135M, {"num_attention_heads": 7}, "multiple of num_attention_heads"),
        (SMOLLM2_135M, {"num_key_value_heads": 4}, "kv_heads"),
        (SMOLLM2_135M, {"hidden_size": None}, "hidden_size is missing"),
        (SMOLLM2_135M, {"hidden_size": "576"}, "hidden_size = '576'"),
        (SMOLLM2_135M, {"num_hidden_layers": 0}, "layers = 0"),
        (SMOLLM2_135M, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (SMOLLM2_135M, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        (SMOLLM2_135M, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
        (SMOLLM2_135M, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        (SMOLLM2_135M, {"architectures": ["LlamaModel"]}, "LlamaModel"),
        (SMOLLM2_135M, {"model_type": "gpt_neox"}, "gpt_neox"),
        (QWEN25_05B, {"layer_types": ["sliding_attention"] + ["full_attention"] * 23}, "layer_types"),
        (QWEN3_06B, {"attention_bias": True}, "attention_bias = True"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        (QWEN3_30B_A3B, {"use_sliding_window": True, "sliding_window": 8}, "max_window_layers = 48"),
        (OLMOE_7B, {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (OLMOE_7B, {"head_dim": 64}, "head_dim = 64"),
        (SMOLLM3_3B, {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\] \(expected 0 or 1 for each of 36 layers"),
        (SMOLLM3_3B, {"mlp_bias": True}, "mlp_bias = True"),
        (SMOLLM3_3B, {"layer_types": ["chunked_attention"] * 36}, "layer_types = "),
        (SMOLLM3_3B, {"layer_types": None, "use_sliding_window": True}, "layer_types is missing"),
        (SMOLLM3_3B, {"layer_types": ["sliding_attention"] * 36}, "expected full_attention without sliding_window"),
        (OLMO2_7B, {"attention_bias": True}, "attention_bias = True"),
        (OLMO2_7B, {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        (QWEN15_MOE, {"qkv_bias": False}, "qkv_bias = False"),
        (QWEN15_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (QWEN15_MOE, {"shared_expert_intermediate_size": 0}, "gated_shared = 0"),
        (QWEN15_MOE, {"layer_types": ["sliding_attention"] * 24}, "without sliding_window"),
        (GEMMA3_1B, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        (GEMMA3_1B, {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA3_1B, {"rope_parameters": {"rope_theta": 1e6}}, r"rope_parameters\.rope_theta = 1000000.0"),
        (
            GEMMA3_1B,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            r"rope_parameters\.sliding_attention is scaled",
        ),
        (GEMMA3_1B, {"model_type": "gemma3"}, "model_type 'gemma3'"),
        (GPT_OSS_20B, {"swiglu_limit": 5.0}, r"swiglu_limit = 5.0 \(only 7.0 is supported\)$"),
        (GPT_OSS_20B, {"attention_bias": False}, "attention_bias = False"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "awq"}}, r"'awq'} \(only mxfp4 is supported\)$"),
        (GPT_OSS_20B, {"layer_types": ["chunked_attention"] * 24}, "layer_types = "),
        (GPT2_SMALL, {"activation_function": "relu"}, "activation_function = 'relu'"),
        (GPT2_SMALL, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (GPT2_SMALL, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = True"),
        (GPT2_SMALL, {"num_key_value_heads": 4}, r"num_key_value_heads = 4 \(not understood\)$"),
        (GPT2_SMALL, {"add_cross_attention": True}, "add_cross_attention = True"),
        (OLMO3_7B, {"rope_scaling": {**OLMO3_7B["rope_scaling"], "truncate": False}}, "truncate = False"),
        (OLMO3_7B, {"layer_types": ["full_attention"] * 31}, "layer_types = "),
        (OLMO3_7B, {"sliding_window": None}, "expected full_attention without sliding_window"),
        (PHI3_MINI, {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75"),
        (
            PHI3_MINI,
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            r"'longrope' \(supported: default\)",
        ),
        (PHI3_MINI, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"'yarn' \(supported: default\)"),
    ],
)
def test_config_with_other_arithmetic_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_config({**base, **changes}, "config.json")


@pytest.mark.parametrize("off", [False, None, 0, 0.0, "", [], {}])
def test_config_with_an_unknown_key_that_is_off_is_read(off: Any) -> None:
    assert read_config({**SMOLLM2_135M, "new_key": off}, "config.json") == read_config(SMOLLM2_135M, "config.json")


BROKEN: list[Any] = [
    0,
    -1,
    10**5,
    10**18,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    True,
    "8",
    [4],
    {},
    {"a": 1},
    None,
]


@pytest.mark.timeout(60)  # 100,000 layers alone took minutes
@pytest.mark.parametrize("family", ["llama3", "qwen2_yarn", "qwen3_moe", "smollm3_window", "gemma3", "gpt_oss", "gpt2"])
def test_config_with_any_field_broken_is_read_or_refused_with_a_clear_error(
    family: str, copied: Callable[..., Path]
) -> None:
    folder = copied(family)
    path, weights = folder / "config.json", Shards(folder)
    config = json.loads(path.read_text())
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    cases = [(key, value) for key in config for value in BROKEN]
    cases += [("rope_parameters", {**scaling, key: value}) for key in scaling for value in BROKEN]
    refused = 0
    for key, value in cases:
        try:
            shape = read_config({**config, key: value}, "config.json")
            check_names(weights, slots(shape, FAMILY_ROWS[config["model_type"]]), shape, score=False)
        except PalestraError:
            refused += 1
    assert 0 < refused < len(cases)


def test_config_of_a_shape_of_our_own_that_is_too_large_is_refused() -> None:
    own = own_config(Shape(**DENSE))
    for change, named in (({"layers": 100_000}, "100000 layers"), ({"width": 10**9}, "parameters")):
        with pytest.raises(UnsupportedModel, match=named):
            read_config({**own, "shape": {**own["shape"], **change}}, "config.json")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[]", r"generation_config\.json is not a mapping"),
        ('{"eos_token_id": "</s>"}', "eos_token_id = '</s>'"),
        ('{"eos_token_id": [1, null]}', r"eos_token_id = \[1, None\]"),
        ('{"eos_token_id": -1}', "eos_token_id = -1"),
    ],
)
def test_generation_config_that_is_broken_is_refused_by_name(
    text: str, named: str, copied: Callable[..., Path]
) -> None:
    folder = copied("llama2")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(UsageError, match=named):
        load_pretrained(folder)


def test_config_that_asks_for_more_memory_than_there_is_names_the_weights(copied: Callable[..., Path]) -> None:
    with pytest.raises(DamagedModel, match="the weights do not fit"):
        load_pretrained(copied("llama2", intermediate_size=2**28))


def test_config_with_several_problems_names_them_all() -> None:
    with pytest.raises(UnsupportedModel) as error:
        read_config({**SMOLLM2_135M, "hidden_act": "gelu", "mlp_bias": True, "new_key": 1}, "some/config.json")
    for part in ("some/config.json", "hidden_act", "mlp_bias", "new_key = 1 (not understood)"):
        assert part in str(error.value)


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_rope_of_sliding_layers_means_nothing_where_there_are_none(family: str, copied: Callable[..., Path]) -> None:
    folder = copied(family)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["sliding_attention"] = {"rope_type": "default", "rope_theta": 777.0}
    path.write_text(json.dumps({**config, "layer_types": ["full_attention"] * config["num_hidden_layers"]}))
    assert_equal_logits(packed_logits(load_pretrained(folder).model), padded_logits(folder))


def test_yarn_temperature_follows_mscale_as_in_transformers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    given = {**scaling, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 4, "beta_slow": 2}
    folder = Path(shutil.copytree(checkpoint("qwen2_yarn"), tmp_path / "yarn"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": {**given, "rope_theta": 1e4}}))
    assert_equal_logits(packed_logits(load_pretrained(folder).model), padded_logits(folder))


def test_weights_missing_extra_or_misshapen_are_named(copied: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(32)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(47, 32)

    with pytest.raises(DamagedModel) as error:
        load_pretrained(copied("llama2", spoil))
    message = str(error.value)
    assert "missing: model.norm.weight" in message
    assert "not part of the model: model.layers.0.self_attn.o_proj.bias" in message
    assert "model.layers.1.mlp.up_proj.weight has shape (47, 32), expected (48, 32)" in message


def test_tied_head_stored_equal_is_accepted_and_different_is_refused(copied: Callable[..., Path]) -> None:
    def stored(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    folder = copied("smollm2", stored)
    assert load_pretrained(folder).model.head is None

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][5, 3] += 1.0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DamagedModel, match="tie_word_embeddings"):
        load_pretrained(folder)


def test_rotary_tables_of_old_checkpoints_are_passed_over(
    checkpoint: Callable[[str], Path], copied: Callable[..., Path]
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    found, plain = (load_pretrained(path).model.state_dict() for path in (copied("llama2", add), checkpoint("llama2")))
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_gpt2_as_published_without_a_prefix_and_with_masks_is_the_same_model(
    checkpoint: Callable[[str], Path], copied: Callable[..., Path]
) -> None:
    def older(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "h.0.attn.masked_bias": torch.ones(())}

    found, plain = (load_pretrained(path).model.state_dict() for path in (copied("gpt2", older), checkpoint("gpt2")))
    assert_same_bits(dict(found), dict(plain))


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A gpt-oss folder with experts in MXFP4."""
    folder = tiny_checkpoint("gpt_oss", tmp_path / "mxfp4", hidden_size=64, intermediate_size=32)
    path, draws = folder / "config.json", torch.Generator().manual_seed(0)
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, rows, inputs // 32, 16), generator=draws).byte()
        tensors[f"{name}_scales"] = torch.randint(114, 122, (experts, rows, inputs // 32), generator=draws).byte()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_experts_in_mxfp4_are_the_numbers_of_transformers(quantized: Path, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, loaded = load_file(quantized / "model.safetensors"), load_pretrained(quantized)
    for name in ("gate_up", "down"):
        prefix = f"model.layers.1.mlp.experts.{name}_proj"
        expected = convert_moe_packed_tensors(stored[f"{prefix}_blocks"], stored[f"{prefix}_scales"])
        assert torch.equal(loaded.model.state_dict()[f"layers.1.mlp.{name}"], expected.mT.float())
    convert(quantized, tmp_path / "converted")
    assert_equal_logits(packed_logits(loaded.model), padded_logits(tmp_path / "converted"))
    save_pretrained(tmp_path / "saved", loaded.model, tokenizer=None, eos=(2,), base_config=loaded.config)
    assert_equal_logits(packed_logits(loaded.model), padded_logits(tmp_path / "saved"))


def test_experts_in_mxfp4_without_their_scales_are_refused(quantized: Path) -> None:
    tensors = load_file(quantized / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.down_proj_scales"]
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(DamagedModel, match=r"layers\.2\.mlp\.experts\.down_proj is in MXFP4 with blocks of shape"):
        load_pretrained(quantized)


def test_quantised_tensor_is_refused(copied: Callable[..., Path]) -> None:
    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    with pytest.raises(UsageError, match=r"model\.norm\.weight is stored as I8"):
        load_pretrained(copied("llama2", quantize))


def test_pickled_weights_are_refused_with_what_to_do(copied: Callable[..., Path]) -> None:
    folder = copied("llama2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pickles.*save_pretrained"):
        load_pretrained(folder)


def test_folder_without_weights_or_config_says_what_is_missing(tmp_path: Path, copied: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_pretrained(tmp_path)
    folder = copied("llama2")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds no weights"):
        load_pretrained(folder)


def test_damaged_files_are_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load_pretrained(checkpoint("llama2"))
    folder = tmp_path / "sharded"
    save_pretrained(folder, loaded.model, tokenizer=None, eos=(2,), max_shard_bytes=30_000)
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(DamagedModel, match=shard.name):
        load_pretrained(folder)
    shard.unlink()
    with pytest.raises(DamagedModel, match=f"{shard.name} is missing"):
        load_pretrained(folder)
    shard.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    kept = index.read_text()
    index.unlink()
    with pytest.raises(DamagedModel, match=r"neither model\.safetensors nor"):
        load_pretrained(folder)
    index.write_text("{}")
    with pytest.raises(DamagedModel, match="no weight_map"):
        load_pretrained(folder)
    index.write_text(kept.replace(shard.name, f"../{shard.name}"))
    with pytest.raises(DamagedModel, match="outside of the folder"):
        load_pretrained(folder)


def test_end_tokens_come_from_the_generation_config_before_the_config(copied: Callable[..., Path]) -> None:
    folder = copied("llama2", eos_token_id=7)
    assert load_pretrained(folder).eos == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert load_pretrained(folder).eos == (4, 5)
    (folder / "generation_config.json").unlink()
    assert load_pretrained(folder).eos == (7,)


def test_tokenizer_saved_beside_the_model_gives_transformers_the_same_ids(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abcdefgh ")
    model = initialized(Shape(**{**DENSE, "vocab": 64}))
    folder = tmp_path / "saved"
    save_pretrained(folder, model, tokenizer=tokenizer, eos=(tokenizer.eos or 0,))
    loaded = load_pretrained(folder)
    assert loaded.tokenizer == folder
    assert loaded.eos == (tokenizer.eos,)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("bad cafe", add_special_tokens=False)["input_ids"] == tokenizer.encode("bad cafe")
    assert theirs.eos_token_id == tokenizer.eos


def test_reward_model_scores_as_in_transformers_both_ways(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen2ForSequenceClassification(config)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_pretrained(tmp_path / "theirs")
    assert loaded.score is not None

    save_pretrained(
        tmp_path / "ours", loaded.model, tokenizer=None, eos=(), base_config=loaded.config, score=loaded.score
    )
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    tokens = torch.tensor([sequences()[0]])
    with torch.no_grad():
        expected = theirs(tokens).logits
        hidden = forward(loaded.model, Batch.pack(tokens.tolist())).hidden
        assert_equal_logits(hidden[-1:] @ loaded.score.t(), expected)
        assert torch.equal(again(tokens).logits, expected)
    several = json.loads((tmp_path / "ours/config.json").read_text())
    several["id2label"] = {"0": "bad", "1": "good"}
    with pytest.raises(UnsupportedModel, match="2 labels"):
        read_config(several, "config.json")


@pytest.mark.parametrize("family", ["gpt_oss", "gpt2"])
def test_reward_model_of_a_family_is_a_classifier_of_transformers(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    loaded, score = load_pretrained(checkpoint(family)), torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    save_pretrained(tmp_path / "saved", loaded.model, tokenizer=None, eos=(), base_config=loaded.config, score=score)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    tokens = torch.tensor([sequences()[0]])
    with torch.no_grad():
        hidden = forward(loaded.model, Batch.pack(tokens.tolist())).hidden
        assert_equal_logits(hidden[-1:] @ score.t(), theirs(tokens).logits)
    again = load_pretrained(tmp_path / "saved")
    assert again.score is not None
    assert torch.equal(again.score, score)


def test_reward_model_of_a_shape_of_our_own_loads_back(tmp_path: Path) -> None:
    model = initialized(Shape(**{**DENSE, "qk_norm": "full"}))
    score = torch.randn(1, 32)
    save_pretrained(tmp_path / "saved", model, tokenizer=None, eos=(), score=score)
    loaded = load_pretrained(tmp_path / "saved")
    assert loaded.score is not None
    assert torch.equal(loaded.score, score)


def test_save_over_an_existing_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep")
    with pytest.raises(UsageError, match="exists already"):
        save_pretrained(tmp_path / "mine", initialized(Shape(**DENSE)), tokenizer=None, eos=())
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes.txt"]


def test_save_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    model = initialized(Shape(**DENSE))
    weights = dict(model.state_dict())
    weights["norm.weight"] = torch.zeros(3)
    with pytest.raises(DamagedModel, match=r"norm\.weight"):
        save_weights(tmp_path / "saved", model.shape, weights, tokenizer=None, eos=())

    class Failing(dict[str, Tensor]):
        reads = 0

        def __getitem__(self, name: str) -> Tensor:
            self.reads += 1
            if self.reads > 25:  # 16 to check the sizes
                raise OSError("disk on fire")
            return super().__getitem__(name)

    with pytest.raises(OSError, match="fire"):
        save_weights(
            tmp_path / "saved", model.shape, Failing(model.state_dict()), tokenizer=None, eos=(), max_shard_bytes=1
        )
    assert list(tmp_path.iterdir()) == []


def test_save_killed_in_the_middle_leaves_no_folder(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from pathlib import Path
        from palestra.lm.hf import save_pretrained
        from palestra.lm.model import Transformer
        from palestra.spec.shape import Shape
        model = Transformer(Shape(layers=60, width=64, heads=1, mlp=64, context=8, vocab=64))
        print("ready", flush=True)
        save_pretrained(Path(sys.argv[1]), model, tokenizer=None, eos=(), max_shard_bytes=1)
    """
    process = zygote.Popen(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "saved"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while len(list(tmp_path.glob(".saved.part-*/*.part"))) < 20:  # of 424 files
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "saved").exists()
    save_pretrained(tmp_path / "saved", initialized(Shape(**DENSE)), tokenizer=None, eos=())
    load_pretrained(tmp_path / "saved")
