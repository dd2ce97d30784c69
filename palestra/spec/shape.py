"""Architectures: networks of control; transformers, their parameter and FLOP counts, and the default precision."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, model_serializer, model_validator

from palestra.spec.model import Conflict, Model, without_defaults

Width = Annotated[int, Field(ge=1)]
Layer = Annotated[int, Field(ge=0)]


class RecurrentSpec(Model):
    """A recurrent layer after the hidden ones; its state is carried through the rollout and reset at episode ends."""

    cell: Literal["lstm", "gru"] = "lstm"
    """Type of the cell."""
    size: int = Field(default=64, ge=1)
    """Width of its state."""

    @property
    def width(self) -> int:
        """Numbers of its state: an LSTM also has a cell state."""
        return self.size * (2 if self.cell == "lstm" else 1)


class GraphSpec(Model):
    """Custom trunk: torch.nn layers by name, and how they connect."""

    layers: dict[str, dict[str, dict[str, JsonValue]]]
    """Layer name: {torch.nn class: arguments}, for example {first: {LazyLinear: {out_features: 64}}}."""
    join: dict[str, list[str]] = Field(default={})
    """Inputs of a layer other than the previous one, concatenated; `obs` is the observation."""


class NetSpec(Model):
    """Policy and value networks."""

    trunk: Literal["auto", "mlp", "nature", "impala"] = "auto"
    """Trunk: an MLP, or a CNN before it; auto: nature for images of at least 36 × 36."""
    hidden: list[Width] = Field(default=[64, 64])
    """Widths of the hidden layers; after a CNN usually one of 512."""
    critic_hidden: list[Width] | None = None
    """Widths of the critic's hidden layers; null: as `hidden`."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """Activation function."""
    layer_norm: bool = False
    """Layer norm before the activation of each hidden layer."""
    shared: bool = False
    """Share the hidden layers between policy and value."""
    orthogonal: bool = True
    """Orthogonal initialization, with gain 0.01 at the policy's and 1 at the value's output."""
    log_std: float = 0.0
    """Initial log standard deviation of continuous actions, in units of half the action range."""
    recurrent: RecurrentSpec | None = None
    """A recurrent layer after the hidden ones."""
    graph: GraphSpec | None = None
    """Custom trunk in place of `trunk` and `hidden`."""


class RopeScaling(Model):
    """Scaling of RoPE to contexts longer than in pretraining."""

    type: Literal["linear", "llama3", "yarn"]
    """Divide all frequencies; only the low ones (Llama 3); or by wavelength, with a temperature (YaRN, as in Qwen)."""
    factor: float = Field(gt=0)
    """Factor by which the context grows."""
    original_context: int = Field(default=8192, ge=1)
    """Context length of pretraining."""
    low: float = Field(default=1.0, gt=0)
    """llama3: wavelengths above original_context / low are stretched whole. yarn: the slow end of the ramp (β slow)."""
    high: float = Field(default=4.0, gt=0)
    """llama3: wavelengths below original_context / high stay. yarn: the fast end of the ramp (β fast), else 32."""
    attention_factor: float | None = Field(default=None, gt=0)
    """yarn: factor on cosines and sines; null: 0.1 · ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the ends of the ramp to whole dimensions (not in gpt-oss)."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "truncate")

    @model_validator(mode="before")
    @classmethod
    def _fast_end_of_yarn(cls, data: Any) -> Any:
        return {"high": 32.0, **data} if isinstance(data, dict) and data.get("type") == "yarn" else data

    def conflicts(self) -> Iterator[Conflict]:
        if self.low >= self.high:
            yield Conflict(("low",), f"expected less than high = {self.high:g}")
        of_yarn = ("attention_factor", "truncate")
        unused = {"linear": ("original_context", "low", "high", *of_yarn), "llama3": of_yarn}
        for name in unused.get(self.type, ()):
            if getattr(self, name) != type(self).model_fields[name].default:
                yield Conflict((name,), f"expected nothing, because `type: {self.type}` does not use it")


class MoESpec(Model):
    """Mixture of experts in place of each layer's MLP."""

    experts: int = Field(ge=2)
    """Routed experts per layer (E)."""
    active: int = Field(ge=1)
    """Active routed experts per token (top k)."""
    mlp: int = Field(ge=1)
    """Hidden width of one expert."""
    activation: Literal["swiglu", "bilinear", "clamped_swiglu"] = "swiglu"
    """Gated activation of an expert: SwiGLU, bilinear, or (up + 1) · gate · σ(1.702 · gate) clamped to 7 (gpt-oss)."""
    shared: int = Field(default=0, ge=0)
    """Shared experts, active for every token."""
    gated_shared: int | None = Field(default=None, ge=1)
    """Hidden width of one shared expert in place of `shared`, with its own sigmoid gate (Qwen2-MoE); null: none."""
    normalize: bool = True
    """Normalize the top-k router weights to sum 1."""
    balance: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balance loss (Switch Transformer, equation 4), per sequence."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the router z-loss (ST-MoE, equation 5)."""
    bias_rate: float = Field(default=0.0, ge=0)
    """Update rate of the selection biases of auxiliary-loss-free balancing (DeepSeek-V3 §2.1.2); 0: none."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "gated_shared")

    @property
    def shared_width(self) -> int:
        """Hidden width of all shared experts together."""
        return self.gated_shared or self.shared * self.mlp

    @property
    def routes(self) -> int:
        """Rows of the router, and of the shared expert's gate."""
        return self.experts + (self.gated_shared is not None)

    def conflicts(self) -> Iterator[Conflict]:
        if self.shared and self.gated_shared is not None:
            yield Conflict(("gated_shared",), f"expected null, because there are shared = {self.shared} experts")
        if self.shared_width and self.activation == "clamped_swiglu":
            yield Conflict(("activation",), "expected swiglu or bilinear, because there are shared experts")


