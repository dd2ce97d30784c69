"""Images: sizes and patches as transformers has them, data URLs, conversations, and input that is not an image."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from palestra.data.chat import encode_after, encode_chat
from palestra.data.media import (
    VISION_TOKENS,
    Image,
    PixelLimits,
    check_places,
    content_keys,
    content_text,
    data_of,
    data_url,
    part_image,
    placed,
    read_image,
)
from palestra.data.tokenizers import SPECIAL_TOKENS, Tokenizer, character_tokenizer
from palestra.errors import UsageError
from palestra.lm.vision import patches_of

TEXTS = "system\nuser\nassistant\nHow many? Two three "
TOKENIZER = character_tokenizer(TEXTS, (*SPECIAL_TOKENS, *VISION_TOKENS)).with_images(PixelLimits())


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def part(pixels: np.ndarray) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(pixels)}}


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 60), st.integers(60, 2000))
def test_size_equals_transformers(height: int, width: int, least: int, most: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    limits = PixelLimits(least * 784, most * 784)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(UsageError, match="200 times"):
            limits.size(height, width)
        return
    expected = smart_resize(height, width, 28, limits.least, limits.most)
    assert limits.size(height, width) == tuple(expected)


@settings(max_examples=10)
@given(st.integers(20, 200), st.integers(20, 200))
def test_patches_equal_transformers(height: int, width: int) -> None:
    from transformers import Qwen2VLImageProcessorPil

    pixels, limits = noise(height, width), PixelLimits(3136, 40 * 784)
    size = {"shortest_edge": limits.least, "longest_edge": limits.most}
    expected = Qwen2VLImageProcessorPil()(images=[Pillow.fromarray(pixels)], return_tensors="pt", size=size)
    image = read_image(data_of(data_url(pixels)), limits)
    assert expected["image_grid_thw"].tolist() == [[1, 2 * image.grid[0], 2 * image.grid[1]]]
    assert (expected["pixel_values"] - patches_of(image.pixels)).abs().max() < 1e-5


@given(st.integers(1, 40), st.integers(1, 40))
def test_data_url_keeps_every_pixel(height: int, width: int) -> None:
    pixels = noise(height, width)
    with Pillow.open(io.BytesIO(data_of(data_url(pixels)))) as file:
        assert np.array_equal(np.asarray(file), pixels)


def test_placed_image_is_the_same_again() -> None:
    image = Image(noise(56, 84), 3)
    assert placed(data_url(image.pixels), 3) == image
    assert image != image.at(4)
    assert image != Image(noise(56, 84, seed=1), 3)
    with pytest.raises(UsageError, match="multiples of 28"):
        placed(data_url(noise(50, 56)), 0)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("data:image/png;base64,@@@", "base64"),
        ("data:text/plain;base64,aGk=", "data:image/png;base64"),
        ("data:image/png,hi", "data:image/png;base64"),
        ("data:image/png;base64," + base64.b64encode(b"not an image").decode(), "cannot be read"),
        ("https://example.org/cat.png", "not a data URL"),
        ("/etc/passwd", "not a data URL"),
    ],
)
def test_broken_image_url_is_refused(url: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        part_image({"type": "image_url", "image_url": {"url": url}}, PixelLimits())


def test_truncated_file_is_refused() -> None:
    data = data_of(data_url(noise(60, 60)))
    with pytest.raises(UsageError, match="cannot be read"):
        read_image(data[: len(data) // 2], PixelLimits())


def test_picture_of_gigabytes_in_a_small_file_is_refused() -> None:
    file = io.BytesIO()
    Pillow.new("1", (30000, 30000)).save(file, "PNG")
    assert len(file.getvalue()) < 1 << 20
    with pytest.raises(UsageError, match="pixels"):
        read_image(file.getvalue(), PixelLimits())


def test_file_by_path_is_read_and_a_missing_one_is_named(tmp_path: Any) -> None:
    Pillow.fromarray(noise(70, 90)).save(tmp_path / "cat.png")
    image = part_image({"type": "image", "image": str(tmp_path / "cat.png")}, PixelLimits())
    assert image.pixels.shape == (56, 84, 3)
    with pytest.raises(UsageError, match=r"dog\.png cannot be read"):
        part_image({"type": "image", "image": str(tmp_path / "dog.png")}, PixelLimits())


def test_chat_expands_one_token_for_each_image_to_those_it_has() -> None:
    content = [part(noise(56, 84)), {"type": "text", "text": "How many?"}, part(noise(84, 84, seed=1))]
    encoded = encode_chat(TOKENIZER, [{"role": "user", "content": content}], add_generation_prompt=True)
    opening, pad, closing = TOKENIZER.vision_ids
    assert [image.tokens for image in encoded.images] == [6, 9]
    for image in encoded.images:
        around = encoded.tokens[image.start - 1 : image.stop + 1]
        assert around == [opening, *[pad] * image.tokens, closing]
    assert encoded.tokens.count(pad) == 15
    assert len(encoded.tokens) == len(encoded.loss_mask)


def test_chat_trains_the_assistant_alone_after_an_image() -> None:
    messages = [
        {"role": "user", "content": [part(noise(56, 56)), {"type": "text", "text": "How many?"}]},
        {"role": "assistant", "content": "Two"},
    ]
    encoded = encode_chat(TOKENIZER, messages, add_generation_prompt=False)
    trained = [token for token, used in zip(encoded.tokens, encoded.loss_mask, strict=True) if used]
    assert TOKENIZER.decode(trained, specials=True) == "Two<|im_end|>"


def test_written_pad_in_a_message_is_text() -> None:
    tokenizer = character_tokenizer(TEXTS + "<|image_pad|>", (*SPECIAL_TOKENS, *VISION_TOKENS))
    tokenizer = tokenizer.with_images(PixelLimits())
    encoded = encode_chat(tokenizer, [{"role": "user", "content": "<|image_pad|>"}], add_generation_prompt=True)
    assert tokenizer.image_pad not in encoded.tokens
    assert encoded.images == ()


def test_image_after_a_turn_is_placed_from_that_turn() -> None:
    first = [{"role": "user", "content": "How many?"}]
    after = encode_after(TOKENIZER, first, [{"role": "user", "content": [part(noise(56, 56))]}])
    (image,) = after.images
    assert after.tokens[image.start : image.stop] == [TOKENIZER.image_pad] * 4


def test_image_to_a_tokenizer_of_a_text_model_is_refused() -> None:
    plain = character_tokenizer(TEXTS)
    with pytest.raises(UsageError, match="reads text only"):
        encode_chat(plain, [{"role": "user", "content": [part(noise(56, 56))]}], add_generation_prompt=True)
    with pytest.raises(UsageError, match="lacks special tokens"):
        plain.with_images(PixelLimits())


def test_template_that_writes_no_images_is_refused() -> None:
    silent = TOKENIZER.with_chat_template("{% for m in messages %}{{ m['role'] }}{% endfor %}")
    with pytest.raises(UsageError, match="0 image tokens for 1 images"):
        encode_chat(silent, [{"role": "user", "content": [part(noise(56, 56))]}], add_generation_prompt=True)


def test_tokenizer_folder_keeps_the_limits_of_images(tmp_path: Any) -> None:
    TOKENIZER.with_images(PixelLimits(3136, 7840)).save(tmp_path)
    assert Tokenizer.load(tmp_path).pixels == PixelLimits(3136, 7840)
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 16}')
    with pytest.raises(UsageError, match=r"patch_size = 16"):
        Tokenizer.load(tmp_path)


def test_keys_differ_where_pixels_do() -> None:
    tokens = (1, 60, 61, 61, 61, 61, 62, 5)
    keys = [content_keys(tokens, [Image(noise(56, 56, seed=seed), 2)]) for seed in (0, 0, 1)]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0][:2] == tokens[:2]
    assert max(keys[0][2:6]) < 0


@pytest.mark.parametrize(
    ("tokens", "starts", "why"),
    [
        ((60, 61, 61, 61, 61, 62, 1), [0], "where its 1 images lie"),
        ((60, 61, 61, 61, 61, 61, 62, 1), [1], "images for 4 of them"),
        ((60, 61, 61, 61, 61, 62, 1), [], "images for 0 of them"),
        ((60, 61, 61, 61, 61), [1], "ends with an image"),
        ((60, 61, 61, 61, 61, 62, 1), [1, 1], "where its 2 images lie"),
    ],
)
def test_tokens_that_do_not_fit_images_are_refused(tokens: tuple[int, ...], starts: list[int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_places(tokens, [Image(noise(56, 56), start) for start in starts], (60, 61, 62))
    check_places((1, 61, 2), [], (60, 61, 62))  # a model may sample it


def test_content_as_text_has_a_mark_for_images() -> None:
    assert content_text([part(noise(56, 56)), {"type": "text", "text": "How many?"}]) == "<image>\nHow many?"
