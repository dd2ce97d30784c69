"""OpenAI's Responses with function calls."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from pydantic import BaseModel, ConfigDict

from palestra.generate import client as wire
from palestra.generate.serve.openai import ApiError
from palestra.generate.types import Sampling, StopReason
from palestra.rollout.gateway import dialect
from palestra.rollout.gateway.calls import Call
from palestra.rollout.gateway.dialect import Conversation, Exchange, Message, Reply, named_event, spoken, text_of

SAID_AGAIN = {"instructions", "max_output_tokens", "previous_response_id", "temperature", "tools", "top_p"}
"""Of a request, in its response."""
TEXTS = ("input_text", "output_text", "text")


class ResponsesBody(BaseModel):
    """`POST /v1/responses`; of what is not listed here nothing changes what is sampled."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    previous_response_id: str | None = None
    max_output_tokens: wire.Count | None = None
    temperature: wire.Temperature | None = None
    top_p: wire.TopP | None = None
    stream: bool | None = False
    text: dict[str, Any] | None = None

    def conversation(self, context: int) -> Conversation:
        dialect.check_choice(self.tool_choice)
        if ((self.text or {}).get("format") or {"type": "text"}).get("type") != "text":
            raise ApiError(400, "text.format is not supported: leave it out", param="text")
        tools = []
        for one in self.tools if self.tool_choice != "none" else ():
            if one.get("type") != "function" or not isinstance(one.get("name"), str):
                raise ApiError(400, f"a tool of type {one.get('type')!r} is not supported: only functions are")
            tools.append(dialect.tool(one["name"], one.get("description"), one.get("parameters")))
        start = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = _joined([*start, *(message for item in items for message in _message(item))])
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_new_tokens=self.max_output_tokens or context,
        )
        previous = self.previous_response_id and self.previous_response_id.removeprefix("resp_")
        return Conversation(tuple(messages), tuple(tools), sampling, stream=bool(self.stream), previous=previous)

    def whole(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        (reply,), (read, written) = replies, exchange.usage(replies)
        output = [_text_item(exchange, reply.text)] if reply.text or not reply.calls else []
        output += [_call_item(call) for call in reply.calls]
        short = reply.generation.stop_reason == StopReason.LENGTH
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        details = {"reason": "max_output_tokens"} if short else None
        about = {"status": "incomplete" if short else "completed", "incomplete_details": details}
        return self._head(exchange) | about | {"output": output, "usage": usage}

    async def events(self, exchange: Exchange) -> AsyncIterator[bytes]:
        numbers = count()

        def send(kind: str, **data: Any) -> bytes:
            return named_event({"type": f"response.{kind}", "sequence_number": next(numbers), **data})

        begun = self._head(exchange) | {"status": "in_progress", "output": []}
        yield send("created", response=begun)
        yield send("in_progress", response=begun)
        async for what, place, data in exchange.blocks():
            where = {"item_id": f"msg_{exchange.id}", "output_index": place, "content_index": 0}
            item = _call_item(data) if what == "call" else _text_item(exchange, data)
            match what:
                case "open":
                    empty = {"status": "in_progress", "content": []}
                    yield send("output_item.added", output_index=place, item=item | empty)
                    yield send(
                        "content_part.added", **where, part={"type": "output_text", "text": "", "annotations": []}
                    )
                case "text":
                    yield send("output_text.delta", **where, delta=data, logprobs=[])
                case "close":
                    yield send("output_text.done", **where, text=data, logprobs=[])
                    yield send("content_part.done", **where, part=item["content"][0])
                case "call":
                    where = {"item_id": f"fc_{data.id}", "output_index": place}
                    empty = {"arguments": "", "status": "in_progress"}
                    yield send("output_item.added", output_index=place, item=item | empty)
                    yield send("function_call_arguments.delta", **where, delta=data.arguments)
                    yield send("function_call_arguments.done", **where, name=data.name, arguments=data.arguments)
            if what in ("close", "call"):
                yield send("output_item.done", output_index=place, item=item)
        response = self.whole(exchange, await exchange.replies())
        yield send("incomplete" if response["status"] == "incomplete" else "completed", response=response)

    def _head(self, exchange: Exchange) -> dict[str, Any]:
        made = {"id": f"resp_{exchange.id}", "created_at": exchange.created, "model": exchange.model}
        fixed = {"object": "response", "error": None, "incomplete_details": None, "metadata": {}}
        choice = {"tool_choice": self.tool_choice or "auto", "parallel_tool_calls": True}
        return made | fixed | choice | self.model_dump(include=SAID_AGAIN)


def _message(item: dict[str, Any]) -> Iterator[Message]:
    """The message of an input item; none for one that a model does not read."""
    match item.get("type", "message"):
        case "message":
            role = str(item.get("role"))
            if role not in ("system", "developer", "user", "assistant"):
                raise ApiError(400, f"input: a message has the role {role!r}")
            role = "system" if role == "developer" else role
            yield {"role": role, "content": text_of(item.get("content"), *TEXTS)}
        case "function_call":
            yield spoken("", [Call.of(item.get("name"), item.get("arguments"), item.get("call_id"))])
        case "function_call_output":
            content = text_of(item.get("output"), *TEXTS)
            yield {"role": "tool", "content": content, "tool_call_id": str(item.get("call_id"))}
        case "reasoning":
            return
        case kind:
            raise ApiError(400, f"input: an item of type {kind!r} is not supported")


def _joined(messages: Iterable[Message]) -> list[Message]:
    """The messages with neighboring turns of the assistant (a text, then calls) as one."""
    made: list[Message] = []
    for message in messages:
        if made and made[-1]["role"] == "assistant" and "tool_calls" in message:
            calls = [*made[-1].get("tool_calls", ()), *message["tool_calls"]]
            made[-1] = {**made[-1], "tool_calls": calls}
        else:
            made.append(message)
    return made


def _text_item(exchange: Exchange, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    head = {"id": f"msg_{exchange.id}", "type": "message", "role": "assistant", "status": "completed"}
    return {**head, "content": content}


def _call_item(call: Call) -> dict[str, Any]:
    about = {"name": call.name, "arguments": call.arguments, "status": "completed"}
    return {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, **about}
