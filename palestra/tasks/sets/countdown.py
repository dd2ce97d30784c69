"""The task `countdown`: complete `2,5,7=39:` with an expression of these numbers that has that value."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from palestra.data.mixture import stream_key
from palestra.errors import UsageError
from palestra.tasks.sets.synthetic import GeneratedArgs, prompt
from palestra.tasks.task import Completion, Problem, Status, Task, Verdict

Operation = Literal["+", "-", "*", "/"]

HELD_OUT, HELD_OUT_PART = 500, 10  # problems of the test split at most; one in ten, by a hash, is held out
PATIENCE = 2000  # samples without a new puzzle after which there are no more
LONGEST = 200  # characters of an expression: deep nesting crashes a parser
VALID_SCORE = 0.1  # with `partial`, of an expression of the right numbers with another value (TinyZero's format reward)

OPERATIONS: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}

Expression = tuple[int, str, int]
"""Value, text and precedence of the outermost operation; 3 for a number."""


class CountdownArgs(GeneratedArgs):
    """Args of `countdown`."""

    numbers: int = Field(default=3, ge=2, le=6)
    """How many numbers a puzzle has."""
    largest: int = Field(default=20, ge=2, le=1000)
    """The largest number."""
    target: int = Field(default=99, ge=2)
    """The largest target."""
    operations: list[Operation] = Field(default=["+", "-", "*"], min_length=1)
    """Which there are: +, -, * and /."""
    use_all: bool = False
    """Every number must be used exactly once; else each at most once."""
    size: int = Field(default=10_000, ge=1)
    """Training problems at most."""
    partial: bool = False
    """Score an expression of the right numbers that has another value 0.1; else only right ones score."""

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if len(set(self.operations)) < len(self.operations):
            raise PydanticCustomError("operations", "expected each operation once")
        return self


class Countdown(Task[CountdownArgs]):
    """Numbers to be combined to a target. Any expression of the right numbers and value is correct.

    Whether a puzzle is held out follows from a hash of its numbers and target, whatever the other args are.
    """

    Args = CountdownArgs
    stop = ("\n",)

    def problems(self, split: str) -> Sequence[Problem]:
        """Distinct puzzles, all of them solvable."""
        self.check_split(split)
        args = self.args
        setting = (args.numbers, args.largest, args.target, "".join(args.operations), args.use_all)
        random = Random(stream_key(0, "countdown", split, *setting))
        puzzles: dict[str, Problem] = {}
        missed, size = 0, args.size if split == "train" else HELD_OUT
        while len(puzzles) < size and missed < PATIENCE:
            missed += 1
            numbers, (target, solution, _) = _puzzle(random, args)
            row = f"{','.join(map(str, numbers))}={target}"
            fits = target <= args.target and (args.use_all or target not in numbers)
            if not fits or row in puzzles or _split(row) != split:
                continue
            puzzles[row], missed = self._problem(split, row, numbers, target, solution), 0
        if not puzzles:
            raise UsageError(f"{self.name}: there are no puzzles with these args for the split '{split}'; allow more")
        return list(puzzles.values())

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        text = _candidate(completion.text) if self.args.format == "chat" else completion.text.strip()
        parsed = parse(text)
        if parsed is None:
            return Verdict(0.0, Status.UNPARSABLE, {"valid": 0.0}, note=text[:LONGEST])
        value, used = parsed
        available = Counter(problem.row["numbers"])
        allowed = set(text) & set("+-*/") <= set(self.args.operations)
        valid = allowed and (used == available if self.args.use_all else used <= available)
        if valid and value == problem.row["target"]:
            return Verdict(1.0, Status.CORRECT, {"valid": 1.0}, note=text)
        score = VALID_SCORE if valid and self.args.partial else 0.0
        why = f"{text} is {value}" if valid else f"{text} uses numbers or operators that are not allowed"
        return Verdict(score, Status.WRONG, {"valid": float(valid)}, note=why)

    def _problem(self, split: str, row: str, numbers: Sequence[int], target: int, solution: str) -> Problem:
        often = "exactly once" if self.args.use_all else "at most once"
        question = (
            f"Write an expression with the value {target} from the numbers {', '.join(map(str, numbers))}, each "
            f"{often}, and {', '.join(self.args.operations)}. Answer with the expression alone."
        )
        data = {"numbers": list(numbers), "target": target, "answer": str(target), "solution": solution}
        return Problem(self.id(split, row), prompt(self.args, f"{row}:", question), data)


def parse(text: str) -> tuple[Fraction | None, Counter[int]] | None:
    """The value of an expression and the numbers in it; None if it is not one.

    The value is None where the expression divides by zero.
    """
    if len(text) > LONGEST or re.fullmatch(r"[0-9+*/() -]+", text) is None:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    numbers = Counter(value for value in constants if isinstance(value, int))
    try:
        return _value(tree), numbers
    except ZeroDivisionError:
        return None, numbers
    except TypeError:
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise TypeError(f"{type(node).__name__} is not allowed in an expression")


def _candidate(text: str) -> str:
    """The last expression in the last line of a text, up to an equals sign."""
    lines = text.strip().splitlines() or [""]
    expressions = re.findall(r"[0-9(][0-9+*/() -]*", lines[-1].partition("=")[0])
    return expressions[-1].strip() if expressions else ""


def _split(row: str) -> str:
    return "test" if stream_key(0, "countdown", row) % HELD_OUT_PART == 0 else "train"


def _puzzle(random: Random, args: CountdownArgs) -> tuple[list[int], Expression]:
    """Numbers, and an expression of some or all of them whose every part is a positive integer."""
    numbers = [1 + _below(random, args.largest) for _ in range(args.numbers)]
    parts: list[Expression] = [(number, str(number), 3) for number in numbers]
    used = len(parts) if args.use_all else 2 + _below(random, len(parts) - 1)
    parts = [parts.pop(_below(random, len(parts))) for _ in range(used)]
    while len(parts) > 1:
        one, other = (parts.pop(_below(random, len(parts))) for _ in range(2))
        fitting = [sign for sign in args.operations if _whole(one[0], sign, other[0])]
        if not fitting:  # no positive integer in this order: the puzzle does not fit
            return sorted(numbers), (args.target + 1, "", 0)
        parts.append(_joined(one, fitting[_below(random, len(fitting))], other))
    return sorted(numbers), parts[0]


def _whole(one: int, sign: str, other: int) -> bool:
    return one > other if sign == "-" else sign != "/" or one % other == 0


def _joined(one: Expression, sign: str, other: Expression) -> Expression:
    rank = PRECEDENCE[sign]
    left = f"({one[1]})" if one[2] < rank else one[1]
    # a-(b+c) and a/(b*c) need their brackets; those of a+(b-c) and a*(b/c) change nothing.
    right = f"({other[1]})" if other[2] < rank or (other[2] == rank and sign in "-/") else other[1]
    values = {"+": one[0] + other[0], "-": one[0] - other[0], "*": one[0] * other[0], "/": one[0] // other[0]}
    return values[sign], f"{left}{sign}{right}", rank


def _below(random: Random, end: int) -> int:
    """A number of [0, end), from the one method whose results are the same in all versions of Python."""
    return int(random.random() * end)
