"""The tool of the agents: adds two numbers. It knows nothing of models, keys and rewards."""

import json
import re

NAME = "calculator"
DESCRIPTION = "Adds two numbers."
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}


def calculate(arguments: object) -> str:
    """The sum in the arguments of a call, as JSON or already read; 0 where there is none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return "0"
    expression = arguments.get("expression") if isinstance(arguments, dict) else None
    numbers = re.fullmatch(r"([0-9]{1,6})\+([0-9]{1,6})", expression if isinstance(expression, str) else "")
    return str(int(numbers[1]) + int(numbers[2])) if numbers else "0"
