"""Bytes that training a language model takes on each device, predicted from its spec before anything is loaded."""

from typing import get_args

from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.lm import DpoSpec, PretrainSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.spec.lm import AdamWSpec, LanguageModelSpec, LmSpec, Matrix, WritingSpec
from palestra.spec.shape import LOGITS, Shape, precision

SHORT = 64
"""Sequences up to this length keep their attention probabilities on a CPU, in FP32; longer ones do on no device."""

WEIGHTS, REFERENCE, VALUE, KV_CACHE = "weights", "reference model", "value model", "KV cache, prompts not counted"


def predicted(spec: LanguageModelSpec, shape: Shape, device: str) -> dict[str, int]:
    """Bytes on one device (`cpu` or `cuda`) by what they hold; their sum is the peak. Needs `shape.vocab`.

    Activations are those that autograd keeps without `torch.compile`, which keeps fewer.
    """
    sizes = _Sizes(spec, shape, device)
    axes = spec.parallel.sizes(spec.processes)
    apart = spec.processes // axes["data"]  # processes that share a copy of the model
    split = axes["tensor"] * axes["pipeline"] * axes["expert"]  # those that compute with a part of it alone
    activations, working, gradients = sizes.activations(), sizes.working(), sizes.gradients() / apart
    if not sizes.accumulates:  # gradients of a layer take the place of its activations
        gradients = max(0.0, gradients + sizes.embedding * sizes.kept - activations - working)
    rows = {
        WEIGHTS: sizes.weights() / apart,
        "copies for arithmetic": sizes.copies() / split,
        "gradients": gradients,
        "optimizer state": sizes.moments() / apart,
        "activations": activations,
        "logits and temporaries": working,
        **_others(spec, shape, sizes),
    }
    return {name: round(count) for name, count in rows.items() if count}


def after_loading(spec: LanguageModelSpec, shape: Shape, device: str) -> int:
    """Bytes that come to one device once its models are loaded, a generator's weights included, its KV cache not."""
    rows, sizes = predicted(spec, shape, device), _Sizes(spec, shape, device)
    loaded = round(sizes.weights()) if VALUE in rows else 0  # of the value model
    return sum(count for name, count in rows.items() if name not in (WEIGHTS, REFERENCE, KV_CACHE)) - loaded


