"""What the kinds of language-model training share: model, adapters, optimizer and training."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from palestra.spec.base import Every, ExperimentSpec, listed
from palestra.spec.cluster import ClusterSpec
from palestra.spec.mixture import LmData
from palestra.spec.model import Cadence, Conflict, CountCadence, Execution, Model, without_defaults
from palestra.spec.parallel import ParallelSpec
from palestra.spec.schedule import Rate, constant, warmup_conflicts
from palestra.spec.shape import Shape, described
from palestra.spec.tasks import SuiteUse, suite_conflicts

Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class AdamWSpec(Model):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"]
    """Optimizer."""
    lr: Rate = constant(3e-4)
    """Learning rate. The default is for pretraining; kinds that fine-tune `model.init` have lower ones."""
    betas: Betas = Field(default=[0.9, 0.95])
    """β₁ and β₂."""
    eps: float = Field(default=1e-8, gt=0)
    """ε."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices and embeddings, not of norms and biases. Default as for `lr`."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm clipping; null: none."""
    state: Literal["fp32", "8bit"] = "fp32"
    """Precision of the moments: FP32, or 8 bits with a scale for each block of 256 (Dettmers et al. 2021)."""
    offload: Execution[bool] = False
    """Keep the moments in the host's memory; every step streams them through the device."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "state", "offload")


class MuonSpec(Model):
    """Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for embeddings, head, norms and biases."""

    name: Literal["muon"]
    """Optimizer."""
    lr: Rate = constant(0.02)
    """Learning rate of the matrices; an update has singular values around lr · √max(1, rows / columns)."""
    adam_lr: Rate = constant(3e-4)
    """Learning rate of AdamW, for everything else; kinds that fine-tune `model.init` have lower defaults."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum μ."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = Field(default=5, ge=1, le=20)
    """Newton–Schulz iterations of the orthogonalization."""
    betas: Betas = Field(default=[0.9, 0.95])
    """AdamW's β₁ and β₂."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's ε."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices and embeddings, not of norms and biases."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm clipping; null: none."""


OptimSpec = AdamWSpec | MuonSpec
"""The optimizers, discriminated by `name`: `Annotated[OptimSpec, Field(discriminator="name")]`."""


Matrix = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Target = Literal["all"] | Matrix


class LoraSpec(Model):
    """LoRA (Hu et al. 2021): W + scale · B · A with frozen W."""

    rank: int = Field(default=16, ge=1)
    """Rank r of an adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: an adapter's output is multiplied by alpha / rank, with `rslora` by alpha / √rank."""
    targets: Annotated[
        list[Target], Field(min_length=1), BeforeValidator(listed, json_schema_input_type=Target | list[Target])
    ] = Field(default=["all"])
    """Matrices that get an adapter in every layer, or `all`; routed experts and routers never do."""
    rslora: bool = False
    """Rank-stabilized scale alpha / √rank (rsLoRA, Kalajdzievski 2023)."""
    dora: bool = False
    """Learn the norm of every row of W + scale · B · A by itself (DoRA, Liu et al. 2024)."""
    modules_to_save: list[Literal["embed_tokens", "lm_head"]] = Field(default=[])
    """Matrices of the vocabulary that are trained whole beside the adapters, and saved with them."""
    quantize: Literal["nf4"] | None = None
    """Frozen matrices of the layers in 4 bits, routed experts excepted (QLoRA, Dettmers et al. 2023); null: as is."""
    double_quantize: bool = False
    """The scales of `quantize` in 8 bits: 0.13 bits a weight in place of 0.5."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        later = ("rslora", "dora", "modules_to_save", "quantize", "double_quantize")
        return without_defaults(self, handler(self), *later)

    def conflicts(self) -> Iterator[Conflict]:
        """Scales of nothing."""
        if self.double_quantize and self.quantize is None:
            yield Conflict(("double_quantize",), "expected false, because there is no `quantize`")

    @property
    def scale(self) -> float:
        """Factor of B · A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class BpeSpec(Model):
    """A byte-pair encoding trained on the run's own training texts."""

    bpe: int = Field(ge=300)
    """The size of its vocabulary."""


