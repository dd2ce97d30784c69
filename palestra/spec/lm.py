"""What the kinds of language-model training share: model, adapters, optimizer, data mixtures and training."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from palestra.spec.base import Conflict, Every, ExperimentSpec
from palestra.spec.model import Cadence, CountCadence, Execution, Model
from palestra.spec.schedule import Bounds, Schedule, ScheduleSpec, warmup_problems
from palestra.spec.shape import Shape, described
from palestra.spec.tasks import SuiteUse, suite_conflicts

Rate = Annotated[ScheduleSpec, Bounds(at_least=0)]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class AdamWSpec(Model):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"]
    """The optimizer."""
    lr: Rate = Schedule(shape="constant", start=3e-4)
    """The learning rate. This default is of pretraining; kinds that fine-tune `model.init` have lower ones."""
    betas: Betas = Field(default=[0.9, 0.95])
    """The decay of the means of gradients and of their squares (β₁, β₂)."""
    eps: float = Field(default=1e-8, gt=0)
    """ε, added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices and embeddings, times the learning rate; norms and biases never decay. Default as of `lr`."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The norm of all gradients together to which they are clipped; null does not clip."""


class MuonSpec(Model):
    """Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for embeddings, head, norms and biases."""

    name: Literal["muon"]
    """The optimizer."""
    lr: Rate = Schedule(shape="constant", start=0.02)
    """The learning rate of the matrices; an update has singular values around lr · √max(1, rows / columns)."""
    adam_lr: Rate = Schedule(shape="constant", start=3e-4)
    """The learning rate of AdamW, for everything else; kinds that fine-tune `model.init` have lower defaults."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """The decay of the mean of gradients that is orthogonalised (μ)."""
    nesterov: bool = True
    """Look one gradient ahead of that mean."""
    ns_steps: int = Field(default=5, ge=1, le=20)
    """Newton–Schulz iterations of the orthogonalisation."""
    betas: Betas = Field(default=[0.9, 0.95])
    """AdamW's decay of the means of gradients and of their squares (β₁, β₂)."""
    eps: float = Field(default=1e-8, gt=0)
    """ε of AdamW, added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices and embeddings, times their learning rate; norms and biases never decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The norm of all gradients together to which they are clipped; null does not clip."""


OptimSpec = AdamWSpec | MuonSpec
"""The optimizers, told apart by `name`: `Annotated[OptimSpec, Field(discriminator="name")]`."""


Matrix = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Target = Literal["all"] | Matrix


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class LoraSpec(Model):
    """Low-rank adapters beside frozen weights (Hu et al. 2021): W + alpha / rank · B · A."""

    rank: int = Field(default=16, ge=1)
    """The rank of an adapter (r)."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's output is multiplied with alpha / rank."""
    targets: Annotated[
        list[Target],
        Field(min_length=1),
        BeforeValidator(_listed, json_schema_input_type=Target | list[Target]),
    ] = Field(default=["all"])
    """The matrices that get an adapter in every layer, or `all` of them; routed experts and routers never do."""


Share = Annotated[float, Field(ge=0)]

# The weights of parts are terabytes of text.
COMPOSITES: dict[str, dict[str, tuple[float, dict[str, float]]]] = {
    # Two large crawls of the web with a small share of educational pages: Nemotron-CC (Su et al. 2024, arXiv
    # 2412.02595), DCLM (Li et al. 2024, arXiv 2406.11794) and FineWeb-Edu (Penedo et al. 2024, arXiv 2406.17557).
    "nemotron_dclm_fineweb_10b": {
        "nemotron_cc": (
            0.4,
            {
                "nemotron_hq_actual": 0.91351,
                "nemotron_hq_synth": 2.72,
                "nemotron_medium_high": 0.82471,
                "nemotron_medium": 3.38,
                "nemotron_medium_low": 1.54,
                "nemotron_low_actual": 0.70123,
                "nemotron_low_synth": 0.62771,
            },
        ),
        "dclm": (0.5, {"dclm_baseline": 3.8, "starcoder": 0.25, "proofpile_2": 0.055}),
        "fineweb_edu": (0.1, {"fineweb_edu_10b": 1.0}),
    },
}
"""By name: the groups, each with its share of all examples and the relative weights of its parts."""


class GroupSpec(Model):
    """Sources that have a share together."""

    share: Share | None = None
    """Its share of all examples, relative to the other groups; null keeps that of `base`."""
    parts: dict[str, Share] = Field(default={})
    """The weight of each part, relative to the others of the group; those of `base` that are not named stay."""


