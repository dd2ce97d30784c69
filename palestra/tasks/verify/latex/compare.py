r"""Whether two mathematical answers are equal: by normal forms, and where those differ by numeric value.

Structure is compared here, part by part: `(1,2)` is not `(2,1)`, `\{1,2\}` is `2, 1`, `[0,1)` is not `[0,1]`. What is
left are expressions, of which `palestra.tasks.verify.latex.values` compares the values.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import ModuleType

from palestra.tasks.verify.latex.extract import formulas
from palestra.tasks.verify.latex.normalize import LONGEST, Form, cleaned, form, plain_text

log = logging.getLogger("palestra.tasks")

VALUES = ("number", "percent", "expression")  # kinds of forms that have a value
_SIDES = re.compile(r"=|\\approx")
_OPERATOR = re.compile(r"[-+*/^!]|\\[a-z]{3}")
PLACES = 6  # decimal places with which a rounded value counts as the value
MEMORY = 1 << 30  # bytes that a comparison may take


def same_answer(gold: str, answer: str) -> bool | None:
    """Whether an answer equals the reference; None where that cannot be decided, which does not count as equal."""
    return _same(form(gold), form(answer))


def echoes(question: str, gold: str, answer: str) -> bool:
    """Whether an answer is a formula of the question, or has one in it, that the reference does not have."""
    if not question or _written(answer) == _written(gold):
        return False
    asked = [formula for formula in formulas(question) if len(formula) <= LONGEST]
    known = {_written(side) for formula in asked for side in (formula, *_SIDES.split(formula))}
    long = [text for text in map(cleaned, asked) if _OPERATOR.search(text) and text not in cleaned(gold)]
    plain = cleaned(question) if asked == [question] else ""
    sides = [side for side in _SIDES.split(answer) if side.strip()]
    for side in [side for side in sides if len(side.strip()) > 1] or sides:  # without the name in `x = …`
        text = cleaned(side)
        repeats = any(one in text for one in long) or (_OPERATOR.search(text) and text in plain)
        if not repeats and _written(side) not in known:
            return False
    return True


def _written(text: str) -> str:
    """The normal form, and for a number whether it is worked out."""
    read = form(text)
    while read.kind == "assignment":
        read = read.parts[0]
    return f"{read} {_OPERATOR.search(text) is not None}" if read.kind == "number" else str(read)


@contextmanager
def memory_capped(capped: bool) -> Iterator[None]:
    """Allow this process `MEMORY` more than it has, on Linux: some numbers fill memory before the timeout."""
    if not capped or sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _same(gold: Form, answer: Form) -> bool | None:
    if str(gold) == str(answer):
        return True
    if "chain" in (gold.kind, answer.kind):
        sides = [one.parts if one.kind == "chain" else (one,) for one in (gold, answer)]
        return all(_same(right, actual) for right in sides[0] for actual in sides[1])
    kinds = gold.kind, answer.kind
    if kinds == ("assignment", "assignment") and gold.value == answer.value:
        return _same(gold.parts[0], answer.parts[0])
    if "relation" in kinds or kinds == ("assignment", "assignment"):
        return _same_relation(gold, answer)
    if "assignment" in kinds:
        return _same(*(one.parts[0] if one.kind == "assignment" else one for one in (gold, answer)))
    if set(kinds) <= {"number", "percent"}:
        return _same_number(gold, answer)
    if answer.kind == "list" and gold.kind in VALUES:  # one value, written in several ways
        return all(_same(gold, part) for part in answer.parts)
    if "text" in kinds:  # also `\text{AB}` and `AB`, never an anagram
        return _words(gold) == _words(answer) != ""
    if "digits" in kinds:
        digits = [str(one.value).split("_") for one in (gold, answer)]
        return digits[0][0] == digits[1][0] and kinds[0] != kinds[1]  # the base may be left out
    if set(kinds) <= set(VALUES):
        return _computed(lambda values: values.equal(gold.value, answer.value, _tolerance(answer)))
    if set(kinds) <= {"list", "union"}:  # also `x<0 or x>1` for a union
        return _same_set(gold.parts, answer.parts)
    if kinds[0] == kinds[1] and gold.value == answer.value:  # sequences with the same brackets, matrices of one shape
        return _all_same(gold.parts, answer.parts)
    if set(kinds) == {"list", "sequence"} and "()" in (gold.value, answer.value):  # brackets forgotten
        return _all_same(gold.parts, answer.parts)
    return False


def _all_same(gold: Sequence[Form], answer: Sequence[Form]) -> bool:
    return len(gold) == len(answer) and all(_same(*pair) for pair in zip(gold, answer, strict=True))


def _same_set(gold: Sequence[Form], answer: Sequence[Form]) -> bool:
    """Whether the members are the same; the answer may say one twice, unless the reference itself does."""
    left = list(answer)
    for one in gold:
        match = next((at for at, other in enumerate(left) if _same(one, other)), None)
        if match is None:
            return False
        del left[match]
    repeats = len({str(one) for one in gold}) < len(gold)
    return not left or (not repeats and all(any(_same(one, other) for one in gold) for other in left))


def _words(one: Form) -> str:
    """What may be the same as a text: another one, or letters that look like a product."""
    if one.kind == "text":
        return str(one.value)
    return plain_text(str(one.value)) if one.kind == "expression" and str(one.value).isalpha() else ""


def _same_number(gold: Form, answer: Form) -> bool:
    """50 % is 50 where percent are expected, and 0.5 as a number; a value may be rounded to `PLACES` and more."""
    right, actual = _meant(gold), _meant(answer)
    if gold.kind == answer.kind == "percent":
        right, actual = right[:1], actual[:1]
    return any(abs(one - other) <= _tolerance(answer) for one in right for other in actual)


def _meant(number: Form) -> tuple[Fraction, ...]:
    assert isinstance(number.value, Fraction)
    return (number.value, number.value / 100) if number.kind == "percent" else (number.value,)


def _tolerance(answer: Form) -> Fraction:
    """How far a value may be from the right one: by half of its last place where it has `PLACES` and more."""
    return Fraction(1, 2 * 10**answer.places) if answer.places >= PLACES else Fraction(0)


def _same_relation(gold: Form, answer: Form) -> bool | None:
    """Whether one is the other times a number: `y=2x+1` and `4x-2y+2=0`. An inequality keeps its direction."""
    right, actual = _sides(gold), _sides(answer)
    if right is None or actual is None or right[0] != actual[0]:
        return False
    positive = right[0] not in ("=", r"\neq")
    return _computed(lambda values: values.proportional(right[1], actual[1], positive=positive))


def _sides(one: Form) -> tuple[str, tuple[str | Fraction, str | Fraction]] | None:
    """The sign and the two sides of a relation between two expressions."""
    sides = (Form("expression", one.value), *one.parts) if one.kind == "assignment" else one.parts
    if one.kind not in ("assignment", "relation") or len(sides) != 2 or any(side.kind not in VALUES for side in sides):
        return None
    return str(one.value) if one.kind == "relation" else "=", (sides[0].value, sides[1].value)


def _computed(compare: Callable[[ModuleType], bool | None]) -> bool | None:
    """A comparison of values; None where sympy cannot make it, for which each of its parts has errors of its own."""
    from palestra.tasks.verify.latex import values  # takes a second or two, so only where it is needed

    try:
        return compare(values)
    except Exception:
        log.debug("two answers could not be compared", exc_info=True)
        return None