class VisionSpec(Model):
    """A vision tower (Qwen2.5-VL): images become tokens of the sequence, one for each 28 × 28 pixels."""

    layers: int = Field(ge=1)
    """Number of layers."""
    width: int = Field(ge=4)
    """Width."""
    heads: int = Field(ge=1)
    """Attention heads."""
    mlp: int = Field(ge=1)
    """Hidden width of the MLP."""
    window: int = Field(default=112, ge=28)
    """Side of the windows in which patches attend, in pixels."""
    full_layers: list[Layer] = Field(default=[])
    """Layers whose patches attend to all of their image."""
    sections: list[Layer] = Field(min_length=3, max_length=3)
    """Pairs of a head's dimensions that rotate by time, height and width (M-RoPE); they add up to head_dim / 2."""
    tokens: list[Layer] | None = Field(default=None, min_length=3, max_length=3)
    """Ids of the tokens before, in place of and after an image; null: the tokenizer's."""

    def parameters(self, width: int) -> int:
        """Number of parameters, with embeddings of that width."""
        merged = 4 * self.width
        block = 4 * self.width**2 + 4 * self.width + 3 * self.width * self.mlp + 2 * self.mlp + 3 * self.width
        around = 3 * 2 * 14 * 14 * self.width + self.width + merged * (merged + 1) + width * (merged + 1)
        return self.layers * block + around

    def conflicts(self) -> Iterator[Conflict]:
        if self.width % self.heads or self.width // self.heads % 4:
            yield Conflict(("heads",), f"expected width = {self.width} divided by a multiple of 4 for each head")
        if not set(self.full_layers) <= set(range(self.layers)):
            yield Conflict(("full_layers",), f"expected numbers below layers = {self.layers}")


BEYOND_LLAMA = (
    *("nope_layers", "norm_order", "norm_offset", "embed_scale", "activation"),
    *("local_rope_theta", "query_pre_attn_scalar", "biases", "sinks", "norm", "positions"),
)
"""Fields of a shape that change a block from Llama's where they do not have their defaults."""


