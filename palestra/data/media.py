"""Images between tokens: read from data URLs, files and arrays, resized, counted in tokens, placed in a sequence.

An image is cut into patches of 14 × 14 pixels, of which 2 × 2 together are one token (Qwen2.5-VL).
"""

import base64
import binascii
import hashlib
import io
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from palestra.errors import UsageError

PATCH, MERGE, TIMES = 14, 2, 2
"""Pixels along each side of a patch, patches of a token, and frames of a patch: an image is its own next frame."""
THETA = 10000.0
"""The base of the patches' rotary positions."""
UNIT = PATCH * MERGE
"""Pixels along each side of what becomes one token."""
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""Special tokens around and in place of an image, by Qwen's names."""
PAD = VISION_TOKENS[1]
MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)
"""Of the colors, with which pixels are normalized (CLIP's)."""
MOST_PIXELS = 2**26
"""Of an image before it is resized: a small file can hold a picture of gigabytes."""
MOST_ASPECT = 200
"""Longest side to shortest."""
PREPROCESSOR = "preprocessor_config.json"
PREPARED = {
    **{"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": TIMES},
    **{"image_mean": list(MEAN), "image_std": list(DEVIATION)},
}
"""How images become patches, as that file has it."""


@dataclass(frozen=True)
class PixelLimits:
    """How many pixels an image has once it is resized."""

    least: int = 56 * 56
    most: int = 1280 * UNIT * UNIT

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The size an image is brought to: multiples of 28 near its own, its aspect about kept, within the limits."""
        if not height or not width or max(height, width) > MOST_ASPECT * min(height, width):
            raise UsageError(f"an image of {width} × {height} pixels: expected sides that differ at most 200 times")
        sides = [round(side / UNIT) * UNIT for side in (height, width)]
        if math.prod(sides) > self.most:
            scale = math.sqrt(height * width / self.most)
            sides = [max(UNIT, math.floor(side / scale / UNIT) * UNIT) for side in (height, width)]
        elif math.prod(sides) < self.least:
            scale = math.sqrt(self.least / (height * width))
            sides = [math.ceil(side * scale / UNIT) * UNIT for side in (height, width)]
        return sides[0], sides[1]

    def config(self) -> dict[str, Any]:
        """As transformers' preprocessor_config.json has it."""
        kinds = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
        return {**kinds, "min_pixels": self.least, "max_pixels": self.most, **PREPARED}

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "PixelLimits":
        """Of a preprocessor_config.json; one that prepares images otherwise is refused."""
        size = config.get("size") or {}
        for key, only in {**PREPARED, "resample": 3}.items():
            if config.get(key, only) != only:
                raise UsageError(f"{where}: {key} = {config[key]!r}, and only {only!r} is supported")
        least = config.get("min_pixels") or size.get("shortest_edge") or cls.least
        most = config.get("max_pixels") or size.get("longest_edge") or cls.most
        if type(least) is not int or type(most) is not int or not 0 < least <= most:
            raise UsageError(f"{where}: expected whole min_pixels of at most max_pixels, got {least!r} and {most!r}")
        return cls(least, most)


@dataclass(frozen=True, eq=False)
class Image:
    """An image in a sequence of tokens."""

    pixels: np.ndarray
    """(H, W, 3) uint8, RGB; both sides are multiples of 28."""
    start: int = 0
    """Where the first of its tokens lies in the sequence."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of its tokens."""
        return self.pixels.shape[0] // UNIT, self.pixels.shape[1] // UNIT

    @property
    def tokens(self) -> int:
        """How many tokens stand for it."""
        return math.prod(self.grid)

    @property
    def stop(self) -> int:
        """The place after its last token."""
        return self.start + self.tokens

    @cached_property
    def digest(self) -> bytes:
        """Of its pixels: images with the same one are the same."""
        return hashlib.blake2b(self.pixels.tobytes() + repr(self.pixels.shape).encode(), digest_size=16).digest()

    def at(self, start: int) -> "Image":
        """The same elsewhere."""
        return Image(self.pixels, start)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and (self.start, self.digest) == (other.start, other.digest)

    def __hash__(self) -> int:
        return hash((self.start, self.digest))


def check_places(tokens: Sequence[int], images: Sequence[Image], vision: Sequence[int]) -> None:
    """Refuse tokens of images without an image, images without tokens, and an image at the end.

    `vision` are the ids of `VISION_TOKENS`. A model may sample one of them: alone it is not an image.
    """
    opening, pad, _ = vision
    places = [place for image in images for place in range(image.start, image.stop)]
    opened = [place + 1 for place, token in enumerate(tokens[:-1]) if token == opening and tokens[place + 1] == pad]
    after = [image.stop for image in images if tokens[image.stop : image.stop + 1] == (pad,)]
    if any(a >= b for a, b in pairwise(places)) or any(tokens[at : at + 1] != (pad,) for at in places):
        raise UsageError(f"the prompt does not have {len(places)} tokens of images where its {len(images)} images lie")
    if not {*opened, *after} <= set(places):
        count = sum(token == pad for token in tokens)
        raise UsageError(f"the prompt has {count} tokens of images, and images for {len(places)} of them")
    if images and images[-1].stop == len(tokens):
        raise UsageError("the prompt ends with an image: end it with text, such as what opens the model's turn")


