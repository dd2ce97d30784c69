r"""The normal form of a mathematical answer: what it is made of, without how it was written.

Two answers with the same normal form are the same: `\dfrac12`, `\frac{1}{2}` and `0.5`; `\{1,2\}` and `2, 1`;
`x \in [0,\infty)` and `0 \le x`. What is left of an expression in the end is a string, for others to look into.
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Literal
from unicodedata import category, normalize

from palestra.tasks.verify.numbers import parse_number, tidy

Kind = Literal[
    "number", "percent", "text", "digits", "expression", "list", "sequence", "union", "matrix", "assignment",
    "relation", "chain",
]  # fmt: skip

LONGEST, DEEPEST = 1000, 30  # characters and brackets in brackets, beyond which an answer is only compared as text

_SIGNS = str.maketrans({
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "×": r"\cdot ", "·": r"\cdot ",
    "÷": "/", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "√": r"\sqrt ", "°": r"^\circ ", "²": "^2", "³": "^3",
    "⁄": "/", "½": r"\frac{1}{2}", "θ": r"\theta ", "∅": r"\emptyset ", "…": r"\ldots ", "≈": r"\approx ",
})  # fmt: skip
_COMMAND = re.compile(r"\\q?quad|\\[a-zA-Z]+|\\.", re.DOTALL)
_SAME = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\le": r"\leq", r"\ge": r"\geq", r"\lt": "<",
    r"\gt": ">", r"\leqslant": r"\leq", r"\geqslant": r"\geq", r"\ne": r"\neq", r"\times": r"\cdot", r"\ast": r"\cdot",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\varnothing": r"\emptyset",
    r"\degree": r"^\circ", r"\mbox": r"\text", r"\textrm": r"\text", r"\textbf": r"\text", r"\textit": r"\text",
    r"\textnormal": r"\text", r"\mathrm": r"\text", r"\hbox": r"\text", r"\textup": r"\text", r"\textsf": r"\text",
    r"\langle": "(", r"\rangle": ")", r"\colon": ":", r"\div": "/", r"\R": "(-\\infty,\\infty)",
    **dict.fromkeys(
        [r"\left", r"\right", r"\big", r"\Big", r"\bigg", r"\Bigg", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr", r"\!",
         r"\mathbf", r"\boldsymbol", r"\displaystyle", r"\textstyle", r"\limits", r"\$", r"\(", r"\)", r"\[", r"\]"],
        "",
    ),
    **dict.fromkeys([r"\,", r"\;", r"\:", r"\>", r"\ ", r"\quad", r"\qquad", r"\hfill"], " "),
}  # fmt: skip
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPEN, _CLOSE = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")
_BELOW = {"<": "(", r"\leq": "["}  # with what an interval begins that lies above
_FLIPPED = {">": "<", r"\geq": r"\leq"}
_GREEK = r"\\(?:alpha|beta|gamma|theta|phi|lambda|mu|omega)"
_VARIABLE = re.compile(rf"(?:[A-Za-z]|[A-Z]{{2,3}}|{_GREEK})(?:_(?:\w|\{{\w+\}}))?'?(?:\([a-z]\))?")
_NAME = _VARIABLE.pattern
_RATIO_OF_NAMES = re.compile(rf"\|{_NAME}\||\\frac\{{{_NAME}\}}\{{{_NAME}\}}|{_NAME}:{_NAME}")
_TUPLE_OF_NAMES = re.compile(rf"\({_NAME}(?:[,;]{_NAME})+\)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
_ASCII = {">=": r"\geq ", "<=": r"\leq ", "!=": r"\neq "}
# Data that was escaped twice; a matrix has rows there, but no row begins with the bare name of a command.
_TWICE = re.compile(r"(?<!\\)\\\\(?=(?:left|right|[dt]?frac|sqrt|text|[lg]eq?|pi|infty|cup|in|cdot|times)(?![a-zA-Z]))")
_NO_NAMES = re.compile(r"\\(?:frac|sqrt|cdot|pi)(?![a-zA-Z])")
_SUCH_THAT = re.compile(r"\\\{[a-z](?::|\||\\mid)(.*)\\\}")
_CLOCK = re.compile(r"(\d{1,2}(?::\d\d){0,2})([ap])\.?m\.?", re.IGNORECASE)
_RATIO = re.compile(r"\d+(?::\d+)+")
_DIGITS = re.compile(r"(-?[0-9A-Z]*\d[0-9A-Z]*(?:\.[0-9A-Z]+)?)_\{?(\d+)\}?")
_ENVIRONMENT = r"(?:[pbvBV]|small)?(?:matrix|array)"
_MATRIX = re.compile(rf"\\begin\{{{_ENVIRONMENT}\}}(?:\{{[lcr|]*\}})?(.*)\\end\{{{_ENVIRONMENT}\}}", re.DOTALL)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_UNIT = re.compile(r"\\text\{[^{}]*\}(?:\^\{\d\})?")
_JOINED = re.compile(r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<=[\s,)\d])(?:and|or)(?=[\s(\d]))\s*")
_WORDS = re.compile(r"[A-Za-z][A-Za-z \-'.]*")
_DEGREES = re.compile(r"([\d.]*)\s*\^\s*\{?\s*\\circ\s*\}?")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_FUNCTION = re.compile(r"(?<![A-Za-z\\])(arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi)(?![A-Za-z])")


@dataclass(frozen=True)
class Form:
    """A normal form."""

    kind: Kind
    value: str | Fraction = ""
    """The number; a text without case and spaces; brackets; a name; a relation; the shape of a matrix."""
    parts: tuple["Form", ...] = ()
    places: int = field(default=0, compare=False)
    """Decimal places that a number was written with."""

    def __str__(self) -> str:
        """The same for all that have the same normal form."""
        parts = [str(part) for part in self.parts]
        inside = ", ".join(sorted(parts) if self.kind in ("list", "union") else parts)
        return f"{self.kind} {self.value}" + (f" ({inside})" if parts else "")


@lru_cache(maxsize=4096)
def form(answer: str) -> Form:
    """The normal form of an answer, in LaTeX or as people type."""
    depths = accumulate((sign in "([{") - (sign in ")]}") for sign in answer)
    if len(answer) > LONGEST or max(depths, default=0) > DEEPEST:
        return Form("text", answer)
    return _number(answer) or _read(cleaned(answer))


def plain_text(text: str) -> str:
    """Letters with their marks, digits and colons, in small letters."""
    composed = normalize("NFC", text.lower())
    return "".join(sign for sign in composed if sign.isalnum() or sign == ":" or category(sign)[0] == "M")


def cleaned(answer: str) -> str:
    """One way to write each thing, and no spaces but between words or numbers."""
    text = tidy(_TWICE.sub(r"\\", answer.strip().strip("*").translate(_SIGNS))).replace(r"\mathbb{R}", r"\R")
    text = re.sub(r"\\(?:mathrm|text|operatorname)\{([ei])\}", r"\1", _REPEATING.sub(_repeated, text))
    text = re.sub("[<>!]=", lambda sign: _ASCII[sign[0]], text)
    text = _COMMAND.sub(lambda command: _SAME.get(command[0], command[0]), text)
    text = text.replace("$", "").replace("~", " ").replace("**", "^").replace("*", r"\cdot ").replace("\n", " ")
    text = _FUNCTION.sub(r"\\\1", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = _with_braces(re.sub(r"\\phantom\s*(?:\{[^{}]*\}|\S)", "", text))
    text = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}" if _TRIGONOMETRIC.search(text) else r"\1", text)
    text = re.sub(r"([\^_])\s*(-?\d+|[A-Za-z])", r"\1{\2}", text)
    text = re.sub(r",\s+", ";", _JOINED.sub(", ", text))  # no thousands: those have no space
    text = re.sub(r"(?<=\d)\s+(?=\d)|(?<=[A-Za-z])\s+(?=[A-Za-z])", "\0", text.strip().rstrip(".,;:"))
    return re.sub(r"\s+", "", text).replace("\0", " ")


def _with_braces(text: str) -> str:
    r"""Arguments of fractions and roots in braces: `\frac12`, `\frac\pi 2`, `\sqrt3`."""
    match = re.search(r"\\(frac|sqrt)(?![a-zA-Z])", text)
    if match is None:
        return text
    at, arguments = match.end(), ""
    if match[1] == "sqrt" and (root := re.compile(r"\s*\[[^\]]*\]").match(text, at)) is not None:
        arguments, at = root[0].strip(), root.end()
    for _ in range(2 if match[1] == "frac" else 1):
        argument, at = _argument(text, at)
        arguments += f"{{{_with_braces(argument)}}}"
    return text[: match.end()] + arguments + _with_braces(text[at:])


def _argument(text: str, at: int) -> tuple[str, int]:
    """The next argument of a command, without its braces, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    tokens = list(_TOKEN.finditer(text, at))
    if not tokens or tokens[0][0] != "{":
        return (tokens[0][0], tokens[0].end()) if tokens else ("", at)
    depth = 0
    for token in tokens:
        depth += (token[0] == "{") - (token[0] == "}")
        if depth == 0:
            return text[at + 1 : token.start()], token.end()
    return text[at + 1 :], len(text)