class Shape(Model):
    """Architecture of a decoder-only transformer of the Llama family."""

    layers: int = Field(ge=1)
    """Number of layers (L)."""
    width: int = Field(ge=1)
    """Model width (D)."""
    heads: int = Field(ge=1)
    """Attention heads (H)."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key/value heads (K) of grouped-query attention; null: as many as `heads`."""
    head_dim: int | None = Field(default=None, ge=2)
    """Head dimension; null: width / heads."""
    mlp: int | None = Field(default=None, ge=1)
    """Hidden width of the MLP; null where `moe` replaces it."""
    context: int = Field(ge=1)
    """Maximum sequence length."""
    vocab: int | None = Field(default=None, ge=1)
    """Vocabulary size; null: the tokenizer's, rounded up to a multiple of 64."""
    tied: bool = True
    """Tie the output head to the embedding."""
    rope_theta: float = Field(default=10000.0, gt=1)
    """RoPE base θ."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling; null: none."""
    local_rope_theta: float | None = Field(default=None, gt=1)
    """RoPE base θ of layers with the sliding window, without scaling (Gemma 3, OLMo 3); null: as in the others."""
    positions: Literal["learned"] | None = None
    """Positions: a learned embedding of each, added to the token's (GPT-2); null: RoPE."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """ε of the norms."""
    norm: Literal["layer"] | None = None
    """Norms: LayerNorm with a bias (GPT-2); null: RMSNorm."""
    norm_order: Literal["post", "both"] | None = None
    """Norms of what attention and MLP add: `post` in place of those of their input, `both`; null: of their input."""
    norm_offset: float | None = None
    """What is added to the weights of norms (Gemma: 1); null: nothing."""
    embed_scale: Literal["sqrt_width"] | None = None
    """Factor of embeddings: √width (Gemma); null: none."""
    activation: Literal["geglu", "gelu"] | None = None
    """Activation of the MLP: GEGLU (Gemma) or GELU without a gate (GPT-2), by the tanh approximation; null: SwiGLU."""
    qk_norm: Literal["head", "full"] | None = None
    """RMSNorm of queries and keys: per head (Qwen3), over all heads (OLMo 2, OLMoE), or none."""
    attention_bias: bool = False
    """Biases of the query, key and value projections (Qwen2)."""
    biases: bool = False
    """Biases of all matrices of a block, those of routers and experts too (GPT-2, gpt-oss)."""
    sinks: bool = False
    """Attention sinks: a learned logit of each head that joins the softmax and has no value (gpt-oss)."""
    query_pre_attn_scalar: int | None = Field(default=None, ge=1)
    """Scores of attention are divided by its square root (Gemma 3); null: the head dimension."""
    window: int | None = Field(default=None, ge=1)
    """Sliding attention window in tokens, including the current one; null: full attention."""
    window_from: int = Field(default=0, ge=0)
    """First layer with the sliding window."""
    full_layers: list[Layer] | None = None
    """Layers with full attention among those with the window (Gemma 3, OLMo 3); null: none."""
    nope_layers: list[Layer] | None = None
    """Layers without rotary positions (NoPE; SmolLM3); null: none."""
    moe: MoESpec | None = None
    """Mixture of experts in place of the MLP."""
    vision: VisionSpec | None = None
    """Vision tower that reads images; null: text only."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "full_layers", "vision", *BEYOND_LLAMA)

    @property
    def beyond_llama(self) -> list[str]:
        """The fields that change a block from Llama's: kernels for whole layers do not compute them."""
        return [name for name in BEYOND_LLAMA if getattr(self, name) != type(self).model_fields[name].default]

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def dim(self) -> int:
        """The width of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def hidden(self) -> int:
        """The hidden width of the MLP, where no experts stand in its place."""
        if self.mlp is None:
            raise ValueError("the shape has neither `mlp` nor a use for it")
        return self.mlp

    @property
    def gated(self) -> bool:
        """Whether MLP and experts have a gate: three matrices, not two."""
        return self.activation != "gelu"

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer."""
        return self.window if layer >= self.window_from and layer not in (self.full_layers or ()) else None

    def local_rope(self, layer: int) -> bool:
        """Whether a layer's rotary positions have the base `local_rope_theta`."""
        return self.local_rope_theta is not None and self.window_of(layer) is not None

    def conflicts(self) -> Iterator[Conflict]:
        """Fields that do not fit together."""
        if self.head_dim is None and self.width % self.heads:
            yield Conflict(("heads",), f"expected a divisor of width = {self.width}, or head_dim to be given")
        if self.heads % self.kv:
            yield Conflict(("kv_heads",), f"expected a divisor of heads = {self.heads}, got {self.kv}")
        if self.dim % 2:
            yield Conflict(("head_dim",), f"expected an even width of a head, got {self.dim}")
        if self.window is None and self.window_from:
            yield Conflict(("window_from",), "expected 0, because there is no `window`")
        if self.window is None and self.full_layers:
            yield Conflict(("full_layers",), "expected null, because there is no `window`")
        if self.window is None and self.local_rope_theta is not None:
            yield Conflict(("local_rope_theta",), "expected null, because there is no `window`")
        if self.moe is not None and self.activation is not None:
            yield Conflict(("activation",), "expected null, because `moe.activation` is that of experts")
        if self.positions is not None:
            for name in ("rope_scaling", "local_rope_theta", "nope_layers"):
                if getattr(self, name) is not None:
                    yield Conflict((name,), "expected null, because `positions` are learned")
        if self.norm is not None and self.norm_offset is not None:
            yield Conflict(("norm_offset",), "expected null, because it is one of RMSNorm")
        for name in ("full_layers", "nope_layers"):
            if not set(getattr(self, name) or ()) <= set(range(self.layers)):
                yield Conflict((name,), f"expected numbers below layers = {self.layers}")
        if self.vision is not None:
            if sum(self.vision.sections) != self.dim // 2:
                yield Conflict(("vision", "sections"), f"expected a sum of head_dim / 2 = {self.dim // 2}")
            for name in ("moe", "positions", "rope_scaling", "local_rope_theta"):
                if getattr(self, name) is not None:
                    yield Conflict((name,), "expected null, because there is a `vision` tower")
        if self.mlp is None and self.moe is None:
            yield Conflict(("mlp",), "expected the width of the MLP, or `moe` in its place")
        if self.moe is not None and self.moe.active > self.moe.experts:
            yield Conflict(("moe", "active"), f"expected at most experts = {self.moe.experts}")

    def parameters(self, *, active: bool = False) -> int:
        """Number of parameters; with `active`, only those used per token. Needs `vocab`."""
        vocab = _known(self.vocab)
        attention = self.width * (self.heads + 2 * self.kv) * self.dim + self.heads * self.dim * self.width
        attention += (self.heads + 2 * self.kv) * self.dim if self.attention_bias or self.biases else 0
        attention += (self.width if self.biases else 0) + (self.heads if self.sinks else 0)
        norms = (4 if self.norm_order == "both" else 2) * self.width
        if self.qk_norm is not None:
            norms += (2 if self.qk_norm == "head" else self.heads + self.kv) * self.dim
        if self.moe is None:
            mlp = self._mlp_parameters(self.hidden)
        else:
            mlp = self._mlp_parameters(self.moe.mlp) * (self.moe.active if active else self.moe.experts)
            mlp += self._mlp_parameters(self.moe.shared_width) if self.moe.shared_width else 0
            mlp += self.width * self.moe.routes + (self.moe.experts if self.biases else 0)
        each = 1 if self.norm is None else 2  # weights and biases of a norm
        rows = vocab * (1 if self.tied else 2) + each + (self.context if self.positions else 0)
        tower = 0 if self.vision is None else self.vision.parameters(self.width)
        return self.layers * (attention + norms * each + mlp) + self.width * rows + tower

    def _mlp_parameters(self, hidden: int) -> int:
        inner = 2 if self.gated else 1
        return (inner + 1) * self.width * hidden + (inner * hidden + self.width if self.biases else 0)

    def flops_per_token(self, context: int) -> float:
        """Forward floating-point operations a token at that context, with full (not causal) attention.

        The one formula of the project: matrix products as 2 operations a weight, softmax as 3 a score. Training is
        three times as much. Every published count that follows this convention can be compared.
        """
        vocab, width = _known(self.vocab), self.width
        queries = self.heads * self.dim
        if self.moe is None:
            mlp = 2 * (3 if self.gated else 2) * width * self.hidden
        else:
            hidden = self.moe.mlp * self.moe.active + self.moe.shared_width
            mlp = 2 * 3 * width * hidden + 2 * width * self.moe.routes
        projections = 2 * width * (queries + 2 * self.kv * self.dim) + 2 * queries * width
        scores = 4 * context * queries + 3 * context * self.heads
        return self.layers * (mlp + projections + scores) + 2 * width * vocab


