"""Numbers in texts: what a string is worth, and GSM8K's rules for the final answer.

Values are fractions, so that 0.5, 1/2 and 2/4 are one number, and no rounding decides what is right.
"""

import re
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction

LONGEST = 400  # characters: longer numbers are not answers, and are slow to parse
LARGEST_POWER = 400  # of ten, for the same reason

# A minus is a sign where nothing stands before it that it could be subtracted from.
_SIGN = r"(?:(?<![\w.)\]}%])-)?"
_CURRENCY = r"[$€£¥]?"
# "++" gives nothing back, which keeps the search linear in the length of any text.
_WHOLE = r"(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d++)?|\.\d++)"
_LATEX, _SLASHED = r"\\frac\{-?\d++\}\{\d++\}", r"\d++ ?/ ?\d++(?!\.\d)"
# The first that fits at a place counts, so the longest forms come first.
NUMBER = (
    rf"{_CURRENCY}{_SIGN}{_CURRENCY}"
    rf"(?:{_WHOLE}(?: {_SLASHED}| ?{_LATEX})|{_SLASHED}|{_LATEX}|{_DECIMAL}(?:[eE][-+]?\d{{1,3}}(?![\w.]))?)%?"
)
# Digits with letters on both sides are part of a name.
_NUMBERS = re.compile(rf"(?<!\d)(?<![A-Za-z](?=\d++[A-Za-z])){NUMBER}")
# What a text denies is not its answer.
_DENIED = re.compile(rf"(?:\b(?:can)?not|n['’]t)\s++(?:(?:be|equal|to)\s++)*[*$]*{NUMBER}", re.IGNORECASE)
# Of `9 * 2 = 18` the answer is what comes last.
_MARKS = r"\s*+[*$]*+\s?+"
_WORKED = rf"(?:(?:[-+*/×÷(),%$€£¥ \d]|\.(?=\d))*+={_MARKS}(?={NUMBER}))*+"
_STATED = re.compile(rf"(?:####|\b[Tt]he (?:final )?answer is:?){_MARKS}{_WORKED}({NUMBER})")

_MIXED = re.compile(rf"(?:({_WHOLE})(?: |(?=\\)))?(?:\\frac\{{(\d+)\}}\{{(\d+)\}}|(\d+) ?/ ?(\d+))")
_NEGATIVE_ABOVE = re.compile(r"\\frac\{-(\d+)\}")
_SCIENTIFIC = re.compile(
    rf"({_DECIMAL})(?:[eE]([-+]?\d{{1,4}})|(?:\*|\\cdot|\\times|×|x)10(?:\^|\*\*)\{{?(-?\d{{1,4}})\}}?)?"
)
_AROUND = re.compile(r"(?P<sign>[-+]?) ?[$€£¥]? ?(?P<second>-?)(?P<number>.*?) ?(?P<percent>%|percent)?")
_COUNTED = re.compile(r"(?P<number>.*\d\}?) (?P<words>[A-Za-z]+(?: [A-Za-z]+)*)\.?(?:\^\d)?")
_THOUSANDS = re.compile(r"(?<=\d)(?: ?, ?\\!| ?\{, ?\}) ?(?=\d{3})")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_UNITS = frozenset(["cm", "mm", "km", "ft", "in", "kg", "lb", "lbs", "oz", "sq", "hr", "hrs", "mi", "yd", "gm"])
_NO_UNITS = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "and", "percent"])

_SAME = str.maketrans({"−": "-", "–": "-", "‐": "-", "‑": "-", "－": "-", "﹣": "-", "％": "%", "＄": "$"})


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: Fraction
    percent: bool = False
    """Whether a percent sign followed, which leaves the value as it is."""
    places: int = field(default=0, compare=False)
    """Decimal places that were written."""


def parse_number(text: str) -> Number | None:
    """The number that a text is, with what may stand around one: currency, thousands, percent, a unit; else None."""
    if len(text) > LONGEST:
        return None
    plain = " ".join(tidy(text).split()).rstrip(".")
    if _SPACED.fullmatch(plain):
        plain = plain.replace(" ", "")
    if (counted := _COUNTED.fullmatch(plain)) is not None and _are_units(counted["words"]):
        plain = counted["number"]
    around = _AROUND.fullmatch(plain)
    if around is None or (around["second"] and around["sign"]):
        return None
    number, negative = around["number"], "-" in (around["sign"], around["second"])
    number, signs = _NEGATIVE_ABOVE.subn(r"\\frac{\1}", number)
    worth = _worth(number) if not (signs and number[0] != "\\") else None
    if worth is None:
        return None
    value = -worth.value if negative != bool(signs) else worth.value
    return Number(value, around["percent"] is not None, worth.places)


def last_number(text: str) -> str | None:
    """The last number in a text that it does not deny: none in "not 18"."""
    last = deque(_NUMBERS.finditer(_DENIED.sub("", tidy(text))), maxlen=1)
    return last[0][0] if last else None


def stated_number(text: str) -> str | None:
    """The number after the last `####` or `The answer is`."""
    stated = _STATED.findall(tidy(text))
    return stated[-1] if stated else None


def tidy(text: str) -> str:
    """One sign for each thing: minus, thousands, fractions, currency and percent as LaTeX writes them."""
    text = _THOUSANDS.sub("", text.translate(_SAME)).replace(r"\$", "$").replace(r"\%", "%")
    return re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)


def _worth(text: str) -> Number | None:
    """The value of a number without sign."""
    if (match := _MIXED.fullmatch(text)) is not None:
        whole, up, down = match[1] or "0", match[2] or match[4], match[3] or match[5]
        return Number(int(whole.replace(",", "")) + Fraction(int(up), int(down))) if int(down) else None
    match = _SCIENTIFIC.fullmatch(re.sub(r" ?(\*|\\cdot|\\times|×|x) ?(?=10)", r"\1", text))
    if match is None:
        return None
    decimal, power = match[1].replace(",", ""), int(match[2] or match[3] or 0)
    if abs(power) > LARGEST_POWER:
        return None
    return Number(Fraction(decimal) * Fraction(10) ** power, places=len(decimal.partition(".")[2]))


def _are_units(words: str) -> bool:
    """Whether words after a number are what is counted, and not a product of variables or a function."""
    return all(name in _UNITS or (len(name) > 2 and name not in _NO_UNITS) for name in words.lower().split())
