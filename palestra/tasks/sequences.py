"""The tasks `reverse`, `sort` and `copy`: `reverse abcd:` is to be followed by `dcba`."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from palestra.tasks.enumerated import Enumerated, Form
from palestra.tasks.generated import GeneratedArgs, compare, prompt, row
from palestra.tasks.task import Task
from palestra.tasks.types import Answer, Problem, Verdict


class SequenceArgs(GeneratedArgs):
    """Which sequences are asked for."""

    length: int = Field(default=4, ge=1, le=64)
    """The characters of each sequence."""
    min_length: int | None = Field(default=None, ge=1)
    """The fewest characters, where they vary up to `length`; null means they do not."""
    alphabet: str = Field(default="abcdefghij", min_length=2, max_length=128)
    """The characters, in their order for `sort`."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.min_length is not None and self.min_length > self.length:
            raise PydanticCustomError("length", "expected min_length of at most length")
        if len(set(self.alphabet)) < len(self.alphabet) or not self.alphabet.isprintable() or " " in self.alphabet:
            raise PydanticCustomError("alphabet", "expected an alphabet of visible characters, each once, no spaces")
        return self


class Characters(Task[SequenceArgs]):
    """A sequence of characters, to be answered by another one.

    Sequences of one length are a form of problem, and a fifth of each form's problems, at most 500, are held out: the
    same ones in all settings with this alphabet.
    """

    Args = SequenceArgs
    stop = ("\n",)
    word: ClassVar[str]
    """The word before a sequence in a prompt."""
    question: ClassVar[str]
    """What is asked in a conversation, before the sequence."""

    @abstractmethod
    def solve(self, text: str) -> str:
        """The right answer."""

    def problems(self, split: str) -> Sequence[Problem]:
        """All problems with these args."""
        return Texts(self, split)

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the sequence is right: in plain text all of the answer, in a conversation the last word of it."""
        words = answer.text.split()
        text = answer.text.strip()
        if self.args.format == "chat" and words:
            # Quotes and full stops are not part of it, unless they are of the alphabet.
            text = words[-1].strip("".join(set("\"'`*.,:;()[]") - set(self.args.alphabet)))
        return compare(text, problem.row["answer"], self.args)


class Texts(Enumerated):
    """The problems of a split; the row of an id is the sequence itself."""

    def __init__(self, task: Characters, split: str):
        args = task.args
        lengths = range(args.length if args.min_length is None else args.min_length, args.length + 1)
        forms = [Form(self._name(task, length), (len(args.alphabet),) * length) for length in lengths]
        super().__init__(forms, split)
        self._task, self._split = task, split

    def locate(self, row: str) -> int | None:
        """The index of a problem by the row of its id."""
        alphabet = self._task.args.alphabet
        if not set(row) <= set(alphabet):
            return None
        return self.where(self._name(self._task, len(row)), [alphabet.index(character) for character in row])

    @staticmethod
    def _name(task: Characters, length: int) -> str:
        return f"{task.word} {task.args.alphabet} {length}"

    def problem(self, form: Form, choices: tuple[int, ...]) -> Problem:
        """A sequence with its answer."""
        task = self._task
        text = "".join(task.args.alphabet[choice] for choice in choices)
        question = f"{task.question}: {text}\nAnswer with the result alone."
        return Problem(
            task.id(self._split, text), prompt(task.args, f"{task.word} {text}:", question), row(task.solve(text))
        )


class Reverse(Characters):
    """Sequences to be written backwards: `reverse abcd:` is followed by `dcba`."""

    word, question = "reverse", "Write these characters backwards"

    def solve(self, text: str) -> str:
        """The last character first."""
        return text[::-1]


class Sort(Characters):
    """Sequences to be sorted: `sort dbca:` is followed by `abcd`."""

    word, question = "sort", "Sort these characters"

    def solve(self, text: str) -> str:
        """By their order in the alphabet."""
        return "".join(sorted(text, key=self.args.alphabet.index))


class Copy(Characters):
    """Sequences to be written again: `copy abcd:` is followed by `abcd`."""

    word, question = "copy", "Write these characters again"

    def solve(self, text: str) -> str:
        """As it is."""
        return text
