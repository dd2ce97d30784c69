"""The task `arithmetic`: `12+34=` is to be followed by `46`."""

import re
from collections.abc import Sequence
from itertools import product
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from palestra.tasks.enumerated import Enumerated, Form
from palestra.tasks.generated import GeneratedArgs, compare, prompt, row
from palestra.tasks.task import Task
from palestra.tasks.types import Answer, Problem, Verdict

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

    def problem(self, form: Form, choices: tuple[int, ...]) -> Problem:
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


def _form(digits: Sequence[int], operations: Sequence[str]) -> Form:
    """Its name is such as `2+2`: the digits of the numbers, with the operations between."""
    name = "".join(f"{count}{sign}" for count, sign in zip(digits, [*operations, ""], strict=True))
    return Form(name, tuple(10**count - _least(count) for count in digits))


def _least(digits: int) -> int:
    """The least number of so many digits."""
    return 0 if digits == 1 else 10 ** (digits - 1)
