"""OpenAI's chat completions with tools."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from palestra.data.media import content_text, is_image
from palestra.generate.serve.gate import DONE, event
from palestra.generate.serve.openai import ApiError, ChatBody
from palestra.generate.serve.openai import Reply as ChatReply
from palestra.generate.types import Result
from palestra.rollout.gateway import dialect
from palestra.rollout.gateway.calls import Call
from palestra.rollout.gateway.dialect import Conversation, Exchange, Message, Reply, spoken, text_of, tool


class Named(BaseModel):
    """A call or a tool of OpenAI's, of which only the function matters."""

    id: str = ""
    type: Literal["function"] = "function"
    function: dict[str, Any]

    @model_validator(mode="after")
    def _has_name(self) -> "Named":
        if not isinstance(self.function.get("name"), str):
            raise ApiError(400, "a function has no name")
        return self


class ToolMessage(BaseModel):
    """A message, with what it calls and what it answers."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Named] | None = None
    tool_call_id: str | None = None

    @property
    def characters(self) -> int:
        """The length of its text."""
        return len(content_text(self.content))

    def message(self) -> Message:
        """For the chat template."""
        if self.role == "assistant":
            calls = [(one.function["name"], one.function.get("arguments"), one.id) for one in self.tool_calls or ()]
            return spoken(self._content(), [Call.of(*call) for call in calls])
        message = {"role": "system" if self.role == "developer" else self.role, "content": self._content()}
        return message | ({} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id})

    def _content(self) -> str | list[dict[str, Any]]:
        """Text, or parts where there are images among them."""
        if isinstance(self.content, list) and any(map(is_image, self.content)):
            parts = self.content
            return [one if is_image(one) else {"type": "text", "text": text_of([one], "text")} for one in parts]
        return text_of(self.content, "text")


class ToolChatBody(ChatBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ToolMessage], Field(min_length=1)]  # type: ignore[assignment]
    tools: list[Named] = Field(default=[])
    tool_choice: Any = None

    def conversation(self, context: int) -> Conversation:
        dialect.check_choice(self.tool_choice)
        about = [one.function for one in self.tools] if self.tool_choice != "none" else []
        tools = [tool(one["name"], one.get("description"), one.get("parameters")) for one in about]
        messages = tuple(message.message() for message in self.messages)
        sampling = self.sampling(context)
        return Conversation(messages, tuple(tools), sampling, self.n, self.stream, self.chat_template_kwargs)

    def whole(self, exchange: Exchange, replies: Sequence[Reply]) -> dict[str, Any]:
        answer = self._reply(exchange)
        made = tuple(replace(reply.generation, text=reply.text) for reply in replies)
        response = answer.whole([Result(exchange.id, exchange.request.prompt, made)])
        for choice, reply in zip(response["choices"], replies, strict=True):
            if reply.calls:
                choice["message"] |= {"content": reply.text or None, "tool_calls": [_call(one) for one in reply.calls]}
                choice["finish_reason"] = "tool_calls"
        return response

    async def events(self, exchange: Exchange) -> AsyncIterator[bytes]:
        answer, tokens, counts = self._reply(exchange), 0, [0] * self.n
        for data in answer.opening():
            yield event(data)
        async for chunk, calls in exchange.pieces():
            index, tokens = chunk.index, tokens + len(chunk.tokens)
            part = answer.part(0, chunk if chunk.text or not calls else replace(chunk, text=" "))
            if part is None:
                continue
            (choice,) = part["choices"]
            if calls:
                called = [{"index": place, **_call(one)} for place, one in enumerate(calls, counts[index])]
                counts[index] += len(calls)
                choice["delta"] = ({"content": chunk.text} if chunk.text else {}) | {"tool_calls": called}
            if counts[index] and choice["finish_reason"] is not None:
                choice["finish_reason"] = "tool_calls"
            yield event(part)
        for data in answer.closing(tokens):
            yield event(data)
        yield DONE

    def _reply(self, exchange: Exchange) -> ChatReply:
        id = f"chatcmpl-{exchange.id}"
        return ChatReply(self, id, exchange.created, exchange.model, exchange.tokenizer, (exchange.request,))


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
