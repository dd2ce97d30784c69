"""A tiny Qwen2.5-VL of transformers with random weights, and sequences with images for it."""

from pathlib import Path

import numpy as np
import torch

from palestra.data.media import Image
from palestra.lm.vision import patches_of

START, PAD, END = 301, 300, 302
VOCAB = 320


def save_tiny(folder: Path, tied: bool = False) -> Path:
    """The folder of a new model."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    tower = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,  # two tokens: smaller than the pictures
        "fullatt_block_indexes": [1],
    }
    tokens = {"image_token_id": PAD, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 303}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=tied, **tokens)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm1.weight", "norm2.weight", "ln_q.weight")) or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # at 1 and 0 they would tell nothing
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> torch.nn.Module:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()


def sequence(random: np.random.Generator, sizes: list[tuple[int, int]]) -> tuple[list[int], tuple[Image, ...]]:
    """Random tokens with random images of these heights and widths, multiples of 28, between them."""
    tokens, images = random.integers(3, 290, 4).tolist(), []
    for size in sizes:
        tokens.append(START)
        images.append(Image(random.integers(0, 256, (*size, 3), np.uint8), len(tokens)))
        tokens += [PAD] * images[-1].tokens + [END, *random.integers(3, 290, 3).tolist()]
    return tokens, tuple(images)


def theirs(tokens: list[int], images: tuple[Image, ...]) -> dict[str, torch.Tensor]:
    """The arguments of transformers' forward pass."""
    given = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens), dtype=torch.long)}
    if not images:
        return given
    return {
        **given,
        "pixel_values": torch.cat([patches_of(image.pixels) for image in images]),
        "image_grid_thw": torch.tensor([[1, 2 * image.grid[0], 2 * image.grid[1]] for image in images]),
        "mm_token_type_ids": torch.tensor([[int(token == PAD) for token in tokens]]),
    }
