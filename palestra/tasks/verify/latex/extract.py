r"""The final answer in a text: in a `\boxed`, after `####` or "the answer is", else the last formula or number."""

import re
from collections import deque

from palestra.tasks.verify.numbers import NUMBER, last_number, tidy

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*")
_STATED = re.compile(r"####|\banswer(?:\b[^.:\n]{0,60}?\bis\b(?! not\b):?|\s*:)", re.IGNORECASE)
# No formula holds what begins another one, which keeps the search linear in the length of any text.
_FORMULA = re.compile(
    r"\$\$((?:(?!\$\$).)++)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\(((?:(?!\\[()]).)++)\\\)|\\\[((?:(?!\\[\[\]]).)++)\\\]",
    re.DOTALL,
)
_JOIN = re.compile(r"(?:[\s,;$]|\\[()]|\\q?quad|\\text|[{}]|\band\b|\bor\b)*+")
_OR = re.compile(r"\s*(?:,\s*)?(?:or|and)\s+")
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
_NUMBER = re.compile(NUMBER)
_BARE, _BRACE = re.compile(r"\\[a-zA-Z]+|[^\s\\{}$]+"), re.compile(r"\\.|[{}]", re.DOTALL)
_THOUGHT_END = "</think>"


def last_boxed(text: str) -> str | None:
    r"""What the last whole `\boxed{…}` holds, braces and all; a box that is not closed is none.

    Boxes that only commas, "and" or "or" stand between are one answer with several members.
    """
    boxes = list(_BOX.finditer(text))
    closing = _closing_braces(text) if boxes else {}
    members: list[str] = []
    first = len(text)  # where the boxes that count begin
    for match in reversed(boxes):
        start = match.end()
        end = closing.get(start, -1) + 1
        if not end and not members and (bare := _BARE.match(text, start)) is not None:  # `\boxed 2`
            return bare[0].rstrip(".,;")
        if end and (not members or _JOIN.fullmatch(text, end, first)):
            members.append(text[start + 1 : end - 1])
            first = match.start()
        elif members and end <= first:
            break
    return ", ".join(dict.fromkeys(reversed(members))) if members else None


def stated_answer(text: str) -> str | None:
    """What follows the last `####`, "answer is" or "answer:", up to the end of its sentence."""
    last = deque(_STATED.finditer(text), maxlen=1)
    if not last:
        return None
    rest = text[last[0].end() :].lstrip(" \t*_:").lstrip()
    if (formula := _FORMULA.match(rest)) is not None:
        members = [_inside(formula)]
        while (joined := _OR.match(rest, formula.end())) and (formula := _FORMULA.match(rest, joined.end())):
            members.append(_inside(formula))
        return ", ".join(members)
    end = _SENTENCE_END.search(rest)
    answer = (rest if end is None else rest[: end.start()]).strip().strip("*_`\"'").strip()
    return answer or None


def final_answer(text: str, *, flexible: bool = True) -> str | None:
    """The answer that a text ends with: the last box, else what is stated.

    With `flexible`, where there is neither, the last formula or number, whichever comes last. What stands before the
    end of a thought (`</think>`) does not count.
    """
    text = settled(text)
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    stated = stated_answer(text)
    if stated is not None or not flexible:
        return stated
    last = deque(_FORMULA.finditer(text), maxlen=1)
    return last_number(text[last[0].end() :]) or _inside(last[0]) if last else last_number(text)


def formulas(text: str) -> list[str]:
    """The formulas in a text; all of it where none is marked."""
    return [_inside(formula) for formula in _FORMULA.finditer(text)] or [text]


def settled(text: str) -> str:
    """What follows the thoughts of a model that marks them."""
    return text.rpartition(_THOUGHT_END)[2]


def number_in(text: str) -> str | None:
    """The number that a sentence begins with, else the last one in it: `18 dollars in 3 days`, `that it takes 5`."""
    first = _NUMBER.match(tidy(text))
    return last_number(text) if first is None else first[0]


def cut(text: str, stops: tuple[str, ...]) -> str:
    """A text up to the first stop string: what follows is the next question."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace that opens is closed. `\\{` and `\\}` are signs, not braces."""
    closing, opened = {}, []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing
