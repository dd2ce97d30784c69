"""The transformer. Training and generation run these modules; only what `attend` does differs between them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from palestra.lm import native
from palestra.lm.layers import MLP, Linear, RMSNorm, doubled, frequencies, rotate
from palestra.lm.moe import MoE
from palestra.spec.shape import Shape


class Attend(Protocol):
    """Causal attention of the tokens of one forward pass, over themselves or over a cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q (T, H, dim), k and v (T, K, dim) → (T, H, dim)."""
        ...


class ModelOutput(NamedTuple):
    """What a forward pass gives."""

    hidden: Tensor
    """The normalized last hidden states (T, D), from which heads read."""
    router: Tensor | None
    """Router logits (L, T, E) of a mixture of experts."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        self.layer, self.window, self.dim = layer, shape.window_of(layer), shape.dim
        self.heads, self.kv = shape.heads, shape.kv
        self.rotary = layer not in (shape.nope_layers or ())
        rows, kv_rows = shape.heads * shape.dim, shape.kv * shape.dim
        parts = {"q_proj": rows, "k_proj": kv_rows, "v_proj": kv_rows}
        self.qkv = Linear(shape.width, parts, bias=shape.attention_bias)
        self.o = Linear(rows, {"o_proj": shape.width})
        self.q_norm, self.k_norm, self.per_head = None, None, shape.qk_norm == "head"
        if shape.qk_norm is not None:
            self.q_norm = RMSNorm(shape.dim if self.per_head else rows, shape.norm_eps)
            self.k_norm = RMSNorm(shape.dim if self.per_head else kv_rows, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """(T, D) → (T, D)."""
        qk, v = self.qkv(x).unflatten(-1, (-1, self.dim)).split([self.heads + self.kv, self.kv], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = self._normalized(qk, self.q_norm, self.k_norm)
        qk = rotate(qk, cos, sin) if self.rotary else qk
        q, k = qk.split([self.heads, self.kv], dim=1)
        return self.o(attend(self.layer, q, k, v, self.window).flatten(1))

    def _normalized(self, qk: Tensor, q_norm: RMSNorm, k_norm: RMSNorm) -> Tensor:
        """Queries and keys (T, H + K, dim), each head for itself or all together."""
        both = zip(qk.split([self.heads, self.kv], dim=1), (q_norm, k_norm), strict=True)
        if self.per_head:
            return torch.cat([norm(part) for part, norm in both], dim=1)
        return torch.cat([norm(part.flatten(1)).view(part.shape) for part, norm in both], dim=1)


class Block(nn.Module):
    """Attention and MLP (or experts), each with a norm of what it reads, or of what it adds, or of both."""

    def __init__(self, shape: Shape, layer: int):
        super().__init__()
        before, after = shape.norm_order != "post", shape.norm_order is not None
        self.attn_norm, self.mlp_norm, self.attn_out_norm, self.mlp_out_norm = (
            RMSNorm(shape.width, shape.norm_eps) if wanted else nn.Identity()
            for wanted in (before, before, after, after)
        )
        self.attn = Attention(shape, layer)
        self.mlp = MLP(shape.width, shape.hidden) if shape.moe is None else MoE(shape.width, shape.moe)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """The new residual stream, and the router's logits (T, E) where there are experts."""
        x = x + self.attn_out_norm(self.attn(self.attn_norm(x), cos, sin, attend))
        h = self.mlp_norm(x)
        out, router = self.mlp(h) if isinstance(self.mlp, MoE) else (self.mlp(h), None)
        return x + self.mlp_out_norm(out), router


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
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        self.head = None if shape.tied else nn.Parameter(torch.empty(shape.vocab, shape.width))
        self._frequencies: dict[torch.device, Tensor] = {}

    @property
    def unembed(self) -> Tensor:
        """The matrix (V, D) whose rows score the next token."""
        return self.embed if self.head is None else self.head

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> ModelOutput:
        """Tokens and their positions in their sequences (T) → hidden states (T, D)."""
        layers, x, before = self.part or Part(range(len(self.layers)), None, None)
        x = self._embedded(tokens) if x is None else x
        cos, sin = self.rotation(positions)
        if not x.is_cuda:
            cos, sin = doubled(cos, sin)
        routers = [] if before is None else [*before.unbind()]
        for layer in layers:
            block = self.layers[layer]
            if torch.is_grad_enabled() and self.checkpointing(layer):
                x, router = checkpoint(block, x, cos, sin, attend, use_reentrant=False)
            else:
                x, router = block(x, cos, sin, attend)
            routers.append(router)
        x = self.norm(x) if layers.stop == len(self.layers) else x
        return ModelOutput(x, None if self.shape.moe is None else torch.stack(routers))

    def _embedded(self, tokens: Tensor) -> Tensor:
        split = self.vocabulary
        return (F.embedding(tokens, self.embed) if split is None else split.embed(tokens, self.embed)).to(self.dtype)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, dim / 2) of the positions, in FP32 whatever the model's precision."""
        inverse, scale = frequencies(self.shape)
        angles = positions[:, None].float() * self._on(inverse, positions.device)
        return angles.cos() * scale, angles.sin() * scale

    def _on(self, inverse: Tensor, device: torch.device) -> Tensor:
        # Not a buffer: `.to(bfloat16)` would round it.
        if device not in self._frequencies:
            self._frequencies[device] = inverse.to(device)
        return self._frequencies[device]

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Set the parameters to `initial`."""
        for parameter, (_, weight) in zip(self.parameters(), self.initial(generator), strict=True):
            parameter.copy_(weight)

    def initial(self, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
        """Normal weights of deviation 0.02, outputs of the residual branches scaled by 1/√(2L) (GPT-2), norms 1.

        Sampled on the CPU, so that a seed gives the same model on every device.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                yield name, torch.full(parameter.shape, float(name.endswith("norm.weight")), device="cpu")
            else:
                residual = name.endswith(("attn.o.weight", "down.weight", "mlp.down"))
                deviation = 0.02 / (2 * self.shape.layers) ** 0.5 if residual else 0.02
                normal = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                yield name, normal * deviation
