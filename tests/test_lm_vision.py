"""The vision tower against transformers: logits, gradients, weights in and out; images in packed batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vision_models import PAD, reference, save_tiny, sequence, theirs

from palestra.data.media import Image, rope_positions
from palestra.errors import UsageError
from palestra.lm.batch import Batch, forward, score
from palestra.lm.head import logits
from palestra.lm.hf import DamagedModel, load_pretrained, save_pretrained
from palestra.lm.hf_config import UnsupportedModel
from palestra.lm.lora import adapted, add_lora, merged_weights
from palestra.runs.store import read_json, write_json
from palestra.spec.lm import LoraSpec
from palestra.spec.shape import Shape

SIZES = [[(112, 140)], [(56, 56), (308, 84)], [], [(140, 168), (84, 56)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def test_logits_packed_with_images_of_several_sizes_equal_transformers(folder: Path) -> None:
    random = np.random.default_rng(0)
    rows = [sequence(random, sizes) for sizes in SIZES]
    model, expected = load_pretrained(folder).model, reference(folder)
    batch = Batch.pack([tokens for tokens, _ in rows], images=[images for _, images in rows])
    with torch.no_grad():
        ours = logits(forward(model, batch).hidden, model.unembed).split(batch.lengths)
        for (tokens, images), scores in zip(rows, ours, strict=True):
            torch.testing.assert_close(scores, expected(**theirs(tokens, images)).logits[0].float(), atol=2e-5, rtol=0)


def test_gradients_of_tower_and_language_model_equal_transformers(folder: Path) -> None:
    tokens, images = sequence(np.random.default_rng(1), [(84, 112), (56, 56)])
    loaded, expected = load_pretrained(folder), reference(folder)
    batch = Batch.pack([tokens, tokens[:2]], images=[images, ()])
    (-score(loaded.model, batch).logprobs[: len(tokens)].sum()).backward()
    scores = expected(**theirs(tokens, images)).logits[0, :-1].float().log_softmax(-1)
    (-scores.gather(1, torch.tensor(tokens[1:])[:, None]).sum()).backward()
    their = {name.replace("model.visual.", "visual."): p.grad for name, p in expected.named_parameters()}
    for name, ours in (
        ("visual.patch_embed.proj.weight", "vision.patches.weight"),
        ("visual.blocks.0.attn.qkv.weight", "vision.blocks.0.attn.qkv.weight"),
        ("visual.blocks.1.norm2.weight", "vision.blocks.1.mlp_norm.weight"),
        ("visual.blocks.2.mlp.down_proj.bias", "vision.blocks.2.mlp.down.bias"),
        ("visual.merger.mlp.0.weight", "vision.merge.weight"),
        ("model.language_model.embed_tokens.weight", "embed"),
    ):
        assert their[name].abs().max() > 0
        mine = loaded.model.get_parameter(ours).grad
        assert mine is not None
        torch.testing.assert_close(mine.view(their[name].shape), their[name], atol=2e-4, rtol=1e-3)


def test_completions_of_one_picture_share_it_and_gradients_do_not_double() -> None:
    random = np.random.default_rng(2)
    model = _tiny()
    tokens, images = sequence(random, [(56, 84)])
    other = (Image(random.integers(0, 256, (56, 84, 3), np.uint8), images[0].start),)
    rows = [[*tokens, 7], [*tokens, 8], [*tokens, 9]]
    seen = [images, images, other]
    batch = Batch.pack(rows, images=seen)
    assert batch.shared is not None
    assert len(batch.shared.first) == 2 * len(tokens) + 3 - images[0].start  # what is before the other picture is too
    score(model, batch).logprobs.sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row, one in zip(rows, seen, strict=True):
        score(model, Batch.pack([row], images=[one])).logprobs.sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(together[name], p.grad, atol=1e-5, rtol=1e-4)


def test_weights_saved_again_have_the_same_bits(folder: Path, tmp_path: Path) -> None:
    loaded = load_pretrained(folder)
    save_pretrained(tmp_path / "out", loaded.model, tokenizer=None, eos=loaded.eos, base_config=loaded.config)
    expected, again = reference(folder).state_dict(), reference(tmp_path / "out").state_dict()
    assert expected.keys() == again.keys()
    assert all(torch.equal(expected[name], again[name]) for name in expected)
    assert load_pretrained(tmp_path / "out").model.shape == loaded.model.shape
    assert read_json(tmp_path / "out" / "config.json")["image_token_id"] == PAD


def test_parameters_of_shape_are_those_of_model(folder: Path) -> None:
    model = load_pretrained(folder).model
    assert model.shape.parameters() == sum(p.numel() for p in model.parameters())


def test_published_config_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    # Qwen/Qwen2.5-VL-3B-Instruct: 3,754,622,976 parameters.
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
        "max_position_embeddings": 128000, "max_window_layers": 70, "model_type": "qwen2_5_vl",
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2, "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    from palestra.lm.hf_config import read_config

    assert read_config(config, "config.json").parameters() == 3_754_622_976
    config["vision_config"]["spatial_merge_size"] = 4
    config["vision_config"]["deepstack"] = [1]
    with pytest.raises(UnsupportedModel, match=r"spatial_merge_size(.|\n)*deepstack"):
        read_config(config, "config.json")


def test_missing_tensor_of_tower_is_named(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["visual.merger.ln_q.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", read_json(folder / "config.json"))
    with pytest.raises(DamagedModel, match=r"missing: visual\.merger\.ln_q\.weight"):
        load_pretrained(tmp_path)


def test_lora_adapts_the_language_part_and_freezes_the_tower(folder: Path) -> None:
    model = load_pretrained(folder).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith("vision.")}
    add_lora(model, LoraSpec(rank=4), torch.Generator().manual_seed(0))
    assert adapted(model)
    assert not any(name.startswith("vision.") for name in adapted(model))
    tokens, images = sequence(np.random.default_rng(3), [(56, 56)])
    score(model, Batch.pack([tokens], images=[images])).logprobs.sum().backward()
    assert not any(p.grad is not None for name, p in model.named_parameters() if name.startswith("vision."))
    merged = merged_weights(model)
    assert all(torch.equal(merged[name], tensor) for name, tensor in before.items())


def test_image_to_text_only_model_is_refused() -> None:
    from palestra.lm.model import Transformer

    model = Transformer(Shape(layers=1, width=16, heads=2, mlp=16, context=32, vocab=320))
    tokens, images = sequence(np.random.default_rng(4), [(56, 56)])
    with pytest.raises(UsageError, match="text only"):
        forward(model, Batch.pack([tokens], images=[images]))


def test_select_keeps_images_with_their_sequences() -> None:
    random = np.random.default_rng(5)
    rows = [sequence(random, sizes) for sizes in SIZES]
    batch = Batch.pack([tokens for tokens, _ in rows], images=[images for _, images in rows])
    model = _tiny()
    with torch.no_grad():
        whole = forward(model, batch).hidden
        for part in ([1, 3], [2], [3, 0]):
            chosen = batch.select(part)
            torch.testing.assert_close(
                forward(model, chosen).hidden, whole[batch.token_index(part)], atol=1e-5, rtol=1e-4
            )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), max_size=4), st.integers(0, 5))
def test_rope_positions_text_counts_on_after_the_largest_of_an_image(
    parts: list[tuple[int, int, int]], rest: int
) -> None:
    """By brute force, token by token."""
    expected, images, number, place = [], [], 0, 0
    for text, rows, columns in parts:
        expected += [(number + i,) * 3 for i in range(text)]
        number, place = number + text, place + text
        images.append(Image(np.zeros((28 * rows, 28 * columns, 3), np.uint8), place))
        expected += [(number, number + row, number + column) for row in range(rows) for column in range(columns)]
        number, place = max(map(max, expected)) + 1, place + rows * columns
    expected += [(number + i,) * 3 for i in range(rest)]
    assert rope_positions(len(expected), images).T.tolist() == [list(at) for at in expected]


def _tiny() -> torch.nn.Module:
    from palestra.lm.model import Transformer

    tower = {"layers": 2, "width": 16, "heads": 2, "mlp": 24, "window": 56, "full_layers": [1], "sections": [2, 1, 1]}
    tower["tokens"] = [301, 300, 302]
    shape = Shape.model_validate(
        {"layers": 2, "width": 16, "heads": 2, "mlp": 24, "context": 64, "vocab": 320, "vision": tower}
    )
    model = Transformer(shape)
    model.initialize(torch.Generator().manual_seed(0))
    return model
