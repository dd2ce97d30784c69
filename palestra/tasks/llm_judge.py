"""A language model as a judge: it reads prompt and answer and says a number from 0 to 1."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.errors import UsageError
from palestra.generate.types import Request, Sampling
from palestra.spec.tasks import JudgeSpec
from palestra.tasks.asked import text_of
from palestra.tasks.judge_models import OpenGenerator
from palestra.tasks.types import Answer, Problem, Status, Verdict

if TYPE_CHECKING:
    from palestra.data.tokenizers import Tokenizer
    from palestra.generate.types import Generator

Ask = Callable[[str], Awaitable[str]]
"""A question to a language model, and what it says."""

PROMPT = """You grade answers. Read the question and the answer, then write one number from 0 to 1 and nothing else: \
1 if the answer is right, 0 if it is wrong, something between if it is right in part.

Question:
{prompt}

Answer:
{completion}

Grade:"""

# A number, "8/10", "8 out of 10" or "80%". Nothing is given back once matched, so that no part of a number counts.
_NUMBER = r"(?>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
SCORE = re.compile(rf"(?<![\w.])([-+−]?{_NUMBER})(?>(?:\s*(?:/|out of)\s*({_NUMBER})|\s*(%))?)(?!\w)")
FIELD = re.compile(r"\{(\w+)\}")


class LlmJudge:
    """Judges with what a language model says; from 0.5 an answer counts as correct."""

    isolated = False

    def __init__(self, ask: Ask, template: str = PROMPT, *, close: Callable[[], None] = lambda: None):
        if "{completion}" not in template:
            raise UsageError("judge.prompt: expected {completion} in it, or every answer would get the same score")
        self._ask, self._template, self._close = ask, template, close

    async def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """The score that the model gives an answer; `unparsable` where it says no number from 0 to 1."""
        from palestra.generate.jobs import PromptTooLong

        try:
            said = await self._ask(filled(self._template, problem, answer))
        except PromptTooLong as error:  # no fault of the spec's, and no sign of a bad answer either
            return Verdict(0.0, Status.ERROR, note=f"the judge cannot read it: {error}")
        score = score_in(said)
        if score is None:
            return Verdict(0.0, Status.UNPARSABLE, note=f"the judge gave no score: {said!r:.200}")
        status = Status.CORRECT if score >= 0.5 else Status.WRONG
        return Verdict(score, status, {"judge": score}, note=f"the judge said {said!r:.200}")

    def close(self) -> None:
        """Let go of the model."""
        self._close()


def make_judge(spec: JudgeSpec, root: Path, opened: OpenGenerator) -> LlmJudge:
    """The judge that a spec describes: a model in this process, or one behind a URL."""
    template = PROMPT if spec.prompt is None else spec.prompt
    if re.match(r"https?://", spec.model):
        from palestra.tasks.openai_chat import OpenAiChat

        return LlmJudge(OpenAiChat(spec.model, max_new_tokens=spec.max_new_tokens).ask, template)
    generator = opened(spec.model, root)
    tokenizer = generator.engine.tokenizer
    if tokenizer is None:
        generator.close()
        raise UsageError(f"{spec.model} cannot judge: it has no tokenizer")
    ask = asks(generator, tokenizer, max_new_tokens=spec.max_new_tokens)
    return LlmJudge(ask, template, close=generator.close)


def asks(generator: "Generator", tokenizer: "Tokenizer", *, max_new_tokens: int) -> Ask:
    """Questions to a generator: in its chat template where it has one, else as text to go on from."""
    from palestra.data.chat import encode_chat

    async def ask(text: str) -> str:
        if tokenizer.chat_template is None:
            prompt = tokenizer.encode_prompt(text)
        else:
            messages = [{"role": "user", "content": text}]
            prompt = encode_chat(tokenizer, messages, add_generation_prompt=True).tokens
        sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)
        (generation,) = (await generator.generate(Request(tuple(prompt), sampling))).generations
        return tokenizer.decode(generation.tokens) if generation.text is None else generation.text

    return ask


def filled(template: str, problem: Problem, answer: Answer) -> str:
    """The template with {prompt}, {completion} and the row's fields in place; other braces stay as they are.

    In one pass, so that braces in what is put in are never read.
    """
    values: Mapping[str, Any] = {**problem.row, "prompt": text_of(problem), "completion": answer.text}

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            return found[0]
        put = values[found[1]]
        return put if isinstance(put, str) else json.dumps(put, ensure_ascii=False, default=str)

    return FIELD.sub(value, template)


def score_in(text: str) -> float | None:
    """The first number from 0 to 1 in what a judge said, after its reasoning where that is marked."""
    for found in SCORE.finditer(text.rpartition("</think>")[2]):
        number, whole, percent = found.groups()
        under = float(whole) if whole else 100.0 if percent else 1.0
        score = float(number.replace("−", "-")) / under if under else None
        if score is not None and 0.0 <= score <= 1.0:
            return score
    return None
