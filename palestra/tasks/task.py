"""What a task is: one small class for training and evaluation alike, so that prompt, stops and judge cannot differ."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

from pydantic import Field

from palestra.spec.model import Model
from palestra.tasks.types import Answer, Problem, Verdict


class TaskArgs(Model):
    """What every task can be told in a spec, under `args`."""

    stop: list[str] | None = Field(default=None)
    """Strings that end an answer; null takes the task's own."""


Args = TypeVar("Args", bound=TaskArgs)


class Task(ABC, Generic[Args]):
    """Rows, how a row becomes a prompt, and how an answer is judged. A subclass is named in `palestra.tasks.registry`.

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
