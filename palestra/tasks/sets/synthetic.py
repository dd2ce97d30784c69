"""The generated tasks `arithmetic`, `reverse`, `sort` and `copy`, and their numbered problems.

A setting is a few forms, such as sums of two numbers of two digits, and a problem of a form is a number in mixed radix.
Each form has a permutation of its own, of a fixed key: its first problems are held out, the rest are for training. A
form has the same key wherever it is used, so a problem held out in one setting is in the training split of none.
"""

import hashlib
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, ClassVar, Literal, Self, overload

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from palestra.data.mixture import Indices, permute, stream_key
from palestra.errors import UsageError
from palestra.tasks.task import Answer, Message, Problem, Status, Task, TaskArgs, Verdict


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


LARGEST = 2**44
"""Problems of a form at most: of a larger one, a part that is spread evenly over it."""
HELD_OUT = 500
"""Problems of a form that are held out at most, else one in `HELD_OUT_PART`."""
HELD_OUT_PART = 5
AT_ONCE = 1024
"""Problems made at once where all are asked for."""


@dataclass(frozen=True)
class ProblemForm:
    """Problems of one kind: every way to choose one of `radices[k]` things at each place k."""

    name: str
    """Says all that there is to it: its permutation is made of the name."""
    radices: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many problems it has."""
        return min(self.all, LARGEST)

    @property
    def all(self) -> int:
        """How many there are before some are left out."""
        return math.prod(self.radices)

    @property
    def held_out(self) -> int:
        """How many of them are the test split."""
        return min(HELD_OUT, self.size // HELD_OUT_PART)

    def choices(self, places: Indices) -> list[tuple[int, ...]]:
        """The problems at places of its permutation: what is chosen for each of `radices`."""
        found = []
        for part in _moved(places, self.size, self.name).tolist():
            number, chosen = self._spread(part), []
            for radix in reversed(self.radices):
                number, choice = divmod(number, radix)
                chosen.append(choice)
            found.append(tuple(reversed(chosen)))
        return found

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


class Enumerated(Sequence[Problem]):
    """One split of all problems of some forms, in an order that mixes them; a problem is made when it is asked for."""

    def __init__(self, forms: Sequence[ProblemForm], split: str):
        if split not in ("train", "test"):
            raise UsageError(f"there is no split {split!r}; there are 'train' and 'test'")
        self._forms = forms
        self._number = {form.name: number for number, form in enumerate(forms)}
        self._skipped = [form.held_out if split == "train" else 0 for form in forms]
        sizes = [form.size - form.held_out if split == "train" else form.held_out for form in forms]
        self._starts = [0, *accumulate(sizes)]
        self._order = "\0".join([split, *(form.name for form in forms)])
        if len(self) == 0:
            raise UsageError(
                f"with these args there are only {sum(form.size for form in forms)} problems, too few for a split "
                f"'{split}': make them longer or allow more"
            )

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        """The problem at an index, or those of a slice."""
        if isinstance(index, slice):
            return self.at(np.arange(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} problems, none with index {index}")
        return self.at(np.array([index % len(self)]))[0]

    def __iter__(self) -> Iterator[Problem]:
        for start in range(0, len(self), AT_ONCE):
            yield from self[start : start + AT_ONCE]

    @abstractmethod
    def problem(self, form: ProblemForm, choices: tuple[int, ...]) -> Problem:
        """A problem of a form."""

    @abstractmethod
    def locate(self, row: str) -> int | None:
        """The index of a problem by the row of its id; None where there is none of it in this split."""

    def where(self, form: str, choices: Sequence[int]) -> int | None:
        """The index of a problem by the name of its form; None where it is not of this split."""
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
        found: dict[int, Problem] = {}
        for number in np.unique(numbers).tolist():
            form, theirs = self._forms[number], np.flatnonzero(numbers == number)
            choices = form.choices(at[theirs] - self._starts[number] + self._skipped[number])
            found |= {slot: self.problem(form, one) for slot, one in zip(theirs.tolist(), choices, strict=True)}
        return [found[slot] for slot in range(len(indices))]


def _moved(indices: Indices, length: int, name: str, inverse: bool = False) -> Indices:
    return permute(indices, length, np.array(stream_key(0, "problems", name), np.uint64), inverse)


Operation = Literal["+", "-", "*"]


class ArithmeticArgs(GeneratedArgs):
    """Which sums are asked."""

    digits: int = Field(default=2, ge=1, le=9)
    """The digits of each number."""
    min_digits: int | None = Field(default=None, ge=1)
    """The fewest digits of a number, where they vary up to `digits`; null means they do not."""
    operations: list[Operation] = Field(default=["+"], min_length=1)
    """Which there are: +, - and *."""
    operands: int = Field(default=2, ge=2, le=4)
    """How many numbers there are in a problem."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.min_digits is not None and self.min_digits > self.digits:
            raise PydanticCustomError("digits", "expected min_digits of at most digits")
        if len(set(self.operations)) < len(self.operations):
            raise PydanticCustomError("operations", "expected each operation once")
        return self