def _read(text: str) -> Form:
    """The form of a text that is cleaned."""
    near = [part for part in _split(text, (r"\approx",))[0] if part]
    text = next((part for part in near if not _VARIABLE.fullmatch(part)), text)
    if (number := _number(text)) is not None:
        return number
    if "matrix}" in text or "array}" in text:
        if (matrix := _MATRIX.fullmatch(text)) is not None:
            return _matrix(matrix[1])
    elif r"\text{" in text and (words := _words(text)) is not None:
        return words
    if (bare := _UNIT.sub("", text)) not in ("", text):
        return _read(bare)
    text = _SUCH_THAT.sub(r"\1", text)
    for read in (_list, _equality, _inequality, _union, _bracketed):
        if (structure := read(text)) is not None:
            return structure
    return _atom(text)


def _number(text: str) -> Form | None:
    number = parse_number(text)
    if number is None:
        return None
    return Form("percent" if number.percent else "number", number.value, places=number.places)


def _words(text: str) -> Form | None:
    """Words, where the texts in a formula are not units of what else there is."""
    rest = _UNIT.sub("", text)
    whole = _TEXT.sub(r"\1", text)
    if (clock := _CLOCK.fullmatch(whole.replace(" ", "").replace("{:}", ":"))) is not None:
        return Form("text", plain_text(clock[0]))
    if re.search(r"\d|\\[a-z]|[a-z]", rest) and not _DIGITS.fullmatch(whole):
        return None
    if re.fullmatch(r"[A-Z](?:[,;][A-Z])+", whole):
        return _list(whole)
    return _number(whole) or _digits(whole) or Form("text", plain_text(whole))


