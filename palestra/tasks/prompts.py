"""Questions as prompts: plain text to go on from or a conversation, with worked examples and a system prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from palestra.tasks.task import TaskArgs
from palestra.tasks.types import Message

BOXED = "{question}\n\nReason step by step, and put your final answer within \\boxed{}."
"""What a conversation asks for where the answer is short."""


class PromptArgs(TaskArgs):
    """What every task that asks questions can be told."""

    format: Literal["chat", "plain"] = "chat"
    """Ask in a conversation, for models with a chat template; or as plain text, for base models."""
    system: str | None = None
    """The system prompt, or in plain text what stands first; null means none."""
    template: str | None = Field(default=None, pattern=r"\{question\}")
    """How a question is put, with `{question}` where it belongs; null takes the task's own."""
    shots: int = Field(default=0, ge=0, le=64)
    """How many worked examples come before the question: the first of the train split."""


@dataclass(frozen=True)
class Layout:
    """How a question is put, with `{question}` where it belongs."""

    plain: str
    chat: str = BOXED


@dataclass(frozen=True)
class Example:
    """A question and how it is answered."""

    question: str
    answer: str


def ask(args: PromptArgs, layout: Layout, question: str, examples: Sequence[Example] = ()) -> str | tuple[Message, ...]:
    """A question as a prompt, after worked examples."""
    template = args.template or (layout.plain if args.format == "plain" else layout.chat)
    if args.format == "plain":
        worked = [f"{_put(template, one.question)} {one.answer}" for one in examples]
        return "\n\n".join([*([args.system] if args.system else []), *worked, _put(template, question)])
    messages = [{"role": "system", "content": args.system}] if args.system else []
    for one in examples:
        messages.append({"role": "user", "content": _put(template, one.question)})
        messages.append({"role": "assistant", "content": one.answer})
    return (*messages, {"role": "user", "content": _put(template, question)})


def shown(args: PromptArgs, examples: Sequence[Example], question: str) -> list[Example]:
    """The first examples, as many as the args say; never the question itself, whose answer they would give away."""
    return [one for one in examples if one.question != question][: args.shots]


def stops_of(args: PromptArgs, plain: tuple[str, ...]) -> tuple[str, ...]:
    """Strings that end an answer: those of the args, else in plain text what would begin the next question."""
    if args.stop is not None:
        return tuple(args.stop)
    return plain if args.format == "plain" else ()


def _put(template: str, question: str) -> str:
    return template.replace("{question}", question)
