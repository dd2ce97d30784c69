"""The generated tasks `arithmetic`, `reverse`, `sort` and `copy`, and their numbered problems.

A setting has a few forms, such as sums of two numbers of two digits, and a problem of a form is a number in mixed
radix. Each form has a permutation of its own, with a fixed key: its first problems are held out, the rest are for
training. A form has the same key in every setting, so a problem held out in one setting is in no other's train split.
"""

import hashlib
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import ClassVar, Literal, Self, TypeVar, overload

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from palestra.data.mixture import Indices, permute, stream_key
from palestra.errors import UsageError
from palestra.tasks.task import Completion, Message, Problem, Status, Task, TaskArgs, Verdict


class GeneratedArgs(TaskArgs):
    """Args of every generated task."""

    format: Literal["plain", "chat"] = "plain"
    """Prompts as a short text to continue, or as a question in a conversation."""
    partial: bool = False
    """Score a completion by its share of right characters; else it is right or wrong."""


G = TypeVar("G", bound=GeneratedArgs)


def prompt(args: GeneratedArgs, plain: str, question: str) -> str | tuple[Message, ...]:
    """A prompt in the format of the args."""
    return plain if args.format == "plain" else ({"role": "user", "content": question},)


LARGEST = 2**44
"""Most problems of a form: of a larger one, a subset that is spread evenly over it."""
HELD_OUT = 500
"""Most held-out problems of a form; of a small one, one in `HELD_OUT_PART`."""
HELD_OUT_PART = 5
AT_ONCE = 1024
"""Problems made together when iterating."""


@dataclass(frozen=True)
class ProblemForm:
    """Problems of one kind: every way to choose one of `radices[k]` values at each place k."""

    name: str
    """Describes it completely: the key of its permutation is derived from the name."""
    radices: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many problems it has."""
        return min(self.all, LARGEST)

    @property
    def all(self) -> int:
        """How many there are before it is limited to `LARGEST`."""
        return math.prod(self.radices)

    @property
    def held_out(self) -> int:
        """How many of them are the test split."""
        return min(HELD_OUT, self.size // HELD_OUT_PART)

    def choices(self, places: Indices) -> list[tuple[int, ...]]:
        """The problems at places of its permutation: what is chosen for each of `radices`."""
        problems = []
        for part in _moved(places, self.size, self.name).tolist():
            number, chosen = self._spread(part), []
            for radix in reversed(self.radices):
                number, choice = divmod(number, radix)
                chosen.append(choice)
            problems.append(tuple(reversed(chosen)))
        return problems

    def place(self, choices: Sequence[int]) -> int | None:
        """The place of a problem in its permutation; None where it is one of those left out."""
        number = 0
        for choice, radix in zip(choices, self.radices, strict=True):
            number = number * radix + choice
        part = number // (self.all // self.size)
        if part >= self.size or self._spread(part) != number:
            return None
        return int(_moved(np.array([part]), self.size, self.name, inverse=True)[0])

    def _spread(self, part: int) -> int:
        """One number of each of `size` equal parts of all numbers."""
        width = self.all // self.size
        if width == 1:
            return part
        digest = hashlib.blake2b(f"{self.name}\0{part}".encode(), digest_size=64).digest()
        return part * width + int.from_bytes(digest, "little") % width


class Generated(Task[G]):
    """A task of enumerable problems. `problems` makes them on demand, so a split may have billions."""

    stop: ClassVar[tuple[str, ...]] = ("\n",)

    @abstractmethod
    def forms(self) -> list[ProblemForm]:
        """The forms of problems with these args."""

    @abstractmethod
    def problem(self, split: str, form: ProblemForm, choices: tuple[int, ...]) -> Problem:
        """A problem of a form."""

    @abstractmethod
    def parse(self, row: str) -> tuple[str, Sequence[int]] | None:
        """The inverse of `problem`: the form's name and the choices by the row of an id; None if it is not one."""

    def problems(self, split: str) -> Sequence[Problem]:
        return Enumerated(self, split)

    def score(self, text: str, answer: str, *, from_end: bool = False) -> Verdict:
        """The verdict on a text that should be `answer`; an empty one is unparsable.

        With `from_end`, characters are compared from the last one on, as the digits of numbers are.
        """
        if not text:
            return Verdict(0.0, Status.UNPARSABLE, {"characters": 0.0})
        pairs = zip(text[::-1], answer[::-1], strict=False) if from_end else zip(text, answer, strict=False)
        same = sum(a == b for a, b in pairs) / max(len(text), len(answer))
        score = same if self.args.partial else float(text == answer)
        status = Status.CORRECT if text == answer else Status.WRONG
        return Verdict(score, status, {"characters": same}, note=text[:200])


