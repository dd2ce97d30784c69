"""What the dialects share: a request as a conversation, its exchange with the engine, and replies as text and calls."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from palestra.data.tokenizers import Detokenizer, Tokenizer
from palestra.generate.serve.gate import event
from palestra.generate.serve.openai import ApiError
from palestra.generate.types import Chunk, Generation, Request, Result, Sampling, StopReason
from palestra.rollout.gateway.calls import Call, CallReader, Format, with_ids

Message = dict[str, Any]


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

    @property
    def message(self) -> Message:
        """As chat templates read it."""
        calls = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.input}}
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True)
class Piece:
    """What a chunk of a stream adds to a reply."""

    chunk: Chunk
    text: str
    calls: tuple[Call, ...]


class Exchange:
    """A request at the engine. It outlives the connection it came on: a client that asks again joins it."""

    def __init__(
        self,
        conversation: Conversation,
        request: Request,
        *,
        mark: str,
        model: str,
        tokenizer: Tokenizer,
        format: Format | None,
    ):
        """`mark` is what ids of calls are made of; `format` that of tool calls, None where there are no tools."""
        self.conversation, self.request, self.mark, self.model = conversation, request, mark, model
        self.id, self.created = uuid.uuid4().hex, int(time.time())
        self.tokenizer, self._format = tokenizer, format
        self.task: asyncio.Task[list[Reply]] | None = None
        """Ends with the replies; set by who starts it."""
        self._chunks: list[Chunk] = []
        self._more = asyncio.Event()

    def add(self, chunk: Chunk) -> None:
        """A chunk of the engine."""
        self._chunks.append(chunk)
        self._more.set()

    async def replies(self) -> list[Reply]:
        """All replies. Cancelling the wait does not cancel the exchange."""
        assert self.task is not None
        await asyncio.wait({self.task})
        return self._made()

    def _made(self) -> list[Reply]:
        assert self.task is not None
        if self.task.cancelled():
            raise ApiError(410, "This session has ended: nothing can be added to it", code="session_ended")
        return self.task.result()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The replies as they come; for one who joins late, from the beginning."""
        assert self.task is not None
        readers = [_Reader(self, index) for index in range(self.request.n)]
        place = 0
        self.task.add_done_callback(lambda _: self._more.set())
        while not self.task.done() or place < len(self._chunks):
            while place < len(self._chunks):
                chunk = self._chunks[place]
                place += 1
                yield readers[chunk.index].read(chunk)
            if not self.task.done():
                self._more.clear()
                await self._more.wait()
        self._made()

    async def blocks(self) -> AsyncIterator[tuple[Literal["open", "text", "close", "call"], int, Any]]:
        """The one reply as blocks, each with its place: a text opens, grows and closes, a call comes whole."""
        place, text = 0, ""
        async for piece in self.pieces():
            if piece.text:
                if not text:
                    yield "open", place, ""
                yield "text", place, piece.text
                text += piece.text
            for call in piece.calls:
                if text:
                    yield "close", place, text
                    place, text = place + 1, ""
                yield "call", place, call
                place += 1
        if text:
            yield "close", place, text

    def result(self) -> Result:
        """The generations of a stream that has ended."""
        made: list[Generation] = []
        for index in range(self.request.n):
            chunks = [chunk for chunk in self._chunks if chunk.index == index]
            joined: dict[str, Any] = {name: _joined(chunks, name) for name in ("tokens", "logprobs", "versions", "top")}
            text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].stop_reason if chunks else None
            made.append(Generation(**joined, text=text, stop_reason=reason or StopReason.ABORT))
        return Result(self.id, self.request.prompt, tuple(made))

    def reply(self, index: int, generation: Generation) -> Reply:
        """A generation as a message."""
        fields = {name: getattr(generation, name) for name in ("tokens", "logprobs", "versions", "top")}
        whole = Chunk(index, **fields, text=generation.text or "", stop_reason=generation.stop_reason)
        piece = _Reader(self, index).read(whole)
        return Reply(generation, piece.text, piece.calls)

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

    def read(self, chunk: Chunk) -> Piece:
        ended = chunk.stop_reason is not None
        if self._plain:
            text = chunk.text
        else:
            tokens = chunk.tokens
            if ended and tokens and tokens[-1] in self._exchange.tokenizer.special_ids:
                tokens = tokens[:-1]  # the end of the turn
            text = self._text.push(tokens) + (self._text.finish() if ended else "")
        if self._reader is None:
            return Piece(chunk, text, ())
        said, calls = self._reader.push(text)
        if ended:
            last, more = self._reader.finish()
            said, calls = said + last, calls + more
        named = with_ids(calls, self._exchange.mark, self._index, self._calls)
        self._calls += len(calls)
        return Piece(chunk, said, tuple(named))


def _joined(chunks: Sequence[Chunk], name: str) -> tuple[Any, ...]:
    return tuple(entry for chunk in chunks for entry in getattr(chunk, name))


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


def with_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with neighboring turns of the assistant (a text, then calls) as one."""
    last: Message | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] == "assistant" and "tool_calls" in message:
            calls = [*last.get("tool_calls", []), *message["tool_calls"]]
            last = {**last, "content": last["content"] + message["content"], "tool_calls": calls}
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def called(id: str, name: str, arguments: Any) -> Message:
    """An assistant's call, as chat templates read it."""
    if isinstance(arguments, str):
        arguments = Call(name, arguments).input
    call = {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool, as chat templates read it."""
    about = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": about}
