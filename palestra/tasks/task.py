"""Problems, completions, verdicts, the base class of tasks, and the table of built-in tasks."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import Field

from palestra.data.media import content_text
from palestra.errors import UsageError, did_you_mean
from palestra.spec.imports import load_named
from palestra.spec.model import Model

Message = Mapping[str, Any]
"""One turn of a conversation: `role`, `content`, which is text or a list of OpenAI's parts: texts and images."""


class Status(StrEnum):
    """The outcome of a verification."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    """The completion has no answer in it."""
    TIMEOUT = "timeout"
    """The completion could not be verified in time: in training `rollout.on_timeout` says what becomes of it."""
    ERROR = "error"
    """The verifier failed, which is not the completion's fault: nothing is learned from it."""


@dataclass(frozen=True)
class Verdict:
    """A verifier's result for a completion."""

    score: float
    """The reward: 1 for a correct completion, 0 for a wrong one, unless the task documents other values."""
    status: Status
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further scores by name, such as `strict` and `flexible`."""
    seconds: float = 0.0
    """How long verification took."""
    sandbox: str | None = None
    """The level at which the completion's code was isolated: see `palestra.tasks.sandbox`."""
    note: str = ""
    """For people: the answer that was extracted, or what went wrong."""


@dataclass(frozen=True)
class Problem:
    """A prompt, and the data that its completions are verified with."""

    id: str
    """`<name of the task>/<split>/<row>`: the same in every process, whichever rows are left out."""
    prompt: str | tuple[Message, ...]
    """Plain text to continue, or the messages of a conversation to answer."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The data set's row; holds what JSON can hold."""

    @property
    def task(self) -> str:
        """The name of its task in this run."""
        return self.id.split("/", 1)[0]

    @property
    def messages(self) -> list[Message]:
        """The conversation; a plain prompt is one message of the user."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)

    @property
    def text(self) -> str:
        """The prompt as text: of a single message its content, of several each with its role."""
        messages = self.messages
        if len(messages) == 1:
            return content_text(messages[0]["content"])
        return "\n\n".join(f"{message['role']}: {content_text(message['content'])}" for message in messages)


@dataclass(frozen=True)
class Completion:
    """What a model generated after a prompt."""

    text: str
    """Up to the end of its turn or a stop string, which is not part of it."""
    truncated: bool = False
    """Whether it ended at the limit on new tokens."""
    prompt_text: str = ""
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()


def split_rows(split: str) -> tuple[str, slice | None]:
    """The name of a split and the rows that follow it in brackets, as Python slices them; None for all."""
    match = re.fullmatch(r"([^\[]+)\[(-?\d*):(-?\d*)\]", split)
    if match is None:
        return split, None
    first, last = (int(bound) if bound.strip("-") else None for bound in match.groups()[1:])
    return match[1], slice(first, last)


class TaskArgs(Model):
    """The args that every task has, under `args` in a spec."""

    stop: list[str] | None = Field(default=None)
    """Strings that end a completion; null takes the task's own."""


GivenArgs = TypeVar("GivenArgs", bound=TaskArgs)


class Task(ABC, Generic[GivenArgs]):
    """Rows, how a row becomes a prompt, and how a completion is verified.

    `verify` depends on its arguments alone: an `isolated` task is constructed again from its args in a worker process,
    which is killed where a completion makes it hang.
    """

    Args: ClassVar[type[TaskArgs]] = TaskArgs
    """The type of its args."""
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    """The splits there are; `train` is for training alone."""
    isolated: ClassVar[bool] = False
    """Whether verification can hang or crash."""
    stop: ClassVar[tuple[str, ...]] = ()
    """Strings that end a completion, unless the args say otherwise."""
    workflow: ClassVar[str | None] = None
    """The workflow that it needs; None for any."""
    named: ClassVar[str] = ""
    """The arg that follows the name of a source: of `reasoning_gym:<task>` it is `task`."""
    extra: ClassVar[str] = ""
    """The extra that it needs."""

    def __init__(self, args: GivenArgs, name: str):
        self.args, self.name = args, name

    @property
    def stops(self) -> tuple[str, ...]:
        return self.stop if self.args.stop is None else tuple(self.args.stop)

    @abstractmethod
    def problems(self, split: str) -> Sequence[Problem]:
        """The problems of a split, always in the same order; the sequence may be lazy."""

    def part(self, split: str) -> Sequence[Problem]:
        """The problems of a split, or of some of its rows: `train[:-500]` are all but the last 500."""
        name, rows = split_rows(split)
        problems = self.problems(name)
        return problems if rows is None else [problems[i] for i in range(len(problems))[rows]]

    def check_split(self, split: str) -> None:
        """Refuse the name of a split that there is not."""
        if split not in self.splits:
            raise UsageError(f"there is no split {split!r}; there are {' and '.join(map(repr, self.splits))}")

    @abstractmethod
    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """Whether a completion is correct."""

    @classmethod
    def names(cls) -> Mapping[str, str]:
        """What may follow the name of a source, each with what it needs besides its extra; empty for anything."""
        return {}

    def warm_up(self) -> None:
        """Load what verification needs; a worker calls it once, before the first completion's clock starts."""

    def id(self, split: str, row: str | int) -> str:
        """The id of a problem."""
        return f"{self.name}/{split}/{row}"


