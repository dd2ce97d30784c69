"""What the kinds of language-model training share: the model, its tokenizer, texts and how to train."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from palestra.spec.base import Conflict, Every, ExperimentSpec
from palestra.spec.cadence import Cadence, CountCadence
from palestra.spec.composites import CompositeSpec
from palestra.spec.execution import Execution
from palestra.spec.lora import LoraSpec
from palestra.spec.model import Model
from palestra.spec.optim import AdamWSpec, OptimSpec
from palestra.spec.precision import described
from palestra.spec.schedule import warmup_problems
from palestra.spec.shape import Shape
from palestra.spec.suites import SuiteUse, suite_conflicts


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
