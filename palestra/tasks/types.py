"""What a task gives and takes: problems, answers, verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Message = Mapping[str, Any]
"""One turn of a conversation: `role`, `content`."""


class Status(StrEnum):
    """What became of judging an answer."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    """There is no answer in the text."""
    TIMEOUT = "timeout"
    """The completion could not be verified in time: in training `rollout.on_timeout` says what becomes of it."""
    ERROR = "error"
    """The judge failed, which is not the answer's fault: nothing is learned from it."""


@dataclass(frozen=True)
class Verdict:
    """What a judge says of an answer."""

    score: float
    """The reward; 1 for an answer that is wholly right, 0 for one that is not right at all, unless a task says more."""
    status: Status
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further scores by name, such as `strict` and `flexible`."""
    seconds: float = 0.0
    """How long judging took."""
    sandbox: str | None = None
    """How well the answer's code was locked in: see `palestra.tasks.sandbox`."""
    note: str = ""
    """For people: what was taken for the answer, or what went wrong."""


@dataclass(frozen=True)
class Problem:
    """A prompt, and the data its answers are judged by."""

    id: str
    """`<name of the task>/<split>/<row>`: the same in every process and whatever rows are left out."""
    prompt: str | tuple[Message, ...]
    """Plain text to go on from, or the messages of a conversation to answer."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row behind it, as JSON has it."""

    @property
    def task(self) -> str:
        """The name of its task in this run."""
        return self.id.split("/", 1)[0]


@dataclass(frozen=True)
class Answer:
    """What a model wrote."""

    text: str
    """Up to the end of its turn or a stop string, which is not part of it."""
    truncated: bool = False
    """Whether it was cut off by the limit on new tokens."""
    prompt_text: str = ""
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
