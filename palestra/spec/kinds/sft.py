"""The spec of kind `sft`: a language model trained on conversations."""

from typing import ClassVar, Literal

from pydantic import Field

from palestra.spec.lm import LmData, Source, TrainSource, Tuning, WritingSpec


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
