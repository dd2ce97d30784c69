"""A language model as a verifier, in this process or behind OpenAI's protocol: it scores a completion from 0 to 1."""

import asyncio
import json
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from palestra.errors import MissingExtra, PalestraError, UsageError
from palestra.generate.types import Request, Sampling
from palestra.spec.tasks import JudgeSpec
from palestra.tasks.prompts import text_of
from palestra.tasks.rewards.reward_model import OpenGenerator
from palestra.tasks.task import Answer, Problem, Status, Verdict

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
        from palestra.generate.engine.request import PromptTooLong

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


WAITS = (0.5, 2.0, 8.0)  # seconds between attempts
AGAIN = (408, 429, 500, 502, 503, 504)  # statuses after which another attempt may succeed
REFUSED = (401, 403, 404)  # statuses after which none can
CONNECT_SECONDS, READ_SECONDS = 10.0, 300.0


class OpenAiChat:
    """Asks a model at `http://host:port/v1`, or `…/v1#name` where there are several, with the key `OPENAI_API_KEY`.

    Each question has a connection of its own: it works on any event loop, and a question that is cancelled is gone.
    """

    def __init__(self, url: str, *, max_new_tokens: int, waits: tuple[float, ...] = WAITS):
        if find_spec("httpx") is None:
            raise MissingExtra("A language model behind a URL", "serve")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a server: expected one such as http://localhost:8000/v1")
        self.base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
        self.max_new_tokens, self._waits = max_new_tokens, waits
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {} if not key else {"Authorization": f"Bearer {key}"}
        self._trust = ssl.create_default_context() if parts.scheme == "https" else False
        self._name = parts.fragment

    async def ask(self, text: str) -> str:
        """The most likely answer to a message."""
        name = self._name or await self._only_model()
        body = {
            "model": name,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.max_new_tokens,
        }
        said = await self._call("POST", "/chat/completions", json=body)
        try:
            return said["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise PalestraError(f"{self.base} gave an answer without a message: {said!r:.200}") from error

    async def _only_model(self) -> str:
        said = await self._call("GET", "/models")
        try:
            names = [one["id"] for one in said["data"]]
        except (KeyError, TypeError) as error:
            raise PalestraError(f"{self.base}/models gave no list of models: {said!r:.200}") from error
        if len(names) != 1:
            known = ", ".join(names) or "none"
            raise UsageError(f"{self.base} has not one model but these: {known}. Name one as {self.base}#NAME")
        self._name = names[0]
        return self._name

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        """What the server says; after what may pass it is asked again."""
        import httpx

        waits, timeout = iter(self._waits), httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        while True:
            try:
                async with httpx.AsyncClient(
                    headers=self._headers, timeout=timeout, verify=self._trust, trust_env=False
                ) as client:
                    response = await client.request(method, self.base + path, **options)
                if response.status_code == 200:
                    return response.json()
                said, passing = f"status {response.status_code}: {response.text[:300]}", response.status_code in AGAIN
                if response.status_code in REFUSED:
                    raise UsageError(f"{self.base}{path} refuses: {said}. The key is that of OPENAI_API_KEY")
            except ValueError as error:
                raise PalestraError(f"{self.base}{path} gave an answer that is no JSON") from error
            except httpx.HTTPError as error:
                said, passing = str(error) or type(error).__name__, True
            wait = next(waits, None) if passing else None
            if wait is None:
                raise PalestraError(f"{self.base}{path} does not answer: {said}")
            await asyncio.sleep(wait)
