"""An agent with a tool, written against OpenAI's chat completions. Nothing in it knows that it is being trained.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python examples/agents/with_chat.py 47+38=

As a function of the workflow `agent` it gets the problem, the gateway's address and the key of its session.
"""

import asyncio
import json
import os
import sys
from functools import cache
from typing import Any

import openai

from examples.agents.calculator import DESCRIPTION, NAME, PARAMETERS, calculate

TURNS = 3
TOOLS: Any = [
    {"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}},
]


@cache
def connections() -> Any:
    """One pool for all episodes: to make one takes longer than to answer."""
    return openai.DefaultAsyncHttpxClient()


async def agent(problem: dict[str, Any], url: str, key: str) -> str:
    """Answer, calling the tool as often as the model asks for it."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=connections())
    return await converse(client, problem["prompt"])


async def converse(client: openai.AsyncOpenAI, question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = calculate(call.function.arguments) if call.type == "function" else ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def main() -> None:
    async with openai.AsyncOpenAI() as client:
        question = sys.argv[1] if len(sys.argv) > 1 else json.loads(os.environ["PALESTRA_PROBLEM"])["prompt"]
        print(await converse(client, question))


if __name__ == "__main__":
    asyncio.run(main())