def _digits(text: str) -> Form | None:
    match = _DIGITS.fullmatch(text)
    return None if match is None else Form("digits", f"{match[1]}_{match[2]}")


def _list(text: str) -> Form | None:
    parts = [part for part in _split(text, (",", ";"))[0] if part]
    return _set(parts) if len(parts) > 1 else None


def _set(parts: list[str]) -> Form:
    r"""A list, in which `1 \pm x` counts as the two that it is."""
    read = [one for part in map(_read, parts) for one in (part.parts if part.kind == "list" else (part,))]
    return Form("list", "", tuple(read))


def _equality(text: str) -> Form | None:
    """Assignments keep their name; of a chain, what it begins with and what it comes to."""
    for sign in (r"\in", "="):
        parts = _split(text, (sign,))[0]
        if len(parts) > 1 and (sides := [part for part in parts if part]):
            first, last = sides[0], sides[-1]
            if len(sides) == 1 or _TUPLE_OF_NAMES.fullmatch(first):
                return _read(last)
            if _VARIABLE.fullmatch(first) or _RATIO_OF_NAMES.fullmatch(first):
                return Form("assignment", first, (_chain(sides[1:]),))
            if _VARIABLE.fullmatch(last):
                return Form("assignment", last, (_chain(sides[:-1]),))
            if not any(map(_has_names, (first, last))):
                return _chain(sides)
            return Form("relation", "=", (_read(first), _read(last)))
    return None


def _chain(parts: list[str]) -> Form:
    """What equal parts come to; the constants among them all count, so that `17=18` is neither."""
    read = [_read(part) for part in parts[:-1] if not _has_names(part)] + [_read(parts[-1])]
    return Form("chain", "", tuple(read)) if len(read) > 1 else read[0]


