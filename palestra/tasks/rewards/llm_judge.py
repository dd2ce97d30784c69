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
from palestra.tasks.rewards.rewards import OpenGenerator
from palestra.tasks.task import Completion, Problem, Status, Verdict

if TYPE_CHECKING:
    from palestra.data.tokenizers import Tokenizer
    from palestra.generate.types import Generator


Ask = Callable[[str], Awaitable[str]]
"""Sends a message to a language model and returns its reply."""

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
    """Scores completions with a language model's reply; from 0.5 on a completion counts as correct."""

    isolated = False

    def __init__(self, ask: Ask, template: str = PROMPT, *, close: Callable[[], None] = lambda: None):
        if "{completion}" not in template:
            raise UsageError("judge.prompt: expected {completion} in it, or every completion would get the same score")
        self._ask, self._template, self.close = ask, template, close

    async def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """The score in the model's reply; `unparsable` where it has no number from 0 to 1."""
        from palestra.generate.engine.request import PromptTooLong

        try:
            reply = await self._ask(filled(self._template, problem, completion))
        except PromptTooLong as error:  # neither the spec's fault nor a sign of a bad completion
            return Verdict(0.0, Status.ERROR, note=f"the judge cannot read it: {error}")
        score = score_in(reply)
        if score is None:
            return Verdict(0.0, Status.UNPARSABLE, note=f"the judge gave no score: {reply!r:.200}")
        status = Status.CORRECT if score >= 0.5 else Status.WRONG
        return Verdict(score, status, {"judge": score}, note=f"the judge said {reply!r:.200}")


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
    """Messages to a generator: in its chat template where it has one, else as plain text."""
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


def filled(template: str, problem: Problem, completion: Completion) -> str:
    """The template with {prompt}, {completion} and the row's fields in place; other braces stay as they are.

    In one pass, so that braces in inserted text are never expanded.
    """
    values: Mapping[str, Any] = {**problem.row, "prompt": problem.text, "completion": completion.text}

    def inserted(field: re.Match[str]) -> str:
        value = values.get(field[1], field[0])
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    return FIELD.sub(inserted, template)


def score_in(text: str) -> float | None:
    """The first number from 0 to 1 in a judge's reply, after its reasoning where that is marked."""
    for match in SCORE.finditer(text.rpartition("</think>")[2]):
        number, whole, percent = match.groups()
        under = float(whole) if whole else 100.0 if percent else 1.0
        score = float(number.replace("−", "-")) / under if under else None
        if score is not None and 0.0 <= score <= 1.0:
            return score
    return None


WAITS = (0.5, 2.0, 8.0)  # seconds between attempts
RETRIED = (408, 429, 500, 502, 503, 504)  # statuses after which another attempt may succeed
REFUSED = (401, 403, 404)  # statuses after which none can
CONNECT_SECONDS, READ_SECONDS = 10.0, 300.0


class OpenAiChat:
    """A model at `http://host:port/v1`, or `…/v1#name` where there are several, with the key `OPENAI_API_KEY`.

    Each request has a connection of its own: it works on any event loop, and cancelling it closes the connection.
    """

    def __init__(self, url: str, *, max_new_tokens: int, waits: tuple[float, ...] = WAITS):
        if find_spec("httpx") is None:
            raise MissingExtra("A language model behind a URL", "serve")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not the address of a server: expected one such as http://localhost:8000/v1")
        self.base = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))
        self.max_new_tokens, self._waits = max_new_tokens, waits
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {} if not key else {"Authorization": f"Bearer {key}"}
        self._trust = ssl.create_default_context() if parts.scheme == "https" else False
        self._name = parts.fragment

    async def ask(self, text: str) -> str:
        """The greedy reply to a message."""
        name, messages = self._name or await self._only_model(), [{"role": "user", "content": text}]
        body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": self.max_new_tokens}
        reply = await self._call("POST", "/chat/completions", json=body)
        try:
            return reply["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise PalestraError(f"{self.base} sent a reply without a message: {reply!r:.200}") from error

    async def _only_model(self) -> str:
        reply = await self._call("GET", "/models")
        try:
            names = [model["id"] for model in reply["data"]]
        except (KeyError, TypeError) as error:
            raise PalestraError(f"{self.base}/models did not return a list of models: {reply!r:.200}") from error
        if len(names) != 1:
            known = ", ".join(names) or "none"
            raise UsageError(f"expected one model at {self.base}, which has: {known}. Name one as {self.base}#NAME")
        self._name = names[0]
        return self._name

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        """The server's reply; transient errors are retried."""
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
                status = response.status_code
                why, transient = f"status {status}: {response.text[:300]}", status in RETRIED
                if status in REFUSED:
                    raise UsageError(f"{self.base}{path} refuses: {why}. The key is that of OPENAI_API_KEY")
            except ValueError as error:
                raise PalestraError(f"{self.base}{path} sent a reply that is not valid JSON") from error
            except httpx.HTTPError as error:
                why, transient = str(error) or type(error).__name__, True
            wait = next(waits, None) if transient else None
            if wait is None:
                raise PalestraError(f"{self.base}{path} does not answer: {why}")
            await asyncio.sleep(wait)