class CompositeSpec(Model):
    """A mixture of groups of sources: one that ships, changed or not, or one of your own."""

    base: str | None = None
    """A composite to begin with: `nemotron_dclm_fineweb_10b`; null begins with nothing."""
    groups: dict[str, GroupSpec] = Field(default={})
    """Groups that are added to those of `base`, or that change them; a share of 0 leaves one out."""

    def weights(self) -> dict[str, float]:
        """The weight of each part; all together are 1."""
        groups = self._groups()
        total = sum(share or 0.0 for share, _ in groups.values())
        found: dict[str, float] = {}
        for share, parts in groups.values():
            inside = sum(parts.values())
            for name, weight in parts.items():
                found[name] = (share or 0.0) / total * weight / inside if weight else 0.0
        return found

    def problems(self) -> list[Conflict]:
        """A base that is not there, groups without a share or without parts, parts of two groups."""
        if self.base is not None and self.base not in COMPOSITES:
            return [Conflict(("base",), f"expected one of {', '.join(COMPOSITES)}, or null")]
        groups = self._groups()
        found = []
        owners: dict[str, str] = {}
        for name, (share, parts) in groups.items():
            if share is None:
                found.append(Conflict(("groups", name, "share"), "expected a number, because `base` has no such group"))
            if share != 0 and not any(parts.values()):
                found.append(Conflict(("groups", name, "parts"), "expected at least one weight above 0"))
            for part in parts:
                if owners.setdefault(part, name) != name:
                    reason = f"expected a name that the group {owners[part]!r} does not have"
                    found.append(Conflict(("groups", name, "parts", part), reason))
        if not found and not any(share for share, _ in groups.values()):
            found.append(Conflict(("groups",), "expected at least one share above 0"))
        return found

    def _groups(self) -> dict[str, tuple[float | None, dict[str, float]]]:
        base = COMPOSITES[self.base] if self.base is not None else {}
        groups: dict[str, tuple[float | None, dict[str, float]]] = {**base}
        for name, change in self.groups.items():
            share, parts = groups.get(name, (None, {}))
            groups[name] = (share if change.share is None else change.share, {**parts, **change.parts})
        return groups


class BpeSpec(Model):
    """A byte-pair encoding trained on the run's own training texts."""

    bpe: int = Field(ge=300)
    """The size of its vocabulary."""


class ModelSpec(Model):
    """The language model: a trained one to start from, or the shape of a new one."""

    init: str | None = Field(default=None, min_length=1)
    """A run, a checkpoint, a Hugging Face folder, s3://… or a Hub id to start from; null makes a new model."""
    shape: Shape | None = None
    """The shape of a new model."""
    tokenizer: str | BpeSpec | None = None
    """For a new model: `characters`, `{bpe: 4096}`, or where a tokenizer lies; both first are made of the texts."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own; null keeps it."""
    lora: LoraSpec | None = None
    """Train low-rank adapters beside frozen weights; null trains the weights."""

    def problems(self) -> list[Conflict]:
        """Whether it is either a trained model or a new one, and whole."""
        found = []
        if self.init is None and self.shape is None:
            found.append(Conflict(("init",), "expected a model to start from, or `shape` for a new one"))
        if self.init is not None and self.shape is not None:
            found.append(Conflict(("shape",), "expected null, because `init` brings its own shape"))
        if self.init is not None and self.tokenizer is not None:
            found.append(Conflict(("tokenizer",), "expected null, because `init` brings its own tokenizer"))
        if self.init is None and self.tokenizer is None:
            found.append(Conflict(("tokenizer",), "expected one for a new model, such as `characters` or {bpe: 4096}"))
        if self.init is None and self.lora is not None:
            found.append(Conflict(("lora",), "expected null, because adapters need a trained model: give `init`"))
        shape = self.shape.problems() if self.shape is not None else []
        if self.shape is not None and self.shape.moe is not None and self.shape.mlp is not None:
            shape.append(Conflict(("mlp",), "expected null, because `moe` replaces the MLP"))
        return found + [Conflict(("shape", *path), reason) for path, reason in shape]


class Source(Model):
    """Texts, conversations or pairs on disk or elsewhere."""

    path: str = Field(min_length=1)
    """A file, a folder, a pattern such as data/*.jsonl, s3://… or a Hub dataset: text, JSONL, JSON, Parquet, Arrow."""


class TrainSource(Source):
    """The same with a share of the training examples."""

    weight: float = Field(default=1.0, ge=0)
    """Its share of the training examples, relative to the others; 0 only evaluates on it. Times that of a composite."""


class TextSource(Source):
    """Plain texts."""

    key: str = Field(default="text", min_length=1)
    """The column that holds the text."""
    split: str | None = Field(default=None, min_length=1)
    """What separates the documents of a text file, such as a line break; null makes the whole file one."""


