"""The agent of with_chat.py, written against OpenAI's Responses."""

from functools import cache
from typing import Any

import openai

from examples.agents.calculator import DESCRIPTION, NAME, PARAMETERS, calculate

TURNS = 3
TOOLS: Any = [
    {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS, "strict": False},
]


@cache
def connections() -> Any:
    """One pool for all episodes: to make one takes longer than to answer."""
    return openai.DefaultAsyncHttpxClient()


async def agent(problem: dict[str, Any], url: str, key: str) -> str:
    """Answer, calling the tool as often as the model asks for it; the server remembers what was said."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=connections())
    asked: dict[str, Any] = {"model": "policy", "tools": TOOLS, "input": problem["prompt"]}
    for _ in range(TURNS):
        response = await client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": calculate(call.arguments)}
            for call in calls
        ]
        asked |= {"previous_response_id": response.id, "input": results}
    return ""
