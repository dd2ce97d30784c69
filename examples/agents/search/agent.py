"""An agent that looks up what it does not know, written against the package `openai` alone.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python examples/agents/search/agent.py "Which town has mia tavel?"

As a function of the workflow `agent` it gets the problem, the gateway's address and the key of its session.
"""

import asyncio
import json
import sys
from functools import cache
from typing import Any

import openai

from examples.agents.search.bm25 import Index
from examples.agents.search.library import texts

TURNS = 4
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
ABOUT = {"name": "search", "description": "The text of the library that fits best.", "parameters": QUERY}
TOOLS: Any = [{"type": "function", "function": ABOUT}]


@cache
def index() -> Index:
    return Index(texts())


@cache
def connections() -> Any:
    """One pool for all episodes: to make one takes longer than to answer."""
    return openai.DefaultAsyncHttpxClient()


def search(arguments: str) -> str:
    """The best text for the query of a call, or that there is none."""
    try:
        query = json.loads(arguments)["query"]
    except (ValueError, KeyError, TypeError):
        return "no query"
    return next(iter(index().search(str(query))), "nothing")


async def agent(problem: dict[str, Any], url: str, key: str) -> str:
    """Answer, searching as often as the model asks for it."""
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
            result = search(call.function.arguments) if call.type == "function" else ""
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def main() -> None:
    async with openai.AsyncOpenAI() as client:
        print(await converse(client, sys.argv[1]))


if __name__ == "__main__":
    asyncio.run(main())
