"""What generated tasks share: their args, their prompts, and the judging of an answer that is a short text."""

from collections.abc import Mapping
from typing import Any, Literal

from palestra.tasks.task import TaskArgs
from palestra.tasks.types import Message, Status, Verdict


class GeneratedArgs(TaskArgs):
    """What every generated task can be told."""

    format: Literal["plain", "chat"] = "plain"
    """Prompts as a short text to go on from, or as a question in a conversation."""
    partial: bool = False
    """Score an answer by its share of right characters; else it is right or not."""


def prompt(args: GeneratedArgs, plain: str, question: str) -> str | tuple[Message, ...]:
    """A prompt in the format of the args."""
    return plain if args.format == "plain" else ({"role": "user", "content": question},)


def row(answer: str, **more: Any) -> Mapping[str, Any]:
    """A row whose answer is the text itself."""
    return {"answer": answer, "solution": answer, **more}


def compare(given: str | None, answer: str, args: GeneratedArgs, *, from_end: bool = False) -> Verdict:
    """Judge a text that should be `answer`; None means that there is none in what the model wrote.

    With `from_end`, characters are compared from the last one on, as the digits of numbers are.
    """
    if not given:
        return Verdict(0.0, Status.UNPARSABLE, {"characters": 0.0})
    one, other = (given[::-1], answer[::-1]) if from_end else (given, answer)
    same = sum(a == b for a, b in zip(one, other, strict=False)) / max(len(one), len(other))
    right = given == answer
    score = same if args.partial else float(right)
    return Verdict(score, Status.CORRECT if right else Status.WRONG, {"characters": same}, note=given[:200])
