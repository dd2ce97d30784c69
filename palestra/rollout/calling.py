"""The tools there are: from what a model wrote into a call to what it reads as the result."""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence

from palestra.rollout.calculator import NotCalculable, calculate

Tool = Callable[[str], Awaitable[str]]
"""From the input of a call to its result; what goes wrong with the input is said in the result."""

SECONDS = 5.0
"""How long a program may run."""
LONGEST = 2000
"""Characters of a result; of a longer one the middle is left out."""


def make_tools(names: Sequence[str]) -> dict[str, Tool]:
    """The tools of these names."""
    return {name: _python() if name == "python" else _calculator for name in names}


async def _calculator(expression: str) -> str:
    try:
        return calculate(expression)
    except NotCalculable as error:
        return f"error: {error}"


def _python() -> Tool:
    """Runs a program in the sandbox; its output is the result, and of an error the last line."""
    from palestra.tasks.sandbox import Sandbox

    sandbox = Sandbox()
    sandbox.start()  # a machine that cannot lock programs in says so now

    async def run(code: str) -> str:
        done = await asyncio.to_thread(sandbox.run_program, code, timeout=SECONDS)
        lines = [_shortened(done.stdout.strip())]
        match done.status:
            case "error":
                said = done.stderr.strip().rpartition("\n")[2]
                lines.append(f"error: {_shortened(said) or f'it ended with code {done.code}'}")
            case "timeout":
                lines.append(f"error: it ran for more than {SECONDS:g} seconds")
            case "output":
                lines.append("error: it wrote too much")
            case "killed":
                lines.append("error: it was killed, as for using too much memory")
        return "\n".join(line for line in lines if line)

    weakref.finalize(run, sandbox.close)
    return run


def _shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