def host_bytes(spec: LanguageModelSpec, shape: Shape) -> int:
    """Bytes of optimizer state in the host's memory."""
    sizes = _Sizes(spec, shape, "cuda")
    return round(sizes.each * sizes.trained) if isinstance(spec.optim, AdamWSpec) and spec.optim.offload else 0


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the matrices of a layer that may have adapters."""
    width, rows, kv = shape.width, shape.heads * shape.dim, shape.kv * shape.dim
    hidden = shape.hidden if shape.moe is None else shape.moe.shared_width
    gate = hidden if shape.gated else 0
    sizes = [(width, rows), (width, kv), (width, kv), (rows, width), (width, gate), (width, hidden), (hidden, width)]
    return {name: size for name, size in zip(get_args(Matrix), sizes, strict=True) if all(size)}


class _Sizes:
    """Counts of numbers, and bytes made of them."""

    def __init__(self, spec: LanguageModelSpec, shape: Shape, device: str):
        assert shape.vocab is not None
        self.spec, self.shape, self.cuda, lora = spec, shape, device != "cpu", spec.model.lora
        self.kept = 2 if spec.train.weights == "bf16" else 4
        """Bytes of a weight."""
        self.used = 2 if precision(spec.train.precision, device) == "bf16" else 4
        """Bytes of a number in the arithmetic."""
        self.embedding, self.total = shape.vocab * shape.width, shape.parameters()
        self.targets = matrices(shape)
        self.frozen = shape.layers * sum(rows * columns for rows, columns in self.targets.values())
        """Weights that QLoRA keeps in 4 bits."""
        if lora is not None and "all" not in lora.targets:
            self.targets = {name: size for name, size in self.targets.items() if name in lora.targets}
        self.adapters = 0
        if lora is not None:
            each = sum(lora.rank * (rows + columns) + lora.dora * rows for columns, rows in self.targets.values())
            self.adapters = shape.layers * each
        self.whole = self.total if lora is None else len(lora.modules_to_save) * self.embedding
        """Weights of the model itself that are trained."""
        self.trained = self.whole + self.adapters
        eight = isinstance(spec.optim, AdamWSpec) and spec.optim.state == "8bit"
        self.each = 2 + 8 / 256 if eight else 8
        """Bytes of AdamW's moments of a weight."""
        layers = shape.layers
        self.recomputed = {"none": 0, "selective": (layers + 1) // 2, "full": layers}[spec.train.checkpointing]
        """Layers whose activations are dropped."""
        context = spec.data.context if isinstance(spec, LmSpec) else 1
        self.longest = spec.rollout.max_new_tokens if isinstance(spec, PosttrainSpec | DistillSpec) else context
        """Tokens of a sequence at most, prompts of rollouts not counted."""
        micro = max(context, spec.train.micro_tokens)
        fixed = micro // context * context if isinstance(spec, PretrainSpec) else micro
        step = spec.examples * context if isinstance(spec, LmSpec) else fixed + 1
        self.accumulates = step > fixed
        self.tokens = min(fixed, step) // spec.parallel.context // spec.parallel.tensor
        self.length = context if isinstance(spec, PretrainSpec) else None
        """Of every sequence, where all are equally long."""

    def weights(self) -> float:
        ema = getattr(self.spec.train, "ema", None) is not None
        return self.base(self.kept) + self.adapters * 4 + ema * self.gradients()

    def base(self, each: int) -> float:
        """The model without adapters, with so many bytes a weight that is not in 4 bits."""
        lora = self.spec.model.lora
        quantized = 0 if lora is None or lora.quantize is None else self.frozen
        four = 0.5 + ((1 + 4 / 256) / 64 if lora is not None and lora.double_quantize else 4 / 64)
        return (self.total - quantized) * each + quantized * four

    def gradients(self) -> float:
        return self.whole * self.kept + self.adapters * 4

    def moments(self) -> float:
        optim = self.spec.optim
        if isinstance(optim, AdamWSpec):
            return 0.0 if optim.offload and self.cuda else self.each * self.trained
        inside = self.total - self.embedding * (1 if self.shape.tied else 2)
        return 4 * inside + 8 * (self.trained - inside)

    def copies(self) -> float:
        """Layers' weights in the arithmetic's precision, which the backward pass needs again."""
        layers = self.shape.layers
        inside = self.total - self.embedding * (1 if self.shape.tied else 2)
        if self.spec.model.lora is not None and self.spec.model.lora.quantize is not None:
            inside -= self.frozen  # these are restored for a moment
        inside /= layers
        return 0.0 if self.used == self.kept else inside * self.used * (layers - max(0, self.recomputed - 1))

    def activations(self) -> float:
        """What the backward pass needs: of each layer, or its input alone, and around them."""
        shape, kept = self.shape, self.shape.layers - self.recomputed
        ends = 3 * shape.width * self.used + (8 if not self.cuda else 4) * shape.dim + 64
        return self.tokens * (kept * self._layer() + self.recomputed * shape.width * self.used + ends)

    def _layer(self) -> float:
        """Bytes a token of a layer."""
        shape, used, lora = self.shape, self.used, self.spec.model.lora
        width, rows, kv = shape.width, shape.heads * shape.dim, shape.kv * shape.dim

        def read(*names: str) -> bool:  # whether the input of these matrices is needed for a gradient
            return lora is None or any(name in self.targets for name in names)

        numbers = (2 + read("q_proj", "k_proj", "v_proj") + read("gate_proj", "up_proj")) * width
        numbers += 2 * width * (shape.norm_order == "both")
        wide = 2 + (shape.heads + shape.kv) * (shape.qk_norm is not None)  # numbers in FP32: norms' scales
        if not self.cuda and self.length is not None and self.length <= SHORT:
            wide += rows + 2 * kv + shape.heads * max(self.length, 16)
            numbers += rows * read("o_proj") + (rows + 2 * kv) * (shape.qk_norm is not None)
        elif not self.cuda and used == 2:
            wide += 2 * rows + 2 * kv + shape.heads
            numbers += rows * read("o_proj") + (rows + 2 * kv) * (shape.qk_norm is not None)
        else:
            # Our kernel turns queries and keys where they lie; learned positions turn none.
            turned = (self.cuda and shape.qk_norm is None) or shape.positions is not None
            numbers += (rows + 2 * kv) + (rows + kv) * (not turned) + rows
            wide += shape.heads
        if shape.sinks and not self.cuda:  # attention by whole products, with a key and a value for each head
            wide += shape.heads * (self.longest + 16)
            numbers += 2 * (rows - kv)
        eager = shape.activation is not None  # autograd's own gate keeps its nonlinear half too
        if shape.moe is None or shape.moe.shared_width:
            hidden = shape.hidden if shape.moe is None else shape.moe.shared_width
            numbers += ((2 + eager if shape.gated else 1) + read("down_proj")) * hidden
        if shape.moe is not None:
            numbers += shape.moe.active * (2 * width + (3 + eager) * shape.moe.mlp)
            wide += 3 * shape.moe.experts + width * (used == 2)
        if lora is not None:
            numbers += sum(lora.rank + 2 * lora.dora * out for _, out in self.targets.values())
        return numbers * used + wide * 4

    def working(self) -> float:
        """The larger of what the head and a layer need for a moment of the backward pass."""
        shape, used, lora = self.shape, self.used, self.spec.model.lora
        vocab = self.embedding // shape.width
        rows = min(self.tokens, max(1, LOGITS * (4 if self.cuda else 1) // vocab))
        head = rows * vocab * (4 + used if self.cuda else 8 + 2 * (used == 2))
        if lora is None or set(lora.modules_to_save) & {"lm_head", *(["embed_tokens"] if shape.tied else [])}:
            head += 8 * self.embedding
        matrix = used if self.cuda else 4  # what the head multiplies with
        head += matrix * self.embedding * (matrix != self.kept)
        hidden = shape.hidden if shape.moe is None else shape.moe.shared_width + shape.moe.active * shape.moe.mlp
        layer = self.tokens * used * (2 + self.cuda) * hidden + 4 * 2 * hidden * shape.width
        layer += self.tokens * self._layer() * bool(self.recomputed)  # those of one are there again
        return max(head, layer) + self.tokens * used * shape.width


def _others(spec: LanguageModelSpec, shape: Shape, sizes: _Sizes) -> dict[str, float]:
    """Models beside the one that is trained."""
    rows: dict[str, float] = {}
    posttrain = isinstance(spec, PosttrainSpec)
    if isinstance(spec, DpoSpec) or (posttrain and spec.algorithm.needs_reference):
        rows[REFERENCE] = sizes.base(sizes.used)
    if posttrain and spec.algorithm.critic is not None:
        rows[VALUE] = sizes.weights() + sizes.gradients() + 8 * sizes.trained
    if isinstance(spec, WritingSpec) and (spec.samples.prompts or spec.suites):
        rows["generator"] = sizes.total * 4
    if isinstance(spec, PosttrainSpec | DistillSpec) and spec.rollout.generator is None and not spec.cluster.generators:
        in_flight = spec.train.prompts_per_step * (spec.rollout.staleness + 1)
        count = min(in_flight, spec.rollout.running or in_flight) * spec.rollout.group
        tokens = min(count, 1024 if sizes.cuda else 512) * spec.rollout.max_new_tokens
        rows["generator"] = sizes.total * sizes.used
        rows[KV_CACHE] = 2 * shape.layers * shape.kv * shape.dim * sizes.used * tokens
    return rows
