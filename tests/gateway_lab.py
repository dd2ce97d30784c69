"""A gateway over a generator that writes what a script says, and sessions in it."""

import asyncio
import string
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from scripted_generator import Script, Scripted

from palestra.data.tokenizers import Detokenizer, Tokenizer, character_tokenizer
from palestra.generate.types import Chunk, Request, Sampling
from palestra.rollout.gateway.dialect import Source
from palestra.rollout.gateway.server import Gateway, new_key
from palestra.rollout.gateway.session import Session

TOKENIZER = character_tokenizer(string.printable + "é€")
END = TOKENIZER.encode("<|im_end|>", specials=True)[0]


class Streaming(Scripted):
    """The script in chunks of two tokens; it waits while `hold` is cleared."""

    def __init__(self, tokenizer: Tokenizer, script: Script):
        super().__init__(tokenizer, script, frozenset({END}))
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(self, request: Request) -> Any:
        await self.hold.wait()
        return await super().generate(request)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        (result,) = [await super().generate(request)]
        for index, made in enumerate(result.generations):
            seen, said, growing = 0, made.text or "", Detokenizer(self.tokenizer, continues=True)
            for start in range(0, len(made.tokens), 2):
                await self.hold.wait()
                part, last = slice(start, start + 2), start + 2 >= len(made.tokens)
                end = min(len(said), seen + len(growing.push(made.tokens[part])))
                reason = made.stop_reason if last else None
                fields = (made.tokens[part], made.logprobs[part], made.versions[part])
                yield Chunk(index, *fields, said[seen:end], reason)
                seen = end
                await asyncio.sleep(0)


def until(condition: Callable[[], object]) -> None:
    """Wait; the limit of a test ends a wait for what never comes."""
    while not condition():
        time.sleep(0.02)


@dataclass
class Lab:
    """A gateway, and the generator of its sessions."""

    gateway: Gateway
    generator: Streaming

    def session(self, **settings: Any) -> Session:
        """An open session."""

        async def opened() -> Session:
            options: dict[str, Any] = {"context": 4000, "model": "policy", "sampling": Sampling(), "seed": 5}
            options |= {"format": "hermes", **settings}
            session = Session(new_key(), Source(self.generator), self.generator.tokenizer, **options)
            self.gateway.sessions.add(session)
            return session

        return self.gateway.thread.start(opened()).result()


@contextmanager
def gateway_of(script: Script, *, tokenizer: Tokenizer = TOKENIZER, idle_seconds: float = 60.0) -> Iterator[Lab]:
    """A running gateway."""
    gateway = Gateway(model="policy", idle_seconds=idle_seconds)
    try:

        async def made() -> Streaming:
            return Streaming(tokenizer, script)

        yield Lab(gateway, gateway.thread.start(made()).result())
    finally:
        gateway.close()