class Enumerated(Sequence[Problem]):
    """One split of all problems of a task, in an order that mixes its forms; a problem is made when it is read."""

    def __init__(self, task: Generated, split: str):
        task.check_split(split)
        self._task, self._split, self._forms = task, split, task.forms()
        self._number = {form.name: number for number, form in enumerate(self._forms)}
        self._skipped = [form.held_out if split == "train" else 0 for form in self._forms]
        sizes = [form.size - form.held_out if split == "train" else form.held_out for form in self._forms]
        self._starts = [0, *accumulate(sizes)]
        self._order = "\0".join([split, *self._number])
        if len(self) == 0:
            raise UsageError(
                f"with these args there are only {sum(form.size for form in self._forms)} problems, too few for a "
                f"split '{split}': make them longer or allow more"
            )

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return self.at(np.arange(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} problems, none with index {index}")
        return self.at(np.array([index % len(self)]))[0]

    def __iter__(self) -> Iterator[Problem]:
        for start in range(0, len(self), AT_ONCE):
            yield from self[start : start + AT_ONCE]

    def locate(self, row: str) -> int | None:
        """The index of a problem by the row of its id; None where this split does not have it."""
        form, choices = self._task.parse(row) or ("", ())
        number = self._number.get(form)
        place = None if number is None else self._forms[number].place(choices)
        if number is None or place is None:
            return None
        at = place - self._skipped[number] + self._starts[number]
        if not self._starts[number] <= at < self._starts[number + 1]:
            return None
        return int(_moved(np.array([at]), len(self), self._order, inverse=True)[0])

    def at(self, indices: Indices) -> list[Problem]:
        """The problems at indices; many at once take little longer than one."""
        at = _moved(indices, len(self), self._order)
        numbers = np.searchsorted(self._starts, at, side="right") - 1
        problems: dict[int, Problem] = {}
        for number in np.unique(numbers).tolist():
            form, slots = self._forms[number], np.flatnonzero(numbers == number)
            choices = form.choices(at[slots] - self._starts[number] + self._skipped[number])
            made = [self._task.problem(self._split, form, chosen) for chosen in choices]
            problems |= dict(zip(slots.tolist(), made, strict=True))
        return [problems[slot] for slot in range(len(indices))]


def _moved(indices: Indices, length: int, name: str, inverse: bool = False) -> Indices:
    return permute(indices, length, np.array(stream_key(0, "problems", name), np.uint64), inverse)


class ArithmeticArgs(GeneratedArgs):
    """Args of `arithmetic`."""

    digits: int = Field(default=2, ge=1, le=9)
    """The digits of each number."""
    min_digits: int | None = Field(default=None, ge=1)
    """The fewest digits of a number, where they vary up to `digits`; null means they do not."""
    operations: list[Literal["+", "-", "*"]] = Field(default=["+"], min_length=1)
    """Which there are: +, - and *."""
    operands: int = Field(default=2, ge=2, le=4)
    """How many numbers a problem has."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.min_digits is not None and self.min_digits > self.digits:
            raise PydanticCustomError("digits", "expected min_digits of at most digits")
        if len(set(self.operations)) < len(self.operations):
            raise PydanticCustomError("operations", "expected each operation once")
        return self


class Arithmetic(Generated[ArithmeticArgs]):
    """Sums, differences and products of integers. `*` precedes `+` and `-`; results may be negative.

    The digits, their number and the operations make up a form, and a fifth of each form's problems, at most 500, are
    held out: the same ones in all settings. The row of an id is the problem itself, such as `12+34`.
    """

    Args = ArithmeticArgs

    def forms(self) -> list[ProblemForm]:
        args = self.args
        lengths = range(args.digits if args.min_digits is None else args.min_digits, args.digits + 1)
        return [
            _form(digits, operations)
            for operations in product(args.operations, repeat=args.operands - 1)
            for digits in product(lengths, repeat=args.operands)
        ]

    def problem(self, split: str, form: ProblemForm, choices: tuple[int, ...]) -> Problem:
        lengths, operations = re.findall("[0-9]+", form.name), re.findall(r"[+*-]", form.name)
        numbers = [choice + _least(int(length)) for choice, length in zip(choices, lengths, strict=True)]
        text, answer = _joined(numbers, operations), str(evaluate(numbers, operations))
        question = f"What is {text}? Answer with the number alone."
        row = {"answer": answer, "solution": answer}
        return Problem(self.id(split, text), prompt(self.args, f"{text}=", question), row)

    def parse(self, row: str) -> tuple[str, Sequence[int]] | None:
        if re.fullmatch(r"(?:0|[1-9][0-9]*)(?:[+*-](?:0|[1-9][0-9]*))*", row) is None:
            return None
        numbers, operations = re.split(r"[+*-]", row), re.findall(r"[+*-]", row)
        form = _form([len(number) for number in numbers], operations)
        return form.name, [int(number) - _least(len(number)) for number in numbers]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """Whether the number is right: in plain text the whole completion, in a conversation its last number."""
        text = completion.text.strip()
        if self.args.format == "chat":
            numbers = re.findall(r"(?<![0-9])-?[0-9]+", re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text))
            text = numbers[-1] if numbers else ""
        number = text if re.fullmatch("-?[0-9]+", text) else ""
        return self.score(number, problem.row["answer"], from_end=True)


def evaluate(numbers: Sequence[int], operations: Sequence[str]) -> int:
    """The value of numbers with operations between them, products first."""
    terms = [numbers[0]]
    for operation, number in zip(operations, numbers[1:], strict=True):
        if operation == "*":
            terms[-1] *= number
        else:
            terms.append(number if operation == "+" else -number)
    return sum(terms)


def _form(digits: Sequence[int], operations: Sequence[str]) -> ProblemForm:
    """A form such as `2+2`: the digits of the numbers, with the operations between."""
    return ProblemForm(_joined(digits, operations), tuple(10**count - _least(count) for count in digits))


def _joined(numbers: Sequence[int], operations: Sequence[str]) -> str:
    return "".join(f"{number}{sign}" for number, sign in zip(numbers, [*operations, ""], strict=True))


def _least(digits: int) -> int:
    """The least number with this many digits."""
    return 0 if digits == 1 else 10 ** (digits - 1)


class SequenceArgs(GeneratedArgs):
    """Args of `reverse`, `sort` and `copy`."""

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


class Characters(Generated[SequenceArgs]):
    """A sequence of characters, and another one as its answer.

    Sequences of one length are a form, and a fifth of each form's problems, at most 500, are held out: the same ones in
    all settings with this alphabet. The row of an id is the sequence itself.
    """

    Args = SequenceArgs
    word: ClassVar[str]
    """The word before a sequence in a plain prompt."""
    question: ClassVar[str]
    """The question of a conversation, before the sequence."""

    @abstractmethod
    def solve(self, text: str) -> str:
        """The right answer."""

    def forms(self) -> list[ProblemForm]:
        args = self.args
        lengths = range(args.length if args.min_length is None else args.min_length, args.length + 1)
        return [ProblemForm(self._form(length), (len(args.alphabet),) * length) for length in lengths]

    def problem(self, split: str, form: ProblemForm, choices: tuple[int, ...]) -> Problem:
        text = "".join(self.args.alphabet[choice] for choice in choices)
        question = f"{self.question}: {text}\nAnswer with the result alone."
        answer = self.solve(text)
        row = {"answer": answer, "solution": answer}
        return Problem(self.id(split, text), prompt(self.args, f"{self.word} {text}:", question), row)

    def parse(self, row: str) -> tuple[str, Sequence[int]] | None:
        alphabet = self.args.alphabet
        if not set(row) <= set(alphabet):
            return None
        return self._form(len(row)), [alphabet.index(character) for character in row]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """Whether the sequence is right: in plain text the whole completion, in a conversation its last word."""
        text = completion.text.strip()
        if self.args.format == "chat" and text:
            # Quotes and full stops are not part of it, unless they are of the alphabet.
            text = text.split()[-1].strip("".join(set("\"'`*.,:;()[]") - set(self.args.alphabet)))
        return self.score(text, problem.row["answer"])

    def _form(self, length: int) -> str:
        return f"{self.word} {self.args.alphabet} {length}"


class Reverse(Characters):
    """Sequences to be written backwards: `reverse abcd:` is followed by `dcba`."""

    word, question = "reverse", "Write these characters backwards"

    def solve(self, text: str) -> str:
        return text[::-1]


class Sort(Characters):
    """Sequences to be sorted: `sort dbca:` is followed by `abcd`."""

    word, question = "sort", "Sort these characters"

    def solve(self, text: str) -> str:
        return "".join(sorted(text, key=self.args.alphabet.index))


class Copy(Characters):
    """Sequences to be written again: `copy abcd:` is followed by `abcd`."""

    word, question = "copy", "Write these characters again"

    def solve(self, text: str) -> str:
        return text
