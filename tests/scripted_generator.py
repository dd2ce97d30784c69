"""A generator that writes what a script says, with the engine's own rules for stop strings, end tokens and limits."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from palestra.data.mixture import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.generate.engine.request import GrowingText
from palestra.generate.types import Chunk, Generation, Request, Result, StopReason

Script = Callable[[str, int], str]
"""From the prompt, as text with special strings, and the number of the sample to what the model would write."""


class Scripted:
    """The interface of a `Generator` for workflows; every request is kept."""

    def __init__(self, tokenizer: Tokenizer, script: Script, eos: frozenset[int] = frozenset()):
        self.tokenizer, self.script, self.eos = tokenizer, script, eos
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Result:
        self.requests.append(request)
        await asyncio.sleep(0)
        return Result("", request.prompt, tuple(self._drawn(request, index) for index in range(request.n)))

    def _drawn(self, request: Request, index: int) -> Generation:
        text = self.script(self.tokenizer.decode(request.prompt, specials=True), index)
        growing, tokens, reason, match = GrowingText(self.tokenizer, request.sampling.stop), [], StopReason.ABORT, None
        for token in self.tokenizer.encode(text, specials=True):
            tokens.append(token)
            growing.push(token, ignore_stops=False)
            if growing.stopped_by is not None:
                reason, match = StopReason.STOP, growing.stopped_by
            elif token in self.eos:
                reason, match = StopReason.EOS, token
            elif len(tokens) == request.sampling.max_new_tokens:
                reason = StopReason.LENGTH
            if reason != StopReason.ABORT:
                break
        growing.finish()
        draws = [stream_key(request.sampling.seed or 0, place) for place in range(len(tokens))]
        logprobs = tuple(-1.0 - draw / 2**64 for draw in draws)
        return Generation(tuple(tokens), logprobs, (7,) * len(tokens), reason, growing.text, (), match)

    def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        raise NotImplementedError

    async def abort(self, id: str) -> None:
        raise NotImplementedError

    async def pause(self) -> None:
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def publish(self, weights: Mapping[str, Any], version: int, *, keep_cache: bool = True) -> None:
        raise NotImplementedError
