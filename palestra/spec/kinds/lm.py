"""The specs of the kinds `pretrain`, `sft`, `dpo` and `reward_model`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from palestra.spec.lm import LmSpec, Tuning, WritingSpec
from palestra.spec.mixture import LmData, Source, TextSource, TrainSource
from palestra.spec.model import Conflict, Model


class Stage(Model):
    """Mixture weights from a step on."""

    step: int = Field(ge=0)
    """First step with these weights."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weight of each source, by name."""


class TrainTextSource(TextSource, TrainSource):
    """Plain texts to train on."""


class PretrainData(LmData):
    """Texts to train and evaluate on."""

    train: dict[str, TrainTextSource] = Field(min_length=1)
    """Training sources by name; weight 0: evaluation only."""
    eval: dict[str, TextSource] = Field(default={})
    """Evaluation sources by name."""
    documents: bool = True
    """Mask attention across the documents packed into one example."""
    stages: list[Stage] = Field(default=[])
    """Mixture weights that change during the run; before the first stage the sources' own apply."""

    @property
    def trained(self) -> list[str]:
        """Names of the sources that are trained on in some stage."""
        staged = {name for stage in self.stages for name, weight in stage.weights.items() if weight > 0}
        return [name for name, weight in self.weights.items() if weight > 0 or name in staged]


class PretrainSpec(WritingSpec):
    """Pretraining: next-token prediction on plain text."""

    kind: Literal["pretrain"]
    """Kind of experiment."""
    data: PretrainData
    """Texts."""

    def conflicts(self) -> Iterator[Conflict]:
        """Stages with unknown sources or no weight, out of order, or beyond the end."""
        yield from super().conflicts()
        before = -1
        for index, stage in enumerate(self.data.stages):
            place = ("data", "stages", index)
            unknown = sorted(set(stage.weights) - set(self.data.train))
            if unknown:
                known = ", ".join(self.data.train)
                yield Conflict((*place, "weights"), f"expected names of data.train ({known}): {unknown}")
            if not any(stage.weights.values()):
                yield Conflict((*place, "weights"), "expected at least one weight above 0")
            if stage.step <= before:
                yield Conflict((*place, "step"), f"expected more than {before}, where the stage before begins")
            if stage.step >= self.train.steps:
                yield Conflict((*place, "step"), f"expected less than train.steps = {self.train.steps}")
            before = stage.step

    def derived(self) -> dict[str, int | float | str]:
        """Tokens per step and in total, and training FLOPs where the vocabulary is known."""
        tokens = self.train.batch * self.data.context
        derived = super().derived() | {"tokens per step": tokens, "tokens": tokens * self.train.steps}
        shape = self.model.shape
        if shape is not None and shape.vocab is not None:
            derived["training FLOPs"] = 3 * shape.flops_per_token(self.data.context) * tokens * self.train.steps
        return derived


class ChatSource(Source):
    """Conversations: rows with `messages`, `conversations` (ShareGPT), or a question and its answer.

    The latter are `prompt` and `completion`, `instruction` (with `input`) and `output`, or `question` and `answer`.
    """


class TrainChatSource(ChatSource, TrainSource):
    """Conversations or pairs to train on."""


class ChatData(LmData):
    """Conversations or pairs to train and evaluate on."""

    train: dict[str, TrainChatSource] = Field(min_length=1)
    """Training sources by name; weight 0: evaluation only."""
    eval: dict[str, ChatSource] = Field(default={})
    """Evaluation sources by name."""
    format: Literal["chat", "plain"] = "chat"
    """Rendered with the tokenizer's chat template, or as prompt, completion and end-of-text token."""
    over_long: Literal["truncate", "drop", "error"] = "truncate"
    """Examples longer than `context`: truncate, drop, or fail."""


class SftSpec(WritingSpec):
    """Supervised fine-tuning: predict the assistant turns of conversations."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=2e-5, lora_lr=2e-4, weight_decay=0.0)  # as TRL

    kind: Literal["sft"]
    """Kind of experiment."""
    data: ChatData
    """Conversations."""


class DpoLossSpec(Model):
    """Direct preference optimization (Rafailov et al. 2023)."""

    beta: float = Field(default=0.1, gt=0)
    """Strength of the KL constraint to the reference model (β)."""
    type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss on the margin between the chosen and the rejected completion."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed label noise (conservative DPO); only for sigmoid."""
    average_logprobs: bool | None = None
    """Average log-probabilities over the completion's tokens in place of summing; null: for ipo only, as TRL."""

    @property
    def averages(self) -> bool:
        """Whether log-probabilities are averaged."""
        return self.type == "ipo" if self.average_logprobs is None else self.average_logprobs


class DpoSpec(WritingSpec):
    """Direct preference optimization on pairs of chosen and rejected completions."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-6, lora_lr=1e-5, weight_decay=0.0)  # as TRL

    kind: Literal["dpo"]
    """Kind of experiment."""
    data: ChatData
    """Pairs: rows with `prompt` or `messages`, `chosen` and `rejected`; or only the two, as whole conversations."""
    loss: DpoLossSpec = DpoLossSpec()
    """Loss."""

    def conflicts(self) -> Iterator[Conflict]:
        """No reference model, or label smoothing without sigmoid."""
        yield from super().conflicts()
        if self.model.init is None:
            yield Conflict(("model", "init"), "expected a trained model, which is also the reference model")
        if self.parallel.pipeline > 1:
            yield Conflict(("parallel", "pipeline"), "expected 1, because the reference model is not split into layers")
        if self.loss.label_smoothing and self.loss.type != "sigmoid":
            yield Conflict(("loss", "label_smoothing"), "expected 0, because only `type: sigmoid` uses it")


class RewardLossSpec(Model):
    """Bradley–Terry loss on pairs."""

    margin: float = Field(default=0.0, ge=0)
    """Margin by which the chosen score has to exceed the rejected one."""
    center: float = Field(default=0.0, ge=0)
    """Coefficient of the penalty that centers scores around 0 (Eisenstein et al. 2023)."""


class RewardModelSpec(LmSpec):
    """Reward modeling: a scalar score per conversation, trained on pairs of chosen and rejected completions."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-5, lora_lr=1e-4, weight_decay=0.0)  # as OpenRLHF

    kind: Literal["reward_model"]
    """Kind of experiment."""
    data: ChatData
    """Pairs: rows with `prompt` or `messages`, `chosen` and `rejected`; or only the two, as whole conversations."""
    loss: RewardLossSpec = RewardLossSpec()
    """Loss."""

    def conflicts(self) -> Iterator[Conflict]:
        """LoRA, or a format without the chat template."""
        yield from super().conflicts()
        if self.model.lora is not None:
            yield Conflict(("model", "lora"), "expected null: a reward model's head and weights train together")
        if self.parallel.pipeline > 1:
            yield Conflict(("parallel", "pipeline"), "expected 1, because the reward model's head is not split")
        if self.data.format == "plain":
            reason = "expected chat, because a reward model scores conversations, written with the chat template"
            yield Conflict(("data", "format"), reason)
