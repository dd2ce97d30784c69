"""The vision tower of Qwen2.5-VL: patches of images to embeddings that stand between those of tokens."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.data.media import DEVIATION, MEAN, MERGE, PATCH, THETA, TIMES, UNIT, Image
from palestra.lm.layers import MLP, Linear, RMSNorm, rotate, sent, swiglu
from palestra.spec.shape import VisionSpec

EPS = 1e-6
FORM = (3, TIMES, PATCH, PATCH)
"""Of a patch."""


class Seen(NamedTuple):
    """The images of a forward pass."""

    images: list[Image]
    """Each once."""
    places: Tensor
    """(M): where tokens of images lie among those that are computed."""
    rows: Tensor
    """(M): which row of the tower's output each gets."""


class VisionAttention(nn.Module):
    """Attention of patches over those of the same image or window, with rotary positions in two dimensions."""

    def __init__(self, spec: VisionSpec):
        super().__init__()
        self.heads = spec.heads
        self.qkv = Linear(spec.width, {"qkv": 3 * spec.width}, bias=True)
        self.o = Linear(spec.width, {"proj": spec.width}, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, groups: "Groups") -> Tensor:
        """(N, D) → (N, D)."""
        qk, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).split([2, 1], dim=1)
        qkv = torch.cat([rotate(qk.flatten(1, 2), cos, sin).view(qk.shape), v], dim=1)
        pieces = []
        for index in groups.members:
            q, k, v = qkv[index].permute(2, 0, 3, 1, 4)  # (n, heads, length, dim) each
            pieces.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
        return self.o(torch.cat(pieces)[groups.back])


class VisionBlock(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, spec: VisionSpec):
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(spec.width, EPS), RMSNorm(spec.width, EPS)
        self.attn = VisionAttention(spec)
        self.mlp = MLP(spec.width, spec.mlp, swiglu, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, groups: "Groups") -> Tensor:
        """(N, D) → (N, D)."""
        x = x + self.attn(self.attn_norm(x), cos, sin, groups)
        return x + self.mlp(self.mlp_norm(x))


class Groups(NamedTuple):
    """Patches that attend to each other."""

    members: list[Tensor]
    """By size: (n, size) places of patches."""
    back: Tensor
    """(N): where each patch lies in these, end to end."""

    @classmethod
    def of(cls, places: Sequence[np.ndarray], device: torch.device) -> "Groups":
        """Of the places of each group's patches."""
        sizes = sorted({len(group) for group in places})
        members = [np.stack([group for group in places if len(group) == size]) for size in sizes]
        back = np.argsort(np.concatenate([index.ravel() for index in members]))
        return cls([sent(torch.from_numpy(i), device) for i in members], sent(torch.from_numpy(back), device))


class VisionTower(nn.Module):
    """Images to one embedding for each of their tokens."""

    def __init__(self, spec: VisionSpec, width: int):
        super().__init__()
        self.spec = spec
        # A convolution whose steps are its size: a product with each patch.
        self.patches = Linear(math.prod(FORM), {"patches": spec.width})
        self.blocks = nn.ModuleList(VisionBlock(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.width, EPS)
        merged = MERGE**2 * spec.width
        self.merge = Linear(merged, {"merge": merged}, bias=True)
        self.out = Linear(merged, {"out": width}, bias=True)

    def forward(self, images: Sequence[Image], dtype: torch.dtype) -> Tensor:
        """The embeddings (M, D) of the tokens of all images, end to end."""
        device = self.norm.weight.device
        x = sent(torch.cat([patches_of(image.pixels) for image in images]), device).to(dtype)
        x = self.patches(x)
        cos, sin = self._angles(images, device)
        whole, windows = self._groups(images, device)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, whole if layer in self.spec.full_layers else windows)
        return self.out(F.gelu(self.merge(self.norm(x).unflatten(0, (-1, MERGE**2)).flatten(1))))

    def _angles(self, images: Sequence[Image], device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines (N, dim / 2) of each patch: half of them of its row, half of its column."""
        dim = self.spec.width // self.spec.heads
        inverse = 1.0 / THETA ** (torch.arange(0, dim // 2, 2, dtype=torch.float32, device="cpu") / (dim // 2))
        at = torch.from_numpy(np.concatenate([_coordinates(image) for image in images])).float()  # (N, 2)
        angles = sent((at[:, :, None] * inverse).flatten(1), device)
        return angles.cos(), angles.sin()

    def _groups(self, images: Sequence[Image], device: torch.device) -> tuple[Groups, Groups]:
        """The patches of each image, and of each window in it."""
        side = self.spec.window // UNIT  # in tokens, as windows do not divide one
        whole, windows, start = [], [], 0
        for image in images:
            rows, columns = image.grid
            units = np.arange(start, start + rows * columns).reshape(rows, columns)
            whole.append(_patches(units))
            for row in range(0, rows, side):
                windows += [_patches(units[row : row + side, at : at + side]) for at in range(0, columns, side)]
            start += rows * columns
        return Groups.of(whole, device), Groups.of(windows, device)


def _patches(units: np.ndarray) -> np.ndarray:
    """The places of the patches of tokens."""
    return (units.ravel()[:, None] * MERGE**2 + np.arange(MERGE**2)).ravel()


def _coordinates(image: Image) -> np.ndarray:
    """(N, 2): row and column of each patch; the four of a token follow each other."""
    rows, columns = image.grid
    at = np.indices((rows * MERGE, columns * MERGE)).reshape(2, rows, MERGE, columns, MERGE)
    return at.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


def patches_of(pixels: np.ndarray) -> Tensor:
    """(N, 3 · 2 · 14 · 14) FP32: the normalized patches of an image, the four of a token after each other."""
    rows, columns = pixels.shape[0] // UNIT, pixels.shape[1] // UNIT
    scaled = (torch.from_numpy(pixels.copy()).float() / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    parts = scaled.view(rows, MERGE, PATCH, columns, MERGE, PATCH, 3).permute(0, 3, 1, 4, 6, 2, 5)
    return parts.reshape(-1, 3, 1, PATCH, PATCH).expand(-1, -1, TIMES, -1, -1).flatten(1)