class MixSpec(Model):
    """The blocks of a mixture, their order and its end."""

    block: int = Field(default=2048, ge=1, lt=2**16)
    """Examples in a block; every block holds the exact shares of the sources."""
    shuffle: bool = True
    """Draw each source's examples in a random order, a new one each epoch."""
    stop: Literal["restart", "first_exhausted", "all_exhausted"] = "restart"
    """When a source is used up: begin it again, or end the data with the first or with the last of them."""


class LmData(Model):
    """What the data of every kind have."""

    train: Mapping[str, TrainSource]
    """What to train on, by name; a weight of 0 only evaluates on it."""
    eval: Mapping[str, Source]
    """What to evaluate on, by name."""
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """The share of each training source that is kept for evaluation instead: random documents, the same in all runs."""
    context: int = Field(ge=2)
    """Tokens in one example: of plain text, exactly; of a conversation, at most."""
    mix: MixSpec = MixSpec()
    """How the sources are mixed."""
    composite: CompositeSpec | None = None
    """A mixture with a name, which gives the sources of `train` their weights; null leaves them as they are."""

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each training source."""
        given = {} if self.composite is None else self.composite.weights()
        return {name: source.weight * given.get(name, self.composite is None) for name, source in self.train.items()}

    @property
    def trained(self) -> list[str]:
        """The names of the sources that are trained on at some time."""
        return [name for name, weight in self.weights.items() if weight > 0]

    @property
    def sources(self) -> list[tuple[Literal["train", "eval"], str, Source]]:
        """All sources: what they are for, their names, and they themselves."""
        return [("train", *named) for named in self.train.items()] + [("eval", *named) for named in self.eval.items()]

    def problems(self) -> list[Conflict]:
        """Nothing to train on, a name for two things, sources that a composite lacks or the other way round."""
        if self.composite is not None and (wrong := self.composite.problems()):
            return [Conflict(("composite", *path), reason) for path, reason in wrong]
        found = [] if self.trained else [Conflict(("train",), "expected at least one weight above 0")]
        found += self._uncomposed()
        twice = [Conflict(("eval", name), "expected a name that data.train does not have") for name in self.eval]
        return found + [conflict for conflict in twice if conflict.path[1] in self.train]

    def _uncomposed(self) -> list[Conflict]:
        parts = {} if self.composite is None else self.composite.weights()
        missing = [name for name, weight in parts.items() if weight > 0 and name not in self.train]
        reason = (
            f"expected sources for {', '.join(missing)}, which data.composite has; or give these a weight of 0 there"
        )
        found = [Conflict(("train",), reason)] if missing else []
        for name, source in self.train.items():
            if self.composite is not None and name not in parts and source.weight > 0:
                known = f"expected the name of a part of data.composite ({', '.join(parts)}), or a weight of 0"
                found.append(Conflict(("train", name), known))
        return found


class ProfileSpec(Model):
    """A profile of a few steps, for Perfetto."""

    steps: list[int] = Field(min_length=2, max_length=2)
    """The first and the last step that are profiled, for example [10, 12]."""


class ComputeSpec(Model):
    """How steps are computed."""

    steps: int = Field(ge=1)
    """Optimizer steps."""
    micro_tokens: Execution[int] = Field(default=16384, ge=1)
    """Tokens in one forward pass at most (one longer sequence goes alone); a step takes as many passes as it needs."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Of the arithmetic; weights stay FP32. Auto is bf16 on a GPU and on a CPU with AVX-512, FP32 on others."""
    compile: Execution[Literal["auto", "on", "off"]] = "auto"
    """Compile the model; auto does on a GPU when the run is long enough to pay for it."""
    compile_cache: Execution[str | None] = Field(default=None, min_length=1)
    """A folder where compiled code stays for later runs; null keeps it in the system's temporary folder."""
    checkpointing: Execution[Literal["none", "selective", "full"]] = "none"
    """Compute activations again in the backward pass instead of keeping them: of no, every second, or all layers."""
    profile: Execution[ProfileSpec | None] = None
    """Profile some steps into profile.json of the session; null profiles none."""

    def problems(self) -> list[Conflict]:
        """A cache for code that is not compiled, a profile beyond the end."""
        found = []
        if self.compile == "off" and self.compile_cache is not None:
            found.append(Conflict(("compile_cache",), "expected null, because `compile: off` compiles nothing"))
        if self.profile is not None and not 1 <= self.profile.steps[0] <= self.profile.steps[1] <= self.steps:
            reason = f"expected the first and the last step, within 1 to {self.steps}"
            found.append(Conflict(("profile", "steps"), reason))
        return found


