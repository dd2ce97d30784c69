"""Anthropic's messages with tools."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from palestra.generate import client as wire
from palestra.generate.types import Generation, Sampling, StopReason
from palestra.rollout.gateway import dialect
from palestra.rollout.gateway.calls import Call
from palestra.rollout.gateway.dialect import Conversation, Exchange, Message, Reply, named_event, spoken, text_of

FINISH = {StopReason.EOS: "end_turn", StopReason.STOP: "stop_sequence", StopReason.LENGTH: "max_tokens"}


class Tool(BaseModel):
    """A tool."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] = {}


class Turn(BaseModel):
    """A message; results of tools are blocks of the user's."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]

    def messages(self) -> Iterator[Message]:
        """For the chat template: a text and its calls as one message, every result as its own."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        texts: list[dict[str, Any]] = []
        calls: list[Call] = []
        for block in self.content:
            match block.get("type"), self.role:
                case "tool_use", "assistant":
                    calls.append(Call.of(block.get("name"), block.get("input"), block.get("id")))
                case "tool_result", "user":
                    content = text_of(block.get("content"), "text")
                    yield {"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id"))}
                case "thinking" | "redacted_thinking", _:
                    continue
                case _:
                    texts.append(block)
        if texts or calls:
            yield {**spoken(text_of(texts, "text"), calls), "role": self.role}


class MessagesBody(BaseModel):
    """`POST /v1/messages`; of what is not listed here nothing changes what is sampled."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: Annotated[list[Turn], Field(min_length=1)]
    max_tokens: wire.Count
    system: str | list[dict[str, Any]] | None = None
    tools: list[Tool] = []
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[wire.StopString] = []
    temperature: wire.Temperature = 1.0
    top_p: wire.TopP = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stream: bool = False

    def conversation(self, context: int) -> Conversation:
        choice = (self.tool_choice or {}).get("type", "auto")
        dialect.check_choice(choice)
        system = text_of(self.system, "text")
        start = [{"role": "system", "content": system}] if system else []
        sampling = Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,
            max_new_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
        )
        tools = tuple(dialect.tool(one.name, one.description, one.input_schema) for one in self.tools)
        messages = (message for turn in self.messages for message in turn.messages())
        return Conversation((*start, *messages), tools if choice == "auto" else (), sampling, stream=self.stream)

    def whole(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        (reply,), (read, written) = replies, exchange.usage(replies)
        content: list[dict[str, Any]] = [{"type": "text", "text": reply.text}] if reply.text else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.input)} for call in reply.calls
        ]
        about = _finish(reply.generation, bool(reply.calls))
        usage = {"input_tokens": read, "output_tokens": written}
        return {**self._head(exchange), "content": content, **about, "usage": usage}

    async def events(self, exchange: Exchange) -> AsyncIterator[bytes]:
        read = len(exchange.request.prompt)
        start = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": read, "output_tokens": 0}
        yield named_event({"type": "message_start", "message": {**self._head(exchange), **start, "usage": usage}})
        calls = False

        def block(kind: str, place: int, **about: Any) -> bytes:
            return named_event({"type": f"content_block_{kind}", "index": place, **about})

        async for what, place, data in exchange.blocks():
            match what:
                case "open":
                    yield block("start", place, content_block={"type": "text", "text": ""})
                case "text":
                    yield block("delta", place, delta={"type": "text_delta", "text": data})
                case "call":
                    about = {"type": "tool_use", "id": data.id, "name": data.name, "input": {}}
                    yield block("start", place, content_block=about)
                    written = json.dumps(_object(data.input), ensure_ascii=False)
                    yield block("delta", place, delta={"type": "input_json_delta", "partial_json": written})
                    calls = True
            if what in ("close", "call"):
                yield block("stop", place)
        replies = await exchange.replies()
        about = _finish(replies[0].generation, calls)
        count = {"output_tokens": exchange.usage(replies)[1]}
        yield named_event({"type": "message_delta", "delta": about, "usage": count})
        yield named_event({"type": "message_stop"})

    def _head(self, exchange: Exchange) -> dict[str, Any]:
        return {"id": f"msg_{exchange.id}", "type": "message", "role": "assistant", "model": exchange.model}


def _finish(generation: Generation, calls: bool) -> dict[str, Any]:
    reason = "tool_use" if calls else FINISH.get(generation.stop_reason, "end_turn")
    match = generation.stop_match if isinstance(generation.stop_match, str) and not calls else None
    return {"stop_reason": reason, "stop_sequence": match}


def _object(value: Any) -> Any:
    """Anthropic's inputs are objects."""
    return value if isinstance(value, dict) else {"input": value}
