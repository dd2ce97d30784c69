"""The transformer. Training and generation run these modules; only what `attend` does differs between them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from palestra.data.media import Image
from palestra.errors import UsageError
from palestra.lm import native
from palestra.lm.layers import (
    MLP,
    LayerNorm,
    Linear,
    RMSNorm,
    doubled,
    frequencies,
    geglu,
    gelu,
    local,
    own_gradients,
    rotate,
    swiglu,
)
from palestra.lm.moe import MoE
from palestra.lm.vision import Seen, VisionTower
from palestra.spec.shape import Shape


class Attend(Protocol):
    """Causal attention of the tokens of one forward pass, over themselves or over a cache."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim) → (T, H, dim); `sinks` (H) are logits of keys without values."""
        ...


class ModelOutput(NamedTuple):
    """What a forward pass gives."""

    hidden: Tensor
    """The normalized last hidden states (T, D), from which heads read."""
    router: Tensor | None
    """Router logits (L, T, E) of a mixture of experts."""


def norm_of(shape: Shape, width: int) -> RMSNorm | LayerNorm:
    """A norm as all of a model's are."""
    if shape.norm == "layer":
        return LayerNorm(width, shape.norm_eps)
    return RMSNorm(width, shape.norm_eps, shape.norm_offset)


class Attention(nn.Module):
    """Grouped-query attention, with rotary positions unless they are learned."""

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.layer, self.window, self.dim = layer, shape.window_of(layer), shape.dim
        self.heads, self.kv = shape.heads, shape.kv
        self.rotary = shape.positions is None and layer not in (shape.nope_layers or ())
        rows, kv_rows = shape.heads * shape.dim, shape.kv * shape.dim
        parts = {"q_proj": rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.qkv = Linear(shape.width, parts, bias=shape.attention_bias or shape.biases)
        self.o = Linear(rows, {"o_proj": shape.width}, bias=shape.biases)
        self.sinks = nn.Parameter(torch.zeros(shape.heads)) if shape.sinks else None
        self.q_norm, self.k_norm, self.per_head = None, None, shape.qk_norm == "head"
        if shape.qk_norm is not None:
            self.q_norm = norm_of(shape, shape.dim if self.per_head else rows)
            self.k_norm = norm_of(shape, shape.dim if self.per_head else kv_rows)
        scalar = shape.query_pre_attn_scalar
        self.query_scale = None if scalar is None else (shape.dim / scalar) ** 0.5
        """What makes of `attend`'s division by √dim another one."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """(T, D) → (T, D), or (N, D) for the N tokens that are wanted."""
        q, k, v = self._heads(self.qkv(x).unflatten(-1, (-1, self.dim)), cos, sin)
        q = q if self.query_scale is None else q * self.query_scale
        sinks = {} if self.sinks is None else {"sinks": local(self.sinks)}
        attended = attend(self.layer, q, k, v, self.window, **sinks).flatten(1)
        return self.o(attended if wanted is None else attended[wanted])

    def _heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of (T, H + 2K, dim), normalized and rotated where they are to be."""
        if self.rotary and self.q_norm is None and own_gradients(qkv):
            from palestra.lm import kernels

            return kernels.Turned.apply(qkv, cos, sin, self.heads)
        qk, v = qkv.split([self.heads + self.kv, self.kv], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = self._normalized(qk, self.q_norm, self.k_norm)
        qk = rotate(qk, cos, sin) if self.rotary else qk
        q, k = qk.split([self.heads, self.kv], dim=1)
        return q, k, v

    def _normalized(self, qk: Tensor, q_norm: nn.Module, k_norm: nn.Module) -> Tensor:
        """Queries and keys (T, H + K, dim), each head for itself or all together."""
        both = zip(qk.split([self.heads, self.kv], dim=1), (q_norm, k_norm), strict=True)
        if self.per_head:
            return torch.cat([norm(part) for part, norm in both], dim=1)
        return torch.cat([norm(part.flatten(1)).view(part.shape) for part, norm in both], dim=1)


class Block(nn.Module):
    """Attention and MLP (or experts), each with a norm of what it reads, or of what it adds, or of both.

    What the MLP adds to the residual stream is left to whoever reads the stream next: compiled, the sum is then part of
    the next norm. In the MLP's own product it would cost a copy of the stream.
    """

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        before, after = shape.norm_order != "post", shape.norm_order is not None
        self.attn_norm, self.mlp_norm, self.attn_out_norm, self.mlp_out_norm = (
            norm_of(shape, shape.width) if wanted else nn.Identity() for wanted in (before, before, after, after)
        )
        self.attn = Attention(shape, layer)
        gate = {None: swiglu, "geglu": geglu, "gelu": gelu}[shape.activation]
        self.mlp: MLP | MoE
        if shape.moe is None:
            self.mlp = MLP(shape.width, shape.hidden, gate, bias=shape.biases)
        else:
            self.mlp = MoE(shape.width, shape.moe, biases=shape.biases)

    def forward(
        self,
        x: Tensor,
        added: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The new residual stream and what is to be added to it, as they come in, of the tokens that are wanted.

        And the router's logits where there are experts.
        """
        x = _sum(x, added)
        attended = self.attn(self.attn_norm(x), cos, sin, attend, wanted)
        x = (x if wanted is None else x[wanted]) + self.attn_out_norm(attended)
        h = self.mlp_norm(x)
        out, router = self.mlp(h) if isinstance(self.mlp, MoE) else (self.mlp(h), None)
        return x, self.mlp_out_norm(out), router


def _sum(x: Tensor, added: Tensor | None) -> Tensor:
    return x if added is None else x + added


class Part(NamedTuple):
    """Some of a model's layers, where a pipeline has others elsewhere."""

    layers: range
    hidden: Tensor | None
    """What came out of the layers before; None: these are the first."""
    routers: Tensor | None
    """The router logits of the layers before."""


class Vocabulary(Protocol):
    """The embedding and the head of a model whose vocabulary is split over ranks."""

    def embed(self, tokens: Tensor, matrix: Tensor) -> Tensor: ...

    def own(self, x: Tensor) -> Tensor: ...

    def hidden(self, x: Tensor) -> Tensor: ...

    def token_logprobs(
        self, hidden: Tensor, matrix: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]: ...


class Transformer(nn.Module):
    """A decoder over packed sequences: tokens lie in one row, `attend` knows where each sequence begins.

    Parameters may be FP32 while `dtype` is bf16: every matrix is then cast where it is used.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32):
        super().__init__()
        if shape.vocab is None:
            raise ValueError("a model needs to know its vocabulary: shape.vocab is null")
        native.settle_products()
        self.shape, self.dtype = shape, dtype
        self.checkpointing: Callable[[int], bool] = lambda layer: False
        """Which layers drop their activations and recompute them in the backward pass."""
        self.vocabulary: Vocabulary | None = None
        """How tokens are embedded and scored where the vocabulary is split over ranks."""
        self.layout: Any = None
        """How tokens are spread over ranks, where they are."""
        self.pipeline: Any = None
        """How layers are spread over ranks, where they are, and micro-batches sent through them."""
        self.part: Part | None = None
        """The layers of the next forward pass in a pipeline."""
        self.source: Callable[[Any], None] | None = None
        """What fills it once it is split over ranks, where it has no memory before."""
        self.embed = nn.Parameter(torch.empty(shape.vocab, shape.width))
        self.positions = nn.Parameter(torch.empty(shape.context, shape.width)) if shape.positions else None
        self.vision = None if shape.vision is None else VisionTower(shape.vision, shape.width)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = norm_of(shape, shape.width)
        self.head = None if shape.tied else nn.Parameter(torch.empty(shape.vocab, shape.width))
        self._frequencies: dict[tuple[torch.device, bool], Tensor] = {}

    @property
    def unembed(self) -> Tensor:
        """The matrix (V, D) whose rows score the next token."""
        return self.embed if self.head is None else self.head

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
        seen: Seen | Callable[[Tensor], Tensor] | None = None,
    ) -> ModelOutput:
        """Tokens and their positions in their sequences (T) → hidden states (T, D).

        With `wanted`, numbers of some of the tokens, theirs alone: the last layer then computes no others. Between
        images positions are (3, T). What is `seen` stands for tokens of images: images, or a function that puts
        embeddings that the tower has computed before in their place.
        """
        layers, x, before = self.part or Part(range(len(self.layers)), None, None)
        x = self._embedded(tokens, positions) if x is None else x
        if seen is not None:
            x = self._with_images(x, seen) if isinstance(seen, Seen) else seen(x)
        angles = {local: self.rotation(positions, local) for local in {*map(self.shape.local_rope, layers)}}
        if not x.is_cuda:
            angles = {local: doubled(*pair) for local, pair in angles.items()}
        routers, added = [] if before is None else [*before.unbind()], None
        for layer in layers:
            block, angle = self.layers[layer], angles[self.shape.local_rope(layer)]
            if torch.is_grad_enabled() and self.checkpointing(layer):  # of its inputs one is kept
                x, added, router = checkpoint(block, _sum(x, added), None, *angle, attend, use_reentrant=False)
            else:
                last = layer == len(self.layers) - 1
                x, added, router = block(x, added, *angle, attend, wanted if last else None)
            routers.append(router)
        x = _sum(x, added)
        x = self.norm(x) if layers.stop == len(self.layers) else x
        return ModelOutput(x, None if self.shape.moe is None else torch.stack(routers))

    def _embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        split = self.vocabulary
        x = F.embedding(tokens, self.embed) if split is None else split.embed(tokens, self.embed)
        if self.positions is not None:
            x = x + F.embedding(positions if split is None else split.own(positions), local(self.positions))
        x = x.to(self.dtype)
        if self.shape.embed_scale is None:
            return x
        return x * torch.tensor(self.shape.width**0.5, dtype=self.dtype, device="cpu").item()  # rounded, as Gemma's is

    def _with_images(self, x: Tensor, seen: Seen) -> Tensor:
        """The embeddings with those of images in the place of their tokens'."""
        return x.index_copy(0, seen.places, self.look(seen.images)[seen.rows])

    def look(self, images: Sequence[Image]) -> Tensor:
        """The embeddings (M, D) of the tokens of images, end to end."""
        if self.vision is None:
            raise UsageError("this model reads text only, and was given an image: use one with a vision tower")
        return self.vision(images, self.dtype)

    def rotation(self, positions: Tensor, local: bool = False) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, dim / 2) of the positions, in FP32 whatever the model's precision.

        Those of layers with `local_rope_theta`, if `local`. Of positions in time, height and width (3, T) each
        frequency takes one (M-RoPE).
        """
        shape = self.shape
        if local:
            shape = shape.model_copy(update={"rope_theta": shape.local_rope_theta, "rope_scaling": None})
        inverse, scale = frequencies(shape)
        if positions.ndim == 2:
            positions = positions[self._axes(positions.device)].T.contiguous()  # as kernels read angles
        else:
            positions = positions[:, None]
        angles = positions.float() * self._on(inverse, positions.device, local)
        return angles.cos() * scale, angles.sin() * scale

    def _axes(self, device: torch.device) -> Tensor:
        """Which of time, height and width each frequency (dim / 2) rotates by."""
        assert self.shape.vision is not None
        axes = [axis for axis, count in enumerate(self.shape.vision.sections) for _ in range(count)]
        return torch.tensor(axes, device=device)

    def _on(self, inverse: Tensor, device: torch.device, local: bool) -> Tensor:
        # Not a buffer: `.to(bfloat16)` would round it.
        if (device, local) not in self._frequencies:
            self._frequencies[device, local] = inverse.to(device)
        return self._frequencies[device, local]

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Set the parameters to `initial`."""
        for parameter, (_, weight) in zip(self.parameters(), self.initial(generator), strict=True):
            parameter.copy_(weight)

    def initial(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Normal weights of deviation 0.02, outputs of the residual branches scaled by 1/√(2L) (GPT-2), norms 1.

        Sampled on the CPU, so that a seed gives the same model on every device.
        """
        one = 1.0 - (self.shape.norm_offset or 0.0)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2 or name.endswith("_bias"):
                yield name, torch.full(parameter.shape, one if name.endswith("norm.weight") else 0.0, device="cpu")
            else:
                residual = name.endswith(("attn.o.weight", "down.weight", "mlp.down"))
                deviation = 0.02 / (2 * self.shape.layers) ** 0.5 if residual else 0.02
                normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                yield name, normal * deviation