class ModelSpec(Model):
    """The language model: a trained one to start from, or the shape of a new one."""

    init: str | None = Field(default=None, min_length=1)
    """A run, a checkpoint, a Hugging Face folder, s3://… or a Hub id to start from; null makes a new model."""
    shape: Shape | None = None
    """Architecture of a new model."""
    tokenizer: str | BpeSpec | None = None
    """For a new model: `characters` or `{bpe: 4096}`, both trained on the texts, or the path of a tokenizer."""
    chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own; null keeps it."""
    lora: LoraSpec | None = None
    """Train LoRA adapters on frozen weights; null: full fine-tuning."""

    def conflicts(self) -> Iterator[Conflict]:
        """Neither or both of `init` and `shape`, or incomplete."""
        if self.init is None and self.shape is None:
            yield Conflict(("init",), "expected a model to start from, or `shape` for a new one")
        if self.init is not None and self.shape is not None:
            yield Conflict(("shape",), "expected null, because `init` brings its own shape")
        if self.init is not None and self.tokenizer is not None:
            yield Conflict(("tokenizer",), "expected null, because `init` brings its own tokenizer")
        if self.init is None and self.tokenizer is None:
            yield Conflict(("tokenizer",), "expected one for a new model, such as `characters` or {bpe: 4096}")
        if self.init is None and self.lora is not None:
            yield Conflict(("lora",), "expected null, because adapters need a trained model: give `init`")
        if self.shape is not None and self.shape.moe is not None and self.shape.mlp is not None:
            yield Conflict(("shape", "mlp"), "expected null, because `moe` replaces the MLP")


class ProfileSpec(Model):
    """Profile of some steps, for Perfetto."""

    steps: list[int] = Field(min_length=2, max_length=2)
    """First and last profiled step, for example [10, 12]."""


class ComputeSpec(Model):
    """Computation of training steps."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    micro_tokens: Execution[int] = Field(default=16384, ge=1)
    """Maximum tokens per micro-batch (a longer sequence goes alone); gradients accumulate over micro-batches."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute precision. Auto: bf16 on a GPU and on a CPU with AVX-512 BF16 or AMX, else fp32."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Precision of matrices and embeddings: FP32, or bf16 with updates that are rounded stochastically."""
    compile: Execution[Literal["auto", "on", "off"]] = "auto"
    """torch.compile the model; auto: on a GPU when the run is long enough to pay for it."""
    compile_cache: Execution[str | None] = Field(default=None, min_length=1)
    """Folder that keeps compiled code for later runs; null: the system's temporary folder."""
    checkpointing: Execution[Literal["none", "selective", "full"]] = "none"
    """Activation checkpointing: of no layer, every second one, or all."""
    profile: Execution[ProfileSpec | None] = None
    """Profile some steps into profile.json of the session; null: none."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "weights")

    def conflicts(self) -> Iterator[Conflict]:
        """A compile cache without compiling, a profile beyond the end."""
        if self.compile == "off" and self.compile_cache is not None:
            yield Conflict(("compile_cache",), "expected null, because `compile: off` compiles nothing")
        if self.profile is not None and not 1 <= self.profile.steps[0] <= self.profile.steps[1] <= self.steps:
            yield Conflict(("profile", "steps"), f"expected the first and the last step, within 1 to {self.steps}")


class LmTrainSpec(ComputeSpec):
    """Length of training, batch size and computation."""

    batch: int = Field(ge=1)
    """Batch size in examples: windows of `data.context` tokens, conversations, or pairs."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, which is evaluated and saved; null: off."""

    def conflicts(self) -> Iterator[Conflict]:
        """A moving average of weights that are too coarse for one."""
        yield from super().conflicts()
        if self.weights == "bf16" and self.ema is not None:
            yield Conflict(("ema",), "expected null, because an average in bf16 would not move: take `weights: fp32`")