class Arithmetic(Task[ArithmeticArgs]):
    """Sums, differences and products of whole numbers. `*` goes before `+` and `-`; answers may be below zero.

    The digits, their number and the operations are a form of problem each, and a fifth of each form's problems, at
    most 500, are held out: the same ones in all settings.
    """

    Args = ArithmeticArgs
    stop = ("\n",)

    def problems(self, split: str) -> Sequence[Problem]:
        """All problems with these args."""
        return Sums(self, split)

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the number is right: in plain text all of the answer, in a conversation the last number in it."""
        text = answer.text.strip()
        if self.args.format == "chat":
            numbers = re.findall(r"(?<![0-9])-?[0-9]+", re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text))
            text = numbers[-1] if numbers else ""
        given = text if re.fullmatch("-?[0-9]+", text) else None
        return compare(given, problem.row["answer"], self.args, from_end=True)


class Sums(Enumerated):
    """The problems of a split; the row of an id is the sum itself, such as `12+34`."""

    def __init__(self, task: Arithmetic, split: str):
        args, operands = task.args, task.args.operands
        lengths = range(args.digits if args.min_digits is None else args.min_digits, args.digits + 1)
        forms = [
            _form(digits, operations)
            for operations in product(args.operations, repeat=operands - 1)
            for digits in product(lengths, repeat=operands)
        ]
        super().__init__(forms, split)
        self._task, self._split = task, split

    def locate(self, row: str) -> int | None:
        """The index of a problem by the row of its id."""
        if re.fullmatch(r"(?:0|[1-9][0-9]*)(?:[+*-](?:0|[1-9][0-9]*))*", row) is None:
            return None
        numbers, operations = re.split(r"[+*-]", row), re.findall(r"[+*-]", row)
        form = _form([len(number) for number in numbers], operations)
        return self.where(form.name, [int(number) - _least(len(number)) for number in numbers])

    def problem(self, form: ProblemForm, choices: tuple[int, ...]) -> Problem:
        """A sum with its value."""
        lengths, operations = re.findall("[0-9]+", form.name), re.findall(r"[+*-]", form.name)
        numbers = [choice + _least(int(length)) for choice, length in zip(choices, lengths, strict=True)]
        text = "".join(f"{number}{sign}" for number, sign in zip(numbers, [*operations, ""], strict=True))
        question = f"What is {text}? Answer with the number alone."
        return Problem(
            self._task.id(self._split, text),
            prompt(self._task.args, f"{text}=", question),
            row(str(evaluate(numbers, operations))),
        )


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
    """Its name is such as `2+2`: the digits of the numbers, with the operations between."""
    name = "".join(f"{count}{sign}" for count, sign in zip(digits, [*operations, ""], strict=True))
    return ProblemForm(name, tuple(10**count - _least(count) for count in digits))


def _least(digits: int) -> int:
    """The least number of so many digits."""
    return 0 if digits == 1 else 10 ** (digits - 1)


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
        return SequenceTexts(self, split)

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the sequence is right: in plain text all of the answer, in a conversation the last word of it."""
        words = answer.text.split()
        text = answer.text.strip()
        if self.args.format == "chat" and words:
            # Quotes and full stops are not part of it, unless they are of the alphabet.
            text = words[-1].strip("".join(set("\"'`*.,:;()[]") - set(self.args.alphabet)))
        return compare(text, problem.row["answer"], self.args)


class SequenceTexts(Enumerated):
    """The problems of a split; the row of an id is the sequence itself."""

    def __init__(self, task: Characters, split: str):
        args = task.args
        lengths = range(args.length if args.min_length is None else args.min_length, args.length + 1)
        forms = [ProblemForm(self._name(task, length), (len(args.alphabet),) * length) for length in lengths]
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

    def problem(self, form: ProblemForm, choices: tuple[int, ...]) -> Problem:
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
