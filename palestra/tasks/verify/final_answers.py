r"""Verdicts on the final answer of a text: a number, mathematics or words, extracted strictly or flexibly.

A verdict's parts hold both readings; the score follows the one that is asked for.
"""

import re
from collections.abc import Callable
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
Comparison = Literal["number", "math", "words"]

_SENTENCE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}\s+\S")
_FORMULA = re.compile(r"\\(?:sqrt|frac|binom|pi|log|ln|exp|sin|cos|tan)(?![a-zA-Z])|\^|\d!")
_HEDGE = re.compile(r"\b(?:or|nor|not)\b|n['’]t\b", re.IGNORECASE)


def verify_number(reference: str, text: str, extraction: Extraction, question: str = "") -> Verdict:
    """Whether a text ends with a number. Fast whatever the text is, so it needs no process of its own."""
    text = settled(text)
    boxed = last_boxed(text)
    strict = boxed if boxed is not None and _computes(form(boxed)) else stated_number(text)
    return _compared(strict, strict or last_number(text), extraction, number_of, number_of(reference))


def verify_math(reference: str, text: str, extraction: Extraction, question: str = "") -> Verdict:
    """Whether a text ends with a mathematical answer that is more than a formula of the question.

    It may never return: call it in a process that can be killed.
    """
    strict = final_answer(text, flexible=False)
    answer = strict or final_answer(text)
    same = None if answer is None else same_answer(reference, answer)
    worded = answer is not None and _is_sentence(answer) and answer.strip() != question.strip()
    if not same and worded and (number := number_in(answer or "")) is not None:
        answer, same = number, same_answer(reference, number)
    if same and answer is not None and echoes(question, reference, answer):
        same = False
    parts = {"strict": float(bool(same) and strict is not None), "flexible": float(bool(same))}
    verdict = _verdict(answer if strict is not None or extraction == "flexible" else None, parts, extraction)
    if answer is not None and same is None:
        return replace(verdict, note=f"{verdict.note} (cannot be compared with the reference)")
    return verdict


def verify_words(reference: str, text: str, extraction: Extraction, question: str = "") -> Verdict:
    """Whether a text ends with certain words, case and punctuation aside; flexible takes the last line."""
    strict = final_answer(text, flexible=False)
    lines = [line for line in settled(text).splitlines() if line.strip()]
    return _compared(strict, strict or (lines[-1] if lines else None), extraction, _words, plain_text(reference))


VERIFIERS = {"number": verify_number, "math": verify_math, "words": verify_words}
"""Of the reference, the completion's text, the extraction and the question."""


def number_of(text: str) -> Fraction | None:
    r"""The number that a text is, also as `x = 18` or `18\text{ cm}`; percent count as they are written."""
    read = form(text)
    while read.kind == "assignment":
        read = read.parts[0]
    numbers = _numbers(read) if read.kind in ("number", "percent", "chain") else set()
    return numbers.pop() if len(numbers) == 1 else None


def _is_sentence(answer: str) -> bool:
    """Whether one number can be the answer in words: not where they name several, or deny it."""
    return _SENTENCE.search(answer) is not None and _HEDGE.search(answer) is None and len(_numbers(form(answer))) < 2


def _computes(read: Form) -> bool:
    r"""Whether it is numbers or, as \sqrt{18} or 2^{18}, is made of some: then none of them is the answer."""
    value = read.value
    return bool(_numbers(read)) or (isinstance(value, str) and _FORMULA.search(value) is not None)


def _numbers(read: Form) -> set[Fraction]:
    """The numbers that a form or its parts are."""
    return {read.value} if isinstance(read.value, Fraction) else set().union(*map(_numbers, read.parts))


def _words(text: str) -> str:
    return plain_text(re.sub(r"\\(?:text|mbox|mathrm)[a-z]*\{([^{}]*)\}", r"\1", text))


def _compared(
    strict: str | None, flexible: str | None, extraction: Extraction, read: Callable[[str], object], right: object
) -> Verdict:
    answers = {"strict": strict, "flexible": flexible}
    parts = {name: float(answer is not None and read(answer) == right) for name, answer in answers.items()}
    return _verdict(answers[extraction], parts, extraction)


def _verdict(answer: str | None, parts: dict[str, float], extraction: Extraction) -> Verdict:
    if answer is None:
        return Verdict(0.0, Status.UNPARSABLE, parts, note="no answer")
    score = parts[extraction]
    return Verdict(score, Status.CORRECT if score else Status.WRONG, parts, note=answer[:200])