def content_keys(tokens: Sequence[int], images: Iterable[Image]) -> tuple[int, ...]:
    """The tokens with numbers in place of images' that differ where the pixels do: what has the same keys is the same.

    Below zero, so that no token has one.
    """
    keys = list(tokens)
    for image in images:
        keys[image.start : image.stop] = [-1 - int.from_bytes(image.digest, "big")] * image.tokens
    return tuple(keys)


def rope_positions(length: int, images: Iterable[Image]) -> np.ndarray:
    """(3, length): the place of each token in time, height and width (M-RoPE, Qwen2-VL §2.1).

    Text counts on in all three. An image has one time, its rows and its columns, and what follows continues after the
    largest of them.
    """
    positions = np.empty((3, length), np.int64)
    place = number = 0
    for image in images:
        positions[:, place : image.start] = np.arange(number, number + image.start - place)
        number += image.start - place
        rows, columns = image.grid
        positions[0, image.start : image.stop] = number
        positions[1, image.start : image.stop] = number + np.repeat(np.arange(rows), columns)
        positions[2, image.start : image.stop] = number + np.tile(np.arange(columns), rows)
        place, number = image.stop, number + max(rows, columns)
    positions[:, place:] = np.arange(number, number + length - place)
    return positions


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image, as OpenAI or Hugging Face writes it."""
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "image")


def content_text(content: Any) -> str:
    """The content of a message as text for people, with a mark in place of each image."""
    if not isinstance(content, list | tuple):
        return str(content)
    return "\n".join("<image>" if is_image(part) else str(part.get("text", "")) for part in content)


def part_image(part: Mapping[str, Any], limits: PixelLimits) -> Image:
    """The image of a part: `{type: image_url, image_url: {url: data:…}}`, or `{type: image, image: …}` with a data URL
    or the path of a file."""
    source = part.get("image_url" if part["type"] == "image_url" else "image")
    source = source.get("url") if isinstance(source, Mapping) else source
    if not isinstance(source, str):
        raise UsageError(f"an image part has no image: expected a data URL or a path, got {source!r:.60}")
    if source.startswith("data:"):
        return read_image(data_of(source), limits)
    if part["type"] == "image_url" or "://" in source:
        raise UsageError(f"the image {source[:60]!r} is not a data URL: send it as data:image/png;base64,…")
    try:
        return read_image(Path(source).expanduser().read_bytes(), limits)
    except OSError as error:
        raise UsageError(f"the image {source} cannot be read: {error.strerror}") from error


def data_of(url: str) -> bytes:
    """The bytes of a data URL in base64."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise UsageError(f"{url[:40]!r}… is not an image as a data URL: expected data:image/png;base64,…")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"the data URL of an image is not valid base64: {error}") from error


def read_image(data: bytes, limits: PixelLimits | None) -> Image:
    """A PNG, JPEG, GIF, WebP or BMP file, resized; of an animation the first frame. Transparency becomes black.

    Without limits it is one that was resized before.
    """
    from PIL import Image as Pillow  # with the extra `train`, as all that reads images

    try:
        with Pillow.open(io.BytesIO(data), formats=("PNG", "JPEG", "GIF", "WEBP", "BMP")) as file:
            width, height = file.size
            if width * height > MOST_PIXELS:
                raise UsageError(f"an image of {width} × {height} pixels: expected at most {MOST_PIXELS:,} in all")
            rgb = file.convert("RGB")
    except UsageError:
        raise
    except Exception as error:  # decoders of formats have errors of all kinds
        raise UsageError(f"an image cannot be read ({type(error).__name__}: {error})") from error
    if limits is None and (height % UNIT or width % UNIT or not height * width):
        raise UsageError(f"an image of {width} × {height} pixels: expected multiples of {UNIT}, as it is stored")
    size = (height, width) if limits is None else limits.size(height, width)
    if size != (height, width):
        rgb = rgb.resize((size[1], size[0]), Pillow.Resampling.BICUBIC)
    return Image(np.asarray(rgb, np.uint8))


def data_url(pixels: np.ndarray) -> str:
    """An image (H, W, 3) as a PNG in a data URL, without loss and with the same bytes everywhere."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)), _chunk(b"IEND", b"")]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def placed(url: str, start: int) -> Image:
    """The image of a `data_url`, which is not resized."""
    return read_image(data_of(url), None).at(start)
