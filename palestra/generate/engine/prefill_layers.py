"""A prompt's layers on a GPU: beside products and attention three kernels each, all bound by the memory they move."""

from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from palestra.generate.engine.decode_kernel import LATE
from palestra.generate.engine.decode_layers import DecodeLayers, add_norm
from palestra.lm.model import Attention, Block

HEADS = 16
"""Heads of a token that a program has, at most."""


class PrefillLayers:
    """All layers of a model for tokens of prompts that lie end to end, where `DecodeLayers` fit the model.

    Results are rounded where the modules round them.
    """

    def __init__(self, decode: DecodeLayers):
        self.model, self.cache, self.cos, self.sin = decode.model, decode.cache, decode.cos, decode.sin

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        places: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor, int | None], Tensor],
    ) -> None:
        """Put the keys and values of tokens (T) at these positions to these places in the cache.

        `attend` is over what is there. Of the last layer nothing else is computed.
        """
        x, added = F.embedding(tokens, self.model.embed), None
        blocks = cast("list[Block]", list(self.model.layers))
        for layer, block in enumerate(blocks[:-1]):
            attn = block.attn
            qkv = attn.qkv(add_norm(x, added, block.attn_norm, LATE.value)).unflatten(1, (-1, attn.dim))
            self._place(qkv, attn, positions, places)
            q, k, v = qkv.split([attn.heads, attn.kv, attn.kv], dim=1)
            attended = attend(layer, q, k, v, attn.window).flatten(1)
            added = block.mlp(add_norm(x, attn.o(attended)[None], block.mlp_norm, LATE.value))[None]
        attn, first = blocks[-1].attn, blocks[-1].attn.heads * blocks[-1].attn.dim
        normed = add_norm(x, added, blocks[-1].attn_norm, LATE.value)
        kv = F.linear(normed, attn.qkv.weight[first:], None if attn.qkv.bias is None else attn.qkv.bias[first:])
        self._place(kv.unflatten(1, (-1, attn.dim)), attn, positions, places)

    def _place(self, qkv: Tensor, attn: Attention, positions: Tensor, places: Tensor) -> None:
        """Normalize and rotate queries and keys of (T, H + 2K, dim) in place, and copy keys and values to the cache.

        There may be no queries.
        """
        rows, heads, dim = qkv.shape
        normed, eps, q_norm, k_norm = False, 0.0, qkv, qkv
        if attn.q_norm is not None and attn.k_norm is not None:
            normed, eps, q_norm, k_norm = True, attn.q_norm.eps, attn.q_norm.weight, attn.k_norm.weight
        block = min(HEADS, triton.next_power_of_2(heads))
        _turn_and_place[rows, triton.cdiv(heads, block)](
            qkv, q_norm, k_norm, self.cos, self.sin, positions, places, self.cache.keys[attn.layer],
            self.cache.values[attn.layer], heads - 2 * attn.kv, attn.kv, eps, dim // 2, normed, block,
            num_warps=max(1, min(4, block * dim // 2**9)),  # 16 bytes of each half a thread
        )  # fmt: skip


@triton.jit
def _turn_and_place(
    qkv, q_norm, k_norm, cos, sin, positions, places, keys, values, heads, kv, eps,
    HALF: tl.constexpr, NORMED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program has some heads of a token, each in two halves, which are rotated together."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside, turns = head < heads + 2 * kv, head < heads + kv
    is_k, is_v = turns & (head >= heads), inside & (head >= heads + kv)
    position, place = tl.load(positions + token), tl.load(places + token) * kv
    c, s = tl.load(cos + position * HALF + d), tl.load(sin + position * HALF + d)
    at = qkv + (token * (heads + 2 * kv) + head) * 2 * HALF + d
    old_first = tl.load(at, mask=inside, other=0.0)
    old_second = tl.load(at + HALF, mask=inside, other=0.0)
    dtype = qkv.dtype.element_ty
    first, second = old_first.to(tl.float32), old_second.to(tl.float32)
    if NORMED:
        root = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        to_first = tl.where(head < heads, tl.load(q_norm + d), tl.load(k_norm + d)).to(tl.float32)
        to_second = tl.where(head < heads, tl.load(q_norm + HALF + d), tl.load(k_norm + HALF + d)).to(tl.float32)
        first = (first * root * to_first).to(dtype).to(tl.float32)
        second = (second * root * to_second).to(dtype).to(tl.float32)
    new_first, new_second = (first * c - second * s).to(dtype), (second * c + first * s).to(dtype)
    tl.store(at, new_first, mask=turns)
    tl.store(at + HALF, new_second, mask=turns)
    to_key = keys + (place + head - heads) * 2 * HALF + d
    tl.store(to_key, new_first, mask=is_k)
    tl.store(to_key + HALF, new_second, mask=is_k)
    to_value = values + (place + head - heads - kv) * 2 * HALF + d
    tl.store(to_value, old_first, mask=is_v)
    tl.store(to_value + HALF, old_second, mask=is_v)
