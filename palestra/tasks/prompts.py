"""Questions as prompts: plain text or conversations, with worked examples; demonstrations to imitate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from palestra.errors import UsageError
from palestra.tasks.task import Message, Problem, Task, TaskArgs

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
class Shot:
    """A question and how it is answered."""

    question: str
    answer: str


def ask(args: PromptArgs, layout: Layout, question: str, examples: Sequence[Shot] = ()) -> str | tuple[Message, ...]:
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


def shown(args: PromptArgs, examples: Sequence[Shot], question: str) -> list[Shot]:
    """The first examples, as many as the args say; never the question itself, whose answer they would give away."""
    return [one for one in examples if one.question != question][: args.shots]


def stops_of(args: PromptArgs, plain: tuple[str, ...]) -> tuple[str, ...]:
    """Strings that end an answer: those of the args, else in plain text what would begin the next question."""
    if args.stop is not None:
        return tuple(args.stop)
    return plain if args.format == "plain" else ()


def _put(template: str, question: str) -> str:
    return template.replace("{question}", question)


def messages_of(problem: Problem) -> list[Message]:
    """The conversation to be answered; a plain prompt is one message of the user."""
    if isinstance(problem.prompt, str):
        return [{"role": "user", "content": problem.prompt}]
    return list(problem.prompt)


def text_of(problem: Problem) -> str:
    """The prompt; of a conversation of one message its content, of a longer one each with its role."""
    messages = messages_of(problem)
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def demonstrations(task: Task, split: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows `{"prompt", "completion"}` of the problems `start` to `start + count` of a split, as SFT reads them.

    A prompt is a text, or a list of messages where the task asks in conversations. The task's rows must have a
    `solution`, a text that it judges as right.
    """
    problems = task.problems(split)
    if start < 0 or count < 1 or start + count > len(problems):
        raise UsageError(
            f"the split '{split}' of {task.name} has {len(problems)} problems; asked for {count} from {start} on"
        )
    rows = []
    for problem in problems[start : start + count]:
        if "solution" not in problem.row:
            raise UsageError(f"{problem.id} has no solution in its row: {task.name} cannot be learned by imitation")
        asked = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
        rows.append({"prompt": asked, "completion": problem.row["solution"]})
    return rows
