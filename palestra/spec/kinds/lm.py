"""The specs of the kinds `pretrain`, `sft`, `dpo` and `reward_model`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from palestra.spec.base import Conflict
from palestra.spec.lm import LmData, LmSpec, Source, TextSource, TrainSource, Tuning, WritingSpec
from palestra.spec.model import Model


class Stage(Model):
    """Other weights of the sources from some step on."""

    step: int = Field(ge=0)
    """The step from which they hold."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """The share of each source, by name."""


class TrainTextSource(TextSource, TrainSource):
    """Plain texts to train on."""


class PretrainData(LmData):
    """Texts to train and evaluate on."""

    train: dict[str, TrainTextSource] = Field(min_length=1)
    """What to train on, by name; a weight of 0 only evaluates on it."""
    eval: dict[str, TextSource] = Field(default={})
    """What to evaluate on, by name."""
    documents: bool = True
    """Keep the documents inside an example apart: no attention from one to another."""
    stages: list[Stage] = Field(default=[])
    """Weights that change during the run; until the first of them those of the sources hold."""

    @property
    def trained(self) -> list[str]:
        """The names of the sources that are trained on at some time."""
        staged = {name for stage in self.stages for name, weight in stage.weights.items() if weight > 0}
        return [name for name, weight in self.weights.items() if weight > 0 or name in staged]


class PretrainSpec(WritingSpec):
    """Pretraining: predict every next token of plain text."""

    kind: Literal["pretrain"]
    """The kind of experiment."""
    data: PretrainData
    """The texts."""

    def conflicts(self) -> list[Conflict]:
        """Stages that name no source or give none a weight, that are not in order, or that never begin."""
        found = super().conflicts()
        before = -1
        for index, stage in enumerate(self.data.stages):
            place = ("data", "stages", index)
            unknown = sorted(set(stage.weights) - set(self.data.train))
            if unknown:
                known = ", ".join(self.data.train)
                found.append(Conflict((*place, "weights"), f"expected names of data.train ({known}): {unknown}"))
            if not any(stage.weights.values()):
                found.append(Conflict((*place, "weights"), "expected at least one weight above 0"))
            if stage.step <= before:
                found.append(Conflict((*place, "step"), f"expected more than {before}, where the stage before begins"))
            if stage.step >= self.train.steps:
                found.append(Conflict((*place, "step"), f"expected less than train.steps = {self.train.steps}"))
            before = stage.step
        return found

    def derived(self) -> dict[str, int | float | str]:
        """Tokens a step and in all, and the floating-point operations of the run where the vocabulary is given."""
        tokens = self.train.batch * self.data.context
        found = super().derived() | {"tokens per step": tokens, "tokens": tokens * self.train.steps}
        shape = self.model.shape
        if shape is not None and shape.vocab is not None:
            found["training FLOPs"] = 3 * shape.flops_per_token(self.data.context) * tokens * self.train.steps
        return found


class ChatSource(Source):
    """Conversations: rows with `messages`, `conversations` (ShareGPT), or a question and its answer.

    The latter are `prompt` and `completion`, `instruction` (with `input`) and `output`, or `question` and `answer`.
    """


class TrainChatSource(ChatSource, TrainSource):
    """Conversations or pairs to train on."""


class ChatData(LmData):
    """Conversations or pairs to train and evaluate on."""

    train: dict[str, TrainChatSource] = Field(min_length=1)
    """What to train on, by name; a weight of 0 only evaluates on it."""
    eval: dict[str, ChatSource] = Field(default={})
    """What to evaluate on, by name."""
    format: Literal["chat", "plain"] = "chat"
    """Written with the tokenizer's chat template, or as a prompt, its answer and the end-of-text token."""
    over_long: Literal["truncate", "drop", "error"] = "truncate"
    """What becomes of a longer one: cut at the end, left out, or an error."""


class SftSpec(WritingSpec):
    """Supervised fine-tuning: predict the assistant's turns of conversations, and where they end."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=2e-5, lora_lr=2e-4, weight_decay=0.0)  # as TRL

    kind: Literal["sft"]
    """The kind of experiment."""
    data: ChatData
    """The conversations."""


class DpoLossSpec(Model):
    """Direct preference optimization (Rafailov et al. 2023)."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to where it started (β)."""
    type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """The loss of the margin between the chosen and the rejected answer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """How often a label is taken to be wrong (conservative DPO); only for sigmoid."""
    average_logprobs: bool | None = None
    """Average log-probabilities over each completion's tokens in place of their sum; null does for ipo, as TRL."""

    @property
    def averages(self) -> bool:
        """Whether log-probabilities are averaged."""
        return self.type == "ipo" if self.average_logprobs is None else self.average_logprobs


class DpoSpec(WritingSpec):
    """Preference optimization: make the chosen answer more likely than the rejected one."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-6, lora_lr=1e-5, weight_decay=0.0)  # as TRL

    kind: Literal["dpo"]
    """The kind of experiment."""
    data: ChatData
    """Pairs: rows with `prompt` or `messages`, `chosen` and `rejected`; or only the two, as whole conversations."""
    loss: DpoLossSpec = DpoLossSpec()
    """The loss."""

    def conflicts(self) -> list[Conflict]:
        """A new model has no preferences to be held to."""
        found = super().conflicts()
        if self.model.init is None:
            found.append(Conflict(("model", "init"), "expected a trained model: the reference is where it starts"))
        if self.loss.label_smoothing and self.loss.type != "sigmoid":
            found.append(Conflict(("loss", "label_smoothing"), "expected 0, because only `type: sigmoid` uses it"))
        return found


class RewardLossSpec(Model):
    """The Bradley–Terry loss of pairs."""

    margin: float = Field(default=0.0, ge=0)
    """How much higher the chosen answer's score has to be."""
    center: float = Field(default=0.0, ge=0)
    """The weight of a term that holds the scores around 0 (Eisenstein et al. 2023)."""


class RewardModelSpec(LmSpec):
    """Reward modeling: a score for each conversation, higher for the chosen answer than for the rejected one."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-5, lora_lr=1e-4, weight_decay=0.0)  # as OpenRLHF

    kind: Literal["reward_model"]
    """The kind of experiment."""
    data: ChatData
    """Pairs: rows with `prompt` or `messages`, `chosen` and `rejected`; or only the two, as whole conversations."""
    loss: RewardLossSpec = RewardLossSpec()
    """The loss."""

    def conflicts(self) -> list[Conflict]:
        """Adapters have no place for the scalar head; scores are of conversations."""
        found = super().conflicts()
        if self.model.lora is not None:
            found.append(Conflict(("model", "lora"), "expected null: a reward model's head and weights train together"))
        if self.data.format == "plain":
            reason = "expected chat, because a reward model scores conversations, written with the chat template"
            found.append(Conflict(("data", "format"), reason))
        return found