def _known(vocab: int | None) -> int:
    if vocab is None:
        raise ValueError("the vocabulary is not known yet: it comes from the tokenizer")
    return vocab


LOGITS = 2**26
"""Logits that exist at one time (256 MB in FP32); on a GPU four times as many, to fill it."""
FAST_BF16 = frozenset({"avx512_bf16", "amx_bf16"})
"""Without one of these the library emulates products of bf16: with AVX-512 alone they take four times as long as in
FP32, on a Neoverse N1 a small one 130 times. The bf16 instructions of newer ARM cores have not been measured."""


def precision(wanted: str, device: str) -> str:
    """`wanted`; for auto what the device computes fast: bf16 on a GPU and on an x86 CPU that has it, FP32 on others."""
    if wanted != "auto":
        return wanted
    return "bf16" if device != "cpu" or cpu_features() & FAST_BF16 else "fp32"


def described(wanted: str, device: str) -> str:
    """The same for people, where `device` may be auto too."""
    if wanted != "auto" or device != "auto":
        return precision(wanted, device)
    return f"{precision(wanted, 'cuda')} on a GPU, {precision(wanted, 'cpu')} on this CPU"


@cache
def cpu_features() -> frozenset[str]:
    """What the CPU can do, as Linux calls it; nothing is known on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(" ".join(listed).split())