def _has_names(text: str) -> bool:
    return re.search(r"[A-Za-z]", _NO_NAMES.sub("", text)) is not None


def _repeated(decimal: re.Match[str]) -> str:
    r"""The fraction that `0.1\overline{6}` is."""
    whole, once, again = decimal.groups()
    up = int(whole + once + again) - int((whole + once) or "0")
    return rf"\frac{{{up}}}{{{'9' * len(again) + '0' * len(once)}}}"


def _inequality(text: str) -> Form | None:
    r"""An interval where one variable is bounded: `x<5`, `2\leq x<5`; else the relation, the smaller side first."""
    parts, signs = _split(text, ("<", ">", r"\leq", r"\geq", r"\neq"))
    if not signs or not all(parts):
        return None
    if len({sign in _FLIPPED for sign in signs}) == 1 and signs[0] in _FLIPPED:
        parts, signs = parts[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    if r"\neq" not in signs and len(signs) < 3:
        if len(signs) == 1 and any(_VARIABLE.fullmatch(part.removeprefix("-")) for part in parts if part[0] == "-"):
            parts = [part[1:] if part[0] == "-" else f"-({part})" for part in parts[::-1]]
        if len(signs) == 1 and _VARIABLE.fullmatch(parts[0]):
            parts, signs = [r"-\infty", *parts], ["<", *signs]
        elif len(signs) == 1 and _VARIABLE.fullmatch(parts[1]):
            parts, signs = [*parts, r"\infty"], [*signs, "<"]
        if len(signs) == 2 and _VARIABLE.fullmatch(parts[1]) and set(signs) <= set(_BELOW):
            closing = ")" if signs[1] == "<" else "]"
            return Form("sequence", _BELOW[signs[0]] + closing, (_read(parts[0]), _read(parts[2])))
    return Form("relation", " ".join(signs), tuple(map(_read, parts)))


def _union(text: str) -> Form | None:
    parts, _ = _split(text, (r"\cup",))
    return Form("union", "", tuple(map(_read, parts))) if len(parts) > 1 and all(parts) else None


def _bracketed(text: str) -> Form | None:
    """What brackets hold that go around everything: a tuple, an interval, a set; or one thing, as it is."""
    tokens = _TOKEN.findall(text)
    depths = list(accumulate((token in _OPEN) - (token in _CLOSE) for token in tokens))
    if len(tokens) < 3 or tokens[0] not in _OPEN or depths[-1] != 0 or 0 in depths[:-1]:
        return None
    inside = "".join(tokens[1:-1])
    parts = [part for part in _split(inside, (",", ";"))[0] if part]
    if len(parts) < 2:
        return _read(inside) if inside else None
    if tokens[0] in ("{", r"\{"):
        return _set(parts)
    return Form("sequence", tokens[0] + tokens[-1], tuple(map(_read, parts)))


def _matrix(text: str) -> Form:
    rows = [row.split("&") for row in text.split(r"\\") if row.strip()]
    shape = "x".join(map(str, (len(rows), *sorted({len(row) for row in rows}))))
    return Form("matrix", shape, tuple(_read(cell) for row in rows for cell in row))


def _atom(text: str) -> Form:
    if (digits := _digits(text)) is not None:
        return digits
    words = _WORDS.fullmatch(text) and re.search(r"[A-Za-z]{3}", text)
    if words or re.fullmatch(r"[A-Z]", text) or _RATIO.fullmatch(text) or _CLOCK.fullmatch(text):
        return Form("text", plain_text(text))
    if r"\pm" in text or r"\mp" in text:
        both = [text.replace(r"\pm", plus).replace(r"\mp", minus) for plus, minus in (("+", "-"), ("-", "+"))]
        return Form("list", "", tuple(_read(one.removeprefix("+")) for one in both))
    return Form("expression", text)


def _split(text: str, separators: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The parts of a text between separators that no bracket encloses, and the separators."""
    parts, used, depth = [""], [], 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPEN) - (token in _CLOSE)
        if token in separators and depth == 0:
            parts.append("")
            used.append(token)
        else:
            parts[-1] += token
    return [part.strip() for part in parts], used