class LmTrainSpec(ComputeSpec):
    """The steps of a run and how each is computed."""

    batch: int = Field(ge=1)
    """Examples in one step: windows of `data.context` tokens, conversations, or pairs."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """Evaluate and save an exponential moving average of the weights with this decay; null the weights themselves."""


class SampleSpec(Model):
    """Texts that the model writes during training, in samples.jsonl and the log."""

    prompts: list[str] = Field(default=[])
    """What it continues (or answers, where it is trained on conversations); none writes no samples."""
    max_new_tokens: int = Field(default=64, ge=1)
    """The most it writes."""
    temperature: float = Field(default=1.0, ge=0)
    """The temperature it is drawn with."""
    every: CountCadence | None = Cadence(500, "steps")
    """When it writes besides at the end; null only at the end."""


class LmEvalSpec(Model):
    """Evaluation on texts that are not trained on."""

    examples: int = Field(default=512, ge=1)
    """Examples of each evaluation set at most."""


class LmEvery(Every):
    """How often things happen; a step is one optimizer step."""

    eval: CountCadence | None = Cadence(100, "steps")
    """When to evaluate besides at the end; null evaluates only at the end."""
    log: Execution[CountCadence] = Cadence(10, "steps")
    """When to write a row of metrics."""


class Tuning(NamedTuple):
    """Optimizer defaults of a kind that fine-tunes a trained model; a new model has those of the optimizer itself."""

    lr: float
    """Learning rate of all weights."""
    lora_lr: float
    """Learning rate of adapters."""
    weight_decay: float


class LanguageModelSpec(ExperimentSpec):
    """What every kind that trains a language model has."""

    counts: ClassVar[tuple[str, ...]] = ("steps", "tokens")
    tuning: ClassVar[Tuning | None] = None
    """Optimizer defaults where `model.init` is given; None takes the optimizer's own, which are for pretraining."""

    model: ModelSpec
    """The model."""
    train: ComputeSpec
    """How long and how to train."""
    optim: Annotated[OptimSpec, Field(discriminator="name")] = AdamWSpec(name="adamw")
    """The optimizer."""

    @model_validator(mode="before")
    @classmethod
    def _with_tuning(cls, data: Any) -> Any:
        """Fill in what `tuning` says, so that a resolved spec shows it."""
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

    def conflicts(self) -> list[Conflict]:
        """A model that is neither new nor trained, settings of training that do not fit."""
        found = [Conflict(("model", *path), reason) for path, reason in self.model.problems()]
        if self.model.lora is not None and self.optim.name == "muon":
            found.append(Conflict(("optim", "name"), "expected adamw, because adapters are trained with AdamW"))
        elif self.tuning and self.model.init and self.optim.name == "muon" and "lr" not in self.optim.model_fields_set:
            found.append(Conflict(("optim", "lr"), "expected a value: Muon has no default for fine-tuning"))
        return found + [Conflict(("train", *path), reason) for path, reason in self.train.problems()]

    def derived(self) -> dict[str, int | float | str]:
        """The precision of the arithmetic."""
        return {"precision": described(self.train.precision, self.device)}


class LmSpec(LanguageModelSpec):
    """What every kind that trains on examples has."""

    data: LmData
    """What to train on."""
    train: LmTrainSpec
    """How long and how to train."""
    eval: LmEvalSpec = LmEvalSpec()
    """How to evaluate."""
    every: LmEvery = LmEvery()
    """How often to checkpoint, evaluate and log."""
    devices: Execution[int | None] = Field(default=None, ge=1)
    """Processes that train one model together, a GPU each; null takes those that `torchrun` started, else one."""

    def conflicts(self) -> list[Conflict]:
        """Seeds and processes at once, examples longer than the model's context, a warm-up beyond the end."""
        found = super().conflicts()
        if (self.devices or 1) > 1 and self.max_session > 1:
            found.append(Conflict(("devices",), "expected 1, because `max_session` trains several seeds"))
        found += [Conflict(("data", *path), reason) for path, reason in self.data.problems()]
        shape = self.model.shape
        if shape is not None and self.data.context > shape.context:
            reason = f"expected at most model.shape.context = {shape.context} tokens"
            found.append(Conflict(("data", "context"), reason))
        return found + [Conflict(("optim", *p), why) for p, why in warmup_problems(self.optim, self.train.steps)]

    def derived(self) -> dict[str, int | float | str]:
        """Parameters, where the shape and the vocabulary are given."""
        shape = self.model.shape
        if shape is None or shape.vocab is None:
            return super().derived()
        found = super().derived() | {"parameters": shape.parameters()}
        if shape.moe is not None:
            found["active parameters"] = shape.parameters(active=True)
        return found


class WritingSpec(LmSpec):
    """The training of a model that writes."""

    samples: SampleSpec = SampleSpec()
    """What it writes during training."""
    suites: list[SuiteUse] = Field(default=[])
    """What it is measured with during training and after it, besides `data.eval`."""

    def conflicts(self) -> list[Conflict]:
        """Suites that are not there or never run."""
        return super().conflicts() + suite_conflicts(self.suites, self.counts)
