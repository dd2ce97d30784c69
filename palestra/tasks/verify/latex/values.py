"""Whether two expressions in LaTeX have the same value, by sympy and math-verify.

Constants are compared by digits, and exactly where they are rational. Formulas are compared at sampled points, which is
faster than to simplify, and two that differ differ there. What has no value (an undefined function) is left to
math-verify. Nothing here ends by itself: a worker that takes too long is killed.

Importing sympy takes a second or two, so `compare` imports this module only when it must.
"""

import logging
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify

DIGITS, AGREEING = 60, 45  # digits that are computed, and that must agree
POINTS, FEWEST = 6, 2  # at which formulas are compared, and how many of them must have a value
UNIT = "i"  # the imaginary one, which the parser takes for a variable

Value = str | Fraction
"""An expression in LaTeX, or a number."""

# It warns that its own timeout is off, which rests on signals.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_AS_WRITTEN = ConversionConfig(lowercase_symbols=False)
_MIXED = re.compile(r"(?<![\d.}])(\d+)\\frac\{(\d+)\}\{(\d+)\}")
_TIMES = re.compile(r"(?<=[\d)])\(")
_DECIMAL = re.compile(r"\d*\.\d+")


def equal(gold: Value, answer: Value, tolerance: Fraction) -> bool | None:
    """Whether both have the same value; constants may differ by as much as the tolerance. None: undecided."""
    first, second = _expression(gold), _expression(answer)
    if not (isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr)):
        return _verified(first, second) if type(first) is type(second) else False
    if not _names(first, second):
        return _equal_constants(first, second, tolerance)
    agree = [_agree(*pair) for pair in _values(first, second)]
    return all(agree) if len(agree) >= FEWEST else _verified(first, second)


def proportional(gold: tuple[Value, Value], answer: tuple[Value, Value], *, positive: bool) -> bool | None:
    """Whether left side less right side of one is that of the other times a number, which must be `positive`."""
    first, second = _difference(*gold), _difference(*answer)
    ratios = [one / other for one, other in _values(first, second) if abs(other) > 0]
    if len(ratios) < FEWEST:
        return None
    constant = all(_agree(ratios[0], ratio) for ratio in ratios) and abs(ratios[0]) > 0
    return bool(constant and (not positive or ratios[0] > 0))


def _expression(value: Value) -> Any:
    return sympy.Rational(value.numerator, value.denominator) if isinstance(value, Fraction) else _parsed(value)


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> Any:
    """The sympy object of an expression, with decimals as fractions; raises where it is none."""
    exact = _DECIMAL.sub(lambda match: _fraction(Fraction(match[0])), latex.replace("%", ""))
    exact = _MIXED.sub(lambda match: _fraction(int(match[1]) + Fraction(int(match[2]), int(match[3]))), exact)
    exact = _TIMES.sub(r"\\cdot(", exact)  # else the parser reads 2(3) as two and three
    return latex2sympy(exact, is_real=False, convert_degrees=False, conversion_config=_AS_WRITTEN)


def _fraction(value: Fraction) -> str:
    return rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


def _difference(left: Value, right: Value) -> Any:
    return sympy.Add(_expression(left), sympy.Mul(-1, _expression(right), evaluate=False), evaluate=False)


def _equal_constants(first: Any, second: Any, tolerance: Fraction) -> bool:
    one, other = _at(first, {}), _at(second, {})
    if not all(value.is_number for value in (one, other)):
        return _verified(first, second)
    if any(value.has(sympy.nan, sympy.zoo) for value in (one, other)):
        return False
    if not (one.is_finite and other.is_finite):
        return bool(one == other)
    if not _agree(one, other):
        near = tolerance and abs(one - other) <= _expression(tolerance)
        return bool(near) or (_nothing(one, other) and sympy.simplify(first - second) == 0)
    # Whole numbers can have more digits than were computed.
    exact = first.doit(), second.doit()
    return bool(exact[0] == exact[1]) if all(value.is_Rational for value in exact) else True


def _agree(one: Any, other: Any) -> bool:
    size = max(abs(one), abs(other))
    return bool(size == 0 or abs(one - other) <= size * sympy.Float(10, DIGITS) ** -AGREEING)


def _nothing(one: Any, other: Any) -> bool:
    """Whether both are so small that they may be what is left of a difference of equals."""
    return bool(max(abs(one), abs(other)) < sympy.Float(10, DIGITS) ** -AGREEING)


def _names(*formulas: Any) -> list[str]:
    return sorted({symbol.name for formula in formulas for symbol in formula.free_symbols} - {UNIT})


def _at(formula: Any, point: dict[str, Any]) -> Any:
    """The value of a formula, its variables put in."""
    put_in = {symbol: sympy.I if symbol.name == UNIT else point[symbol.name] for symbol in formula.free_symbols}
    return formula.evalf(DIGITS, subs=put_in)


def _values(first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    """The values of two formulas where both have one: at positive points, then at any; real ones, unless i is there."""
    names = _names(first, second)
    real = not any(symbol.name == UNIT for formula in (first, second) for symbol in formula.free_symbols)
    for number in range(POINTS):
        rng = random.Random(f"{number} {names}")
        signs = (1,) if 2 * number < POINTS else (-1, 1)
        # No small fractions: at those, formulas that people write are 0 or meet by chance.
        point = {n: sympy.Rational(rng.choice(signs) * rng.randint(50, 500), rng.choice((101, 103))) for n in names}
        one, other = _at(first, point), _at(second, point)
        known = all(value.is_number and value.is_finite and (value.is_real or not real) for value in (one, other))
        if known and not _nothing(one, other):
            yield one, other


def _verified(gold: Any, answer: Any) -> bool:
    return bool(verify(gold, answer, timeout_seconds=0))
