"""The calculator tool: exact arithmetic on an expression, which no expression can make slow or large."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from palestra.errors import PalestraError

LONGEST = 200
"""Characters of an expression."""
BITS = 1024
"""Of the numerator and the denominator of every number on the way: up to about 1e308."""
UNDERSTOOD = "only numbers, parentheses and + - * / // % ** are understood"
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})

BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class NotCalculable(PalestraError):
    """An expression without a value here; the message is for the model that wrote it."""


def calculate(expression: str) -> str:
    """The value of numbers, parentheses and + - * / // % ** (or ^): `7/2` is `3.5`, `0.1+0.2` is `0.3`.

    Integers are exact, other numbers are shown to 12 digits. Thousands may be separated by commas.
    """
    text = expression.strip().translate(SIGNS).replace("^", "**")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    if len(text) > LONGEST:
        raise NotCalculable(f"the expression has {len(text)} characters, expected at most {LONGEST}")
    if not re.fullmatch(r"[-+*/%() .\deE_]+", text, re.ASCII):
        raise NotCalculable(UNDERSTOOD)
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two: of too many parentheses
        raise NotCalculable("not an arithmetic expression") from error
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _number(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            try:
                return _small(Fraction(BINARY[type(op)](_value(left), _value(right))))
            except ZeroDivisionError as error:
                raise NotCalculable("division by zero") from error
    raise NotCalculable(UNDERSTOOD)


def _number(number: int | float) -> Fraction:
    if abs(number) == float("inf"):
        raise NotCalculable("a number is too large or too small")
    # As it is written: 0.1 is a tenth.
    return _small(Fraction(repr(number)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise NotCalculable("division by zero")
    if exponent.denominator == 1:
        # The size is known before the work is done.
        if (
            max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > 2 * BITS
            and abs(base) != 1
        ):
            raise NotCalculable("a number is too large or too small")
        return _small(Fraction(base**exponent.numerator))
    if base < 0:
        raise NotCalculable("a root of a negative number")
    try:
        return _number(float(base) ** float(exponent))
    except OverflowError as error:
        raise NotCalculable("a number is too large or too small") from error


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS:
        raise NotCalculable("a number is too large or too small")
    return value
