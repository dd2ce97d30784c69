"""What the dialects share: a request as a conversation, its exchange with the engine, and replies as text and calls."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from palestra.data.tokenizers import Detokenizer, Tokenizer
from palestra.generate.serve.gate import event
from palestra.generate.serve.openai import ApiError
from palestra.generate.types import GROUP, Chunk, Generation, Generator, Request, Sampling, StopReason
from palestra.rollout.gateway.calls import Call, CallReader, Format, with_ids

Message = dict[str, Any]
JOINED = ("tokens", "logprobs", "versions", "top")
"""What of a generation its chunks have in pieces."""


class SessionEnded(ApiError):
    """The refusal of what comes too late."""

    def __init__(self) -> None:
        super().__init__(410, "This session has ended: nothing can be added to it", code="session_ended")


@dataclass(frozen=True)
class Conversation:
    """A request in whatever dialect: messages as chat templates read them, tools as OpenAI writes them."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    n: int = 1
    stream: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template."""
    previous: str | None = None
    """The id of the response that the messages continue."""

    @property
    def characters(self) -> int:
        """Its length, about."""
        return sum(len(str(message["content"])) for message in self.messages)


class Body(Protocol):
    """A request of a dialect."""

    def conversation(self, context: int) -> Conversation:
        """What is asked; `context` is the most tokens there may be."""
        ...

    def whole(self, exchange: "Exchange", replies: Sequence["Reply"]) -> dict[str, Any]:
        """The response."""
        ...

    def events(self, exchange: "Exchange") -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        ...


@dataclass(frozen=True)
class Reply:
    """One generation as a message: text and calls."""

    generation: Generation
    text: str
    calls: tuple[Call, ...] = ()


class Source(NamedTuple):
    """A generator, the event loop that it belongs to, and the group that its requests are of."""

    generator: Generator
    loop: asyncio.AbstractEventLoop | None = None
    """None: the gateway's."""
    group: int | None = None