class SampleSpec(Model):
    """Samples during training, in samples.jsonl and the log."""

    prompts: list[str] = Field(default=[])
    """Prompts to complete; empty: no samples."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum new tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    every: CountCadence | None = Cadence(500, "steps")
    """When to sample besides at the end; null: only at the end."""


class LmEvalSpec(Model):
    """Evaluation on held-out texts."""

    examples: int = Field(default=512, ge=1)
    """Maximum examples per evaluation set."""


class LmEvery(Every):
    """Cadences; a step is one optimizer step."""

    eval: CountCadence | None = Cadence(100, "steps")
    """When to evaluate besides at the end; null: only at the end."""
    log: Execution[CountCadence] = Cadence(10, "steps")
    """When to write a row of metrics."""


class Tuning(NamedTuple):
    """Optimizer defaults of a kind that fine-tunes a trained model."""

    lr: float
    """Learning rate of full fine-tuning."""
    lora_lr: float
    """Learning rate of LoRA."""
    weight_decay: float


class LanguageModelSpec(ExperimentSpec):
    """Shared fields of the kinds that train a language model."""

    counts: ClassVar[tuple[str, ...]] = ("steps", "tokens")
    tuning: ClassVar[Tuning | None] = None
    """Optimizer defaults where `model.init` is given; None: the optimizer's own, which are for pretraining."""

    model: ModelSpec
    """Model."""
    train: ComputeSpec
    """Length of training and computation."""
    optim: Annotated[OptimSpec, Field(discriminator="name")] = AdamWSpec(name="adamw")
    """Optimizer."""
    devices: Execution[int | None] = Field(default=None, ge=1)
    """Processes that train together, one GPU each; null: what `parallel` asks for, or those that `torchrun` started."""
    parallel: Execution[ParallelSpec] = ParallelSpec()
    """How these processes share the model. By default each has its own examples and a part of every parameter."""
    cluster: Execution[ClusterSpec] = ClusterSpec()
    """Where the run's processes are: on this machine or a Ray cluster, and how many generate and verify."""

    @property
    def processes(self) -> int:
        """Processes that train together."""
        return self.devices or self.cluster.trainers or self.parallel.processes

    @property
    def examples(self) -> int:
        """Sequences of a step, which processes divide between them."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _with_tuning(cls, data: Any) -> Any:
        """Fill in `tuning`, so that a resolved spec shows it."""
        if cls.tuning is None or not isinstance(data, Mapping):
            return data
        model, optim = data.get("model"), data.get("optim", {"name": "adamw"})
        if not isinstance(model, Mapping) or model.get("init") is None or not isinstance(optim, Mapping):
            return data
        lr = cls.tuning.lr if model.get("lora") is None else cls.tuning.lora_lr
        rate = {"adam_lr" if optim.get("name") == "muon" else "lr": lr}
        return {**data, "optim": {**rate, "weight_decay": cls.tuning.weight_decay, **optim}}

    def default_origin(self, path: tuple[str | int, ...]) -> str:
        """Which default a value is that was not given."""
        tuned = self.tuning is not None and self.model.init is not None
        if not tuned or path not in (("optim", "lr"), ("optim", "adam_lr"), ("optim", "weight_decay")):
            return super().default_origin(path)
        return f"default for {self.kind}" + (" with LoRA" if self.model.lora is not None and path[1] == "lr" else "")

    def conflicts(self) -> Iterator[Conflict]:
        """Conflicting training settings; processes that do not fit the model, the batch or the seeds."""
        if self.model.lora is not None and self.optim.name == "muon":
            yield Conflict(("optim", "name"), "expected adamw, because adapters are trained with AdamW")
        elif self.tuning and self.model.init and self.optim.name == "muon" and "lr" not in self.optim.model_fields_set:
            yield Conflict(("optim", "lr"), "expected a value: Muon has no default for fine-tuning")
        if self.train.weights == "bf16" and self.optim.name == "muon":
            yield Conflict(("train", "weights"), "expected fp32, because Muon's updates are not rounded stochastically")
        if self.processes > 1:
            yield from self.alone()
        if self.processes > 1 and self.max_session > 1:
            yield Conflict(("devices",), "expected 1, because `max_session` trains several seeds")
        if self.devices is not None and self.cluster.trainers not in (None, self.devices):
            yield Conflict(("cluster", "trainers"), f"expected `devices` = {self.devices}, or null")
        if self.cluster.apart and "rollout" not in type(self).model_fields:
            role = "generators" if self.cluster.generators else "verifiers"
            yield Conflict(("cluster", role), f"expected 0, because {self.kind} has no rollouts")
        elif self.cluster.generators and self.model_dump()["rollout"]["generator"] is not None:
            yield Conflict(("cluster", "generators"), "expected 0, because `rollout.generator` generates")
        shape, parallel = self.model.shape, self.parallel
        if not parallel.divides(self.processes):
            asked = " · ".join(f"{axis} {size}" for axis, size in parallel.sizes().items() if size > 1)
            yield Conflict(("devices",), f"expected the product of `parallel`: {asked}, got {self.devices}")
        sizes = parallel.sizes(self.processes)
        if self.examples < (apart := sizes["data"] * sizes["shard"] * sizes["expert"]):
            reason = f"expected data · shard · expert of at most {self.examples}, the examples of a step, got {apart}"
            yield Conflict(("parallel",), reason)
        if shape is not None:
            problems = parallel.problems(shape, lora=self.model.lora is not None)
            yield from (Conflict(("parallel", *path), reason) for path, reason in problems)

    def alone(self) -> Iterator[Conflict]:
        """What several processes cannot do."""
        why = "because several processes train: it is for one"
        if self.model.lora is not None and self.model.lora.dora:
            yield Conflict(("model", "lora", "dora"), f"expected false, {why}")
        if self.model.lora is not None and self.model.lora.quantize is not None:
            yield Conflict(("model", "lora", "quantize"), f"expected null, {why}")
        if self.train.weights == "bf16":
            yield Conflict(("train", "weights"), f"expected fp32, {why}")
        if isinstance(self.optim, AdamWSpec) and self.optim.state != "fp32":
            yield Conflict(("optim", "state"), f"expected fp32, {why}")
        if isinstance(self.optim, AdamWSpec) and self.optim.offload:
            yield Conflict(("optim", "offload"), f"expected false, {why}")

    def derived(self) -> dict[str, int | float | str]:
        """Compute precision."""
        return {"precision": described(self.train.precision, self.device)}


class LmSpec(LanguageModelSpec):
    """Shared fields of the kinds that train on examples."""

    data: LmData
    """Training and evaluation data."""
    train: LmTrainSpec
    """Length of training and computation."""
    eval: LmEvalSpec = LmEvalSpec()
    """Evaluation."""
    every: LmEvery = LmEvery()
    """How often to checkpoint, evaluate and log."""

    @property
    def examples(self) -> int:
        return self.train.batch

    def conflicts(self) -> Iterator[Conflict]:
        """Examples longer than the model's context, a warm-up beyond the end."""
        yield from super().conflicts()
        shape = self.model.shape
        if shape is not None and self.data.context > shape.context:
            yield Conflict(("data", "context"), f"expected at most model.shape.context = {shape.context} tokens")
        yield from warmup_conflicts(self.optim, self.train.steps, "optim")

    def derived(self) -> dict[str, int | float | str]:
        """Parameter counts, where shape and vocabulary are known."""
        shape = self.model.shape
        if shape is None or shape.vocab is None:
            return super().derived()
        derived = super().derived() | {"parameters": shape.parameters()}
        if shape.moe is not None:
            derived["active parameters"] = shape.parameters(active=True)
        return derived


class WritingSpec(LmSpec):
    """Shared fields of the kinds that train a generative model."""

    samples: SampleSpec = SampleSpec()
    """Samples during training."""
    suites: list[SuiteUse] = Field(default=[])
    """Evaluation suites run during and after training, besides `data.eval`."""

    def conflicts(self) -> Iterator[Conflict]:
        """Unknown suites or suites that never run."""
        yield from super().conflicts()
        yield from suite_conflicts(self.suites, self.counts)