TASKS: dict[str, str] = {
    "arithmetic": "palestra.tasks.sets.synthetic:Arithmetic",
    "countdown": "palestra.tasks.sets.countdown:Countdown",
    "reverse": "palestra.tasks.sets.synthetic:Reverse",
    "sort": "palestra.tasks.sets.synthetic:Sort",
    "copy": "palestra.tasks.sets.synthetic:Copy",
    "gsm8k": "palestra.tasks.sets.questions:Gsm8k",
    "math": "palestra.tasks.sets.questions:Math",
    "aime": "palestra.tasks.sets.questions:Aime",
    "answers": "palestra.tasks.sets.questions:Answers",
    "mbpp": "palestra.tasks.sets.code:Mbpp",
    "humaneval": "palestra.tasks.sets.code:HumanEval",
    "ifeval": "palestra.tasks.sets.ifeval:IfEval",
    "reasoning_gym": "palestra.tasks.sets.reasoning_gym:ReasoningGym",
    "count_shapes": "palestra.tasks.sets.shapes:CountShapes",
    "clevr_count": "palestra.tasks.sets.pictures:ClevrCount",
    "geometry3k": "palestra.tasks.sets.pictures:Geometry3k",
}
"""Built-in tasks. Others come from the entry points `palestra.tasks`, or are named as `module:Class`."""

SOURCES: dict[str, str] = {
    "reasoning_gym": TASKS["reasoning_gym"],
    "textarena": "palestra.tasks.environments.textarena:TextArena",
    "gymnasium": "palestra.tasks.environments.gymnasium:Gymnasium",
    "openenv": "palestra.tasks.environments.openenv:OpenEnv",
    "verifiers": "palestra.tasks.environments.verifiers:Verifiers",
    "environment": "palestra.tasks.environments.environment:OwnEnvironment",
}
"""Sources of many tasks, each named as `<source>:<name>`."""


def task_type(name: str) -> type[Task]:
    """The class of a task: a built-in one, an installed one, `<source>:<name>` or `module:Class`."""
    source, _, rest = name.partition(":")
    if rest and source in SOURCES:
        cls = load_named(SOURCES[source], "task", "class")
        if (listed := cls.names()) and rest not in listed and ":" not in rest:
            hint = did_you_mean(rest, listed, f"`palestra tasks --search {source}` lists them")
            raise UsageError(f"{source} has no {rest!r}. {hint}")
        return cls
    known = TASKS | installed()
    reference = name if ":" in name else known.get(name)
    if reference is None:
        names = f"The tasks are: {', '.join(sorted(known))}, {', '.join(f'{s}:…' for s in SOURCES)}"
        hint = did_you_mean(name, [*known, *SOURCES])
        names += "; your own is named as 'module:Class', and `palestra tasks` lists all"
        raise UsageError(f"unknown task {name!r}. {hint} {names}".replace("  ", " "))
    loaded = load_named(reference, "task", "class")
    if not (isinstance(loaded, type) and issubclass(loaded, Task)):
        raise UsageError(f"the task {name!r} is {reference}, which is not a subclass of palestra.tasks.task.Task")
    return loaded


def make_task(task: str, args: Mapping[str, Any] | None = None, name: str | None = None) -> Task:
    """A task with its args, called `name` in this run."""
    cls = task_type(task)
    return cls(cls.Args.model_validate(task_args(task, args or {})), name or task)


def task_args(task: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The args with the one that the task's name says."""
    source, _, rest = task.partition(":")
    return {task_type(task).named: rest, **args} if rest and source in SOURCES else dict(args)


@cache
def installed() -> dict[str, str]:
    """Tasks of other packages, by their entry points."""
    from importlib.metadata import entry_points  # here, because our own tasks need not wait for a walk of all packages

    return {point.name: point.value for point in entry_points(group="palestra.tasks")}