class Exchange:
    """A request at the engine. It outlives the connection it came on: a client that asks again joins it."""

    def __init__(
        self,
        conversation: Conversation,
        request: Request,
        source: Source,
        record: Callable[["Exchange", list[Reply]], None],
        *,
        mark: str,
        model: str,
        tokenizer: Tokenizer,
        format: Format | None,
    ):
        """`record` takes the replies before anyone sees them. `mark` is what ids of calls are made of; `format` that of
        tool calls, None where there are no tools."""
        self.conversation, self.request, self.mark, self.model = conversation, request, mark, model
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self.tokenizer, self._format = tokenizer, format
        self._chunks: list[Chunk] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self._sample(source, record))

    async def replies(self) -> list[Reply]:
        """All replies. Cancelling the wait does not cancel the exchange."""
        await asyncio.wait({self.task})
        if self.task.cancelled():
            raise SessionEnded
        return self.task.result()

    @property
    def failed(self) -> bool:
        """Whether it has ended without replies."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    async def _sample(self, source: Source, record: Callable[["Exchange", list[Reply]], None]) -> list[Reply]:
        here = asyncio.get_running_loop()

        async def there() -> Sequence[Generation]:
            GROUP.set(source.group)
            if not self.conversation.stream:
                return (await source.generator.generate(self.request)).generations
            async with aclosing(source.generator.stream(self.request)) as chunks:
                async for chunk in chunks:
                    here.call_soon_threadsafe(self._add, chunk)
            return ()

        made = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(), source.loop or here))
        if self.conversation.stream:
            made = [self._joined(index) for index in range(self.request.n)]
        read = [_Reader(self, index).read(one.tokens, one.text or "", ended=True) for index, one in enumerate(made)]
        replies = [Reply(one, *said) for one, said in zip(made, read, strict=True)]
        record(self, replies)
        return replies

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._more.set()

    def _joined(self, index: int) -> Generation:
        chunks = [chunk for chunk in self._chunks if chunk.index == index]
        joined: dict[str, Any] = {
            name: tuple(one for chunk in chunks for one in getattr(chunk, name)) for name in JOINED
        }
        text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].stop_reason if chunks else None
        match = None
        if reason == StopReason.STOP:  # chunks do not say by which string
            whole = self.tokenizer.decode(joined["tokens"], continues=True)
            match = next((stop for stop in self.request.sampling.stop if whole.startswith(stop, len(text))), None)
        return Generation(**joined, text=text, stop_reason=reason or StopReason.ABORT, stop_match=match)

    async def pieces(self) -> AsyncIterator[tuple[Chunk, tuple[Call, ...]]]:
        """The replies as they come, as chunks with the text that is said, and calls; also for one who joins late."""
        readers = [_Reader(self, index) for index in range(self.request.n)]
        place = 0
        self.task.add_done_callback(lambda _: self._more.set())
        while not self.task.done() or place < len(self._chunks):
            while place < len(self._chunks):
                chunk = self._chunks[place]
                place += 1
                said, calls = readers[chunk.index].read(chunk.tokens, chunk.text, chunk.stop_reason is not None)
                yield replace(chunk, text=said), calls
            if not self.task.done():
                self._more.clear()
                await self._more.wait()
        await self.replies()

    async def blocks(self) -> AsyncIterator[tuple[Literal["open", "text", "close", "call"], int, Any]]:
        """The one reply as blocks, each with its place: a text opens, grows and closes, a call comes whole."""
        place, text = 0, ""
        async for chunk, calls in self.pieces():
            if chunk.text:
                if not text:
                    yield "open", place, ""
                yield "text", place, chunk.text
                text += chunk.text
            for call in calls:
                if text:
                    yield "close", place, text
                    place, text = place + 1, ""
                yield "call", place, call
                place += 1
        if text:
            yield "close", place, text

    def usage(self, replies: Sequence[Reply]) -> tuple[int, int]:
        """Tokens of the prompt and of the replies."""
        return len(self.request.prompt), sum(len(reply.generation.tokens) for reply in replies)


class _Reader:
    """The pieces of one generation. Where tools are offered, special tokens are text: they begin calls."""

    def __init__(self, exchange: Exchange, index: int):
        self._exchange, self._index, self._calls = exchange, index, 0
        self._reader = None if exchange._format is None else CallReader(exchange._format)
        self._text = Detokenizer(exchange.tokenizer, specials=True, continues=True)
        # What lies before a stop string only the engine knows.
        self._plain = self._reader is None or bool(exchange.request.sampling.stop)

    def read(self, tokens: Sequence[int], text: str, ended: bool) -> tuple[str, tuple[Call, ...]]:
        """What the next tokens say, and what they call."""
        if not self._plain:
            if ended and tokens and tokens[-1] in self._exchange.tokenizer.special_ids:
                tokens = tokens[:-1]  # the end of the turn
            text = self._text.push(tokens) + (self._text.finish() if ended else "")
        if self._reader is None:
            return text, ()
        said, calls = self._reader.push(text)
        if ended:
            last, more = self._reader.finish()
            said, calls = said + last, calls + more
        named = with_ids(calls, self._exchange.mark, self._index, self._calls)
        self._calls += len(calls)
        return said, tuple(named)


def check_choice(choice: Any) -> None:
    """Refuse what would have to constrain sampling."""
    if choice not in (None, "auto", "none"):
        raise ApiError(400, f"tool_choice {choice!r} is not supported: leave it out, or say auto or none")


def named_event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event that carries its type's name, as Anthropic's and the Responses API's do."""
    return f"event: {data['type']}\n".encode() + event(data)


def text_of(content: Any, *kinds: str) -> str:
    """The text of a content: a string, or parts of these kinds; anything else is refused by name."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise ApiError(400, f"a content part of type {kind!r} is not supported: this model reads text only")
        texts.append(part["text"])
    return "\n".join(texts)


def spoken(content: Any, calls: Sequence[Call] = ()) -> Message:
    """A message of the assistant, as chat templates read it."""
    made = [{"type": "function", "id": one.id, "function": {"name": one.name, "arguments": one.input}} for one in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


def tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool, as chat templates read it."""
    about = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": about}
