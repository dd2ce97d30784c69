"""Judging of the answer that a text ends with: a number, mathematics or words, by strict and by flexible rules.

A verdict's parts say what each rule found; the score follows the one that was asked for.
"""

import re
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from palestra.tasks.task import Status, Verdict
from palestra.tasks.verify.latex.compare import echoes, same_answer
from palestra.tasks.verify.latex.extract import final_answer, last_boxed, number_in, settled
from palestra.tasks.verify.latex.normalize import Form, form, plain_text
from palestra.tasks.verify.numbers import last_number, stated_number

Extraction = Literal["strict", "flexible"]
"""Strict takes what is marked as the answer: boxed, after `####` or "the answer is"; flexible, else, what is last."""


_SENTENCE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}\s+\S")
_HEDGE = re.compile(r"\b(?:or|nor|not)\b|n['’]t\b", re.IGNORECASE)


def judge_number(reference: str, text: str, extraction: Extraction) -> Verdict:
    """Whether a text ends with a number. Quick whatever the text is, so it needs no process of its own."""
    text = settled(text)
    boxed = last_boxed(text)
    strict = boxed if boxed is not None and _numbers(form(boxed)) else stated_number(text)
    found = {"strict": strict, "flexible": strict or last_number(text)}
    right = number_of(reference)
    parts = {name: float(said is not None and number_of(said) == right) for name, said in found.items()}
    return _verdict(found[extraction], parts, extraction)


def judge_math(reference: str, text: str, extraction: Extraction, question: str = "") -> Verdict:
    """Whether a text ends with a mathematical answer that is more than a formula of the question.

    It may take for ever, and is for a process that can be killed.
    """
    strict = final_answer(text, flexible=False)
    said = strict or final_answer(text)
    same = None if said is None else same_answer(reference, said)
    worded = said is not None and _is_sentence(said) and said.strip() != question.strip()
    if not same and worded and (number := number_in(said or "")) is not None:
        said, same = number, same_answer(reference, number)
    if same and said is not None and echoes(question, reference, said):
        same = False
    parts = {"strict": float(bool(same) and strict is not None), "flexible": float(bool(same))}
    verdict = _verdict(said if strict is not None or extraction == "flexible" else None, parts, extraction)
    if said is not None and same is None:
        return replace(verdict, note=f"{verdict.note} (nobody can tell whether it is the reference)")
    return verdict


def judge_words(reference: str, text: str, extraction: Extraction) -> Verdict:
    """Whether a text ends with certain words, case and punctuation aside; flexible takes the last line."""
    strict = final_answer(text, flexible=False)
    lines = [line for line in settled(text).splitlines() if line.strip()]
    found = {"strict": strict, "flexible": strict or (lines[-1] if lines else None)}
    right = plain_text(reference)
    parts = {name: float(said is not None and _words(said) == right) for name, said in found.items()}
    return _verdict(found[extraction], parts, extraction)


def number_of(text: str) -> Fraction | None:
    r"""The number that a text is, also as `x = 18` or `18\text{ cm}`; percent count as they are written."""
    read = form(text)
    while read.kind == "assignment":
        read = read.parts[0]
    numbers = _numbers(read) if read.kind in ("number", "percent", "chain") else set()
    return numbers.pop() if len(numbers) == 1 else None


def _is_sentence(said: str) -> bool:
    """Whether one number can be the answer in words: not where they name several, or deny it."""
    return _SENTENCE.search(said) is not None and _HEDGE.search(said) is None and len(_numbers(form(said))) < 2


def _numbers(read: Form) -> set[Fraction]:
    """The numbers that a form or its parts are."""
    return {read.value} if isinstance(read.value, Fraction) else set().union(*map(_numbers, read.parts))


def _words(text: str) -> str:
    return plain_text(re.sub(r"\\(?:text|mbox|mathrm)[a-z]*\{([^{}]*)\}", r"\1", text))


def _verdict(said: str | None, parts: dict[str, float], extraction: Extraction) -> Verdict:
    if said is None:
        return Verdict(0.0, Status.UNPARSABLE, parts, note="no answer")
    score = parts[extraction]
    return Verdict(score, Status.CORRECT if score else Status.WRONG, parts, note=said[:200])
