"""lm-eval's own rules for the answers of GSM8K and MATH, so that scores can be equal to its; ours read more forms."""

import re
from typing import Literal

from palestra.tasks.task import Status, Verdict

Rule = Literal["lm_eval_strict", "lm_eval_flexible"]

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")


def verify_gsm8k(reference: str, text: str, rule: Rule) -> Verdict:
    """`exact_match` of its task gsm8k, after the filter `strict-match` or `flexible-extract`: strings, not numbers."""
    answers = {"lm_eval_strict": _STRICT.findall(text)[:1], "lm_eval_flexible": _FLEXIBLE.findall(text)[-1:]}
    right = _comparable(reference)
    parts = {name: float(any(_comparable(one) == right for one in found)) for name, found in answers.items()}
    if not answers[rule]:
        return Verdict(0.0, Status.UNPARSABLE, parts, note="no answer")
    return Verdict(parts[rule], Status.CORRECT if parts[rule] else Status.WRONG, parts, note=answers[rule][0][:200])


def verify_minerva(solution: str, text: str) -> Verdict:
    """`math_verify` of its tasks minerva_math_…: Math-Verify with its defaults on the whole solution and completion."""
    from math_verify import parse, verify

    answer = parse(text, parsing_timeout=0)  # the process that verifies is killed when it hangs
    score = float(verify(parse(solution, parsing_timeout=0), answer, timeout_seconds=0))
    status = Status.CORRECT if score else Status.WRONG if answer else Status.UNPARSABLE
    return Verdict(score, status, {"lm_eval_math_verify": score}, note=str(answer[-1:])[:200])


def _comparable(answer: str) -> str:
    for pattern in _IGNORED:  # one after the other: "5.," is 5
        answer = re.sub(pattern, "", answer)
    return answer.lower()
