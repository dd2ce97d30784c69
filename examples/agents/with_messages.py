"""The agent of with_chat.py, written against Anthropic's messages, streamed."""

from functools import cache
from typing import Any

import anthropic

from examples.agents.calculator import DESCRIPTION, NAME, PARAMETERS, calculate

TURNS = 3
TOOLS: Any = [{"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}]


@cache
def connections() -> Any:
    """One pool for all episodes: to make one takes longer than to answer."""
    return anthropic.DefaultAsyncHttpxClient()


async def agent(problem: dict[str, Any], url: str, key: str) -> str:
    """Answer, calling the tool as often as the model asks for it."""
    client = anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=connections())
    messages: list[Any] = [{"role": "user", "content": problem["prompt"]}]
    for _ in range(TURNS):
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 100, "tools": TOOLS}
        async with client.messages.stream(messages=messages, **asked) as events:
            message = await events.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": calculate(call.input)} for call in calls]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    return ""
