"""What a task is: problems, completions, verdicts, the base class, and the table of tasks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field

from palestra.errors import UsageError
from palestra.spec.imports import load_named
from palestra.spec.model import Model

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


class TaskArgs(Model):
    """What every task can be told in a spec, under `args`."""

    stop: list[str] | None = Field(default=None)
    """Strings that end an answer; null takes the task's own."""


Args = TypeVar("Args", bound=TaskArgs)


class Task(ABC, Generic[Args]):
    """Rows, how a row becomes a prompt, and how an answer is judged. A subclass is named in `palestra.tasks.task`.

    `judge` depends on its arguments alone: a task that is `isolated` is made again, from its args, in a process of its
    own, and is killed there where an answer makes it hang.
    """

    Args: ClassVar[type[TaskArgs]]
    """The type of its args."""
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    """The splits there are; `train` is for training alone."""
    isolated: ClassVar[bool] = False
    """Whether judging can hang or crash."""
    stop: ClassVar[tuple[str, ...]] = ()
    """Strings that end an answer, unless the args say otherwise."""

    def __init__(self, args: Args, name: str):
        self.args, self.name = args, name

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return self.stop if self.args.stop is None else tuple(self.args.stop)

    @abstractmethod
    def problems(self, split: str) -> Sequence[Problem]:
        """The problems of a split, always in the same order; one may be made when it is asked for."""

    @abstractmethod
    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether an answer is right."""

    def warm_up(self) -> None:
        """Load what judging needs; a worker calls it once, before the first answer and outside its time."""

    def id(self, split: str, row: str | int) -> str:
        """The id of a problem."""
        return f"{self.name}/{split}/{row}"


TASKS: dict[str, str] = {
    "arithmetic": "palestra.tasks.sets.synthetic:Arithmetic",
    "countdown": "palestra.tasks.sets.countdown:Countdown",
    "reverse": "palestra.tasks.sets.synthetic:Reverse",
    "sort": "palestra.tasks.sets.synthetic:Sort",
    "copy": "palestra.tasks.sets.synthetic:Copy",
    "gsm8k": "palestra.tasks.sets.math:Gsm8k",
    "math": "palestra.tasks.sets.math:Math",
    "aime": "palestra.tasks.sets.math:Aime",
    "answers": "palestra.tasks.sets.answers:Answers",
    "mbpp": "palestra.tasks.sets.code:Mbpp",
    "humaneval": "palestra.tasks.sets.code:HumanEval",
    "ifeval": "palestra.tasks.sets.ifeval:IfEval",
    "reasoning_gym": "palestra.tasks.sets.reasoning_gym:ReasoningGym",
}
"""Palestra's own tasks. Others come by the entry points `palestra.tasks`, or are named as `module:Class`."""


def task_type(name: str) -> type[Task]:
    """The class of a task: one of the table, an installed one, or `module:Class`."""
    reference = name if ":" in name else (TASKS | _installed()).get(name)
    if reference is None:
        near = get_close_matches(name, TASKS | _installed(), n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(
            f"unknown task {name!r}.{hint} The tasks are: {', '.join(sorted(TASKS | _installed()))}; "
            "your own is named as 'module:Class'"
        )
    found = load_named(reference, "task", "class")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UsageError(f"the task {name!r} is {reference}, which is no subclass of palestra.tasks.task.Task")
    return found


def make_task(task: str, args: Mapping[str, Any] | None = None, name: str | None = None) -> Task:
    """A task with its args, called `name` in this run."""
    found = task_type(task)
    return found(found.Args.model_validate(dict(args or {})), name or task)


@cache
def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points  # here, because our own tasks need not wait for a walk of all packages

    return {point.name: point.value for point in entry_points(group="palestra.tasks")}
