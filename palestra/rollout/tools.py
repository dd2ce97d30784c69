"""The tools `calculator` and `python`, those of MCP servers, and the workflow in which a model calls them.

A call is the tool's name as a tag around its input: `<calculator>12*34</calculator>`, `<python>print(2**8)</python>`.
At the closing tag the tool runs, and `<result>408</result>` is appended for the model to read. The text after the last
result is the answer. Calls beyond the limit are ordinary text. All of it is one turn with one limit on new tokens, in
which results do not count.
"""

import ast
import asyncio
import operator
import re
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.generate.types import Generation, StopReason
from palestra.rollout.episode import Episode, Transcript, Workflow, sampled
from palestra.rollout.types import Trajectory
from palestra.spec.kinds.posttrain import ToolsSpec
from palestra.tasks.sets.countdown import OPERATIONS

LONGEST_EXPRESSION = 200  # characters
BITS = 1024  # of numerator and denominator of every intermediate value: up to about 1e308
UNDERSTOOD = "only numbers, parentheses and + - * / // % ** are supported"
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})

BINARY = {**OPERATIONS, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}


class NotCalculable(PalestraError):
    """An expression without a value; the message is for the model that wrote it."""


def calculate(expression: str) -> str:
    """The value of numbers, parentheses and + - * / // % ** (or ^): `7/2` is `3.5`, `0.1+0.2` is `0.3`.

    Integers are exact, other numbers are shown to 12 digits. Thousands may be separated by commas.
    """
    text = expression.strip().translate(SIGNS).replace("^", "**")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    if len(text) > LONGEST_EXPRESSION:
        raise NotCalculable(f"the expression has {len(text)} characters, expected at most {LONGEST_EXPRESSION}")
    if not re.fullmatch(r"[-+*/%() .\deE_]+", text, re.ASCII):
        raise NotCalculable(UNDERSTOOD)
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two: of too many parentheses
        raise NotCalculable("not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise NotCalculable("division by zero") from error
    except OverflowError as error:
        raise NotCalculable("a number is too large or too small") from error
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _number(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _small(Fraction(BINARY[type(op)](_value(left), _value(right))))
    raise NotCalculable(UNDERSTOOD)


def _number(number: int | float) -> Fraction:
    if abs(number) == float("inf"):
        raise OverflowError
    return _small(Fraction(repr(number)))  # as it is written: 0.1 is a tenth


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    if exponent.denominator == 1:
        # Before the work is done, which can take for ever.
        if abs(base) != 1 and _bits(base) * abs(exponent) > 2 * BITS:
            raise OverflowError
        return _small(Fraction(base**exponent.numerator))
    if base < 0:
        raise NotCalculable("a root of a negative number")
    return _number(float(base) ** float(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _small(value: Fraction) -> Fraction:
    if _bits(value) > BITS:
        raise OverflowError
    return value


Tool = Callable[[str], Awaitable[str]]
"""From the input of a call to its result; an error of the input is part of the result."""

SECONDS = 5.0  # that a program may run
LONGEST_RESULT = 2000  # characters; of a longer result the middle is left out


def make_tools(names: Sequence[str]) -> dict[str, Tool]:
    """The tools of these names."""
    return {name: _python() if name == "python" else _calculator for name in names}


async def _calculator(expression: str) -> str:
    try:
        return calculate(expression)
    except NotCalculable as error:
        return f"error: {error}"


def _python() -> Tool:
    """Runs a program in the sandbox; the result is its output, and the last line of an error."""
    from palestra.tasks.sandbox.sandbox import Sandbox

    sandbox = Sandbox()
    sandbox.start()  # raises now where the machine cannot isolate programs

    async def run(code: str) -> str:
        done = await asyncio.to_thread(sandbox.run_program, code, timeout=SECONDS)
        output, last = shortened(done.stdout.strip()), done.stderr.strip().rpartition("\n")[2]
        errors = {
            "error": shortened(last) or f"it ended with code {done.code}",
            "timeout": f"it ran for more than {SECONDS:g} seconds",
            "output": "it wrote too much",
            "killed": "it was killed, as for using too much memory",
        }
        return output if done.status == "ok" else f"{output}\nerror: {errors[done.status]}".lstrip("\n")

    weakref.finalize(run, sandbox.close)
    return run


def shortened(text: str, limit: int = LONGEST_RESULT) -> str:
    """Head and tail of a text with more characters than the limit, and between them how many are left out."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    return f"{text[:head]} [… {len(text) - head - tail} characters left out …] {text[-tail:]}"


NOTHING = Generation((), (), (), StopReason.LENGTH, "")


def tools(spec: ToolsSpec) -> Workflow:
    """The workflow of a spec. Results are read, not trained on; the verdict is on the answer alone."""
    available = make_tools(spec.tools)
    servers = None
    if spec.mcp:
        from palestra.rollout.mcp import McpServers

        servers = McpServers(spec.mcp)
        if twice := sorted(available.keys() & servers.tools.keys()):
            raise UsageError(f"rollout.workflow.mcp: a server has a tool that is called {twice[0]!r}, as one of ours")
        available |= {name: _bounded(tool) for name, tool in servers.tools.items()}
    closing: dict[str | int | None, str] = {f"</{name}>": name for name in available}  # tools by their stop string

    async def workflow(episode: Episode) -> list[Trajectory]:
        _check_alphabet(episode.tokenizer, [*available])
        own, limit = episode.sampling.stop, episode.sampling.max_new_tokens
        every = (*own, *map(str, closing))

        async def go_on(sample: int, part: Generation) -> Trajectory:
            transcript, calls, turn = Transcript.of(episode.prompt), 0, 0
            while calls < spec.calls and part.stop_reason == StopReason.STOP:
                tool, begun = closing.get(part.stop_match), _begun(part.text or "", [*available])
                left = limit - transcript.sampled - len(part.tokens)
                if tool is not None and begun in (tool, None):
                    transcript, calls = transcript.with_sampled(part), calls + 1
                    result = await _called(available[tool], tool, part.text or "") if left > 0 else ""
                    longer = transcript.with_context(_result_tokens(episode.tokenizer, result))
                    part, stops = NOTHING, every if calls < spec.calls else own
                    if left < 1 or len(longer.tokens) >= episode.context:
                        break
                    transcript = longer
                elif begun is not None and isinstance(part.stop_match, str):
                    # A stop string inside a call ends neither the call nor the answer.
                    stops = (f"</{begun}>",)
                    if left < 1 or len(transcript.tokens) + len(part.tokens) >= episode.context:
                        part = replace(part, stop_reason=StopReason.LENGTH)
                        break
                else:
                    break
                turn += 1
                rest = _sampling(episode, stops, left)
                (more,) = await rest.generate(transcript.tokens + part.tokens, turn=turn, sample=sample)
                part = _joined(part, more, episode.tokenizer)
            verdict = await episode.verdict(part, transcript.tokens)
            transcript = transcript.with_sampled(part)
            transcript = replace(transcript, turns=((len(episode.prompt), len(transcript.tokens)),))
            stop_reason = str(part.stop_reason)
            return transcript.trajectory(len(episode.prompt), verdict, verdict.score, stop_reason, episode.tokenizer)

        return await sampled(_sampling(episode, every, limit), go_on)

    if servers is not None:
        weakref.finalize(workflow, servers.close)
    return workflow


def _bounded(tool: Tool) -> Tool:
    async def run(text: str) -> str:
        return shortened(await tool(text))

    return run


def _sampling(episode: Episode, stop: tuple[str, ...], limit: int) -> Episode:
    """The episode with other stop strings and another limit on new tokens."""
    return replace(episode, sampling=replace(episode.sampling, stop=stop, max_new_tokens=limit))


def _begun(text: str, names: Sequence[str]) -> str | None:
    """The tool whose call has begun last and has not ended."""
    begun = [(text.rfind(f"<{name}>"), name) for name in names if text.rfind(f"<{name}>") > text.rfind(f"</{name}>")]
    return max(begun)[1] if begun else None


async def _called(run: Tool, name: str, text: str) -> str:
    """The result of a call that ends the text: its input follows the last opening tag."""
    _, found, argument = text.rpartition(f"<{name}>")
    return await run(argument) if found else f"error: there is no <{name}> before </{name}>"


def _joined(part: Generation, more: Generation, tokenizer: Tokenizer) -> Generation:
    """Two generations as one that was not interrupted."""
    return replace(
        more,
        tokens=part.tokens + more.tokens,
        logprobs=part.logprobs + more.logprobs,
        versions=part.versions + more.versions,
        text=tokenizer.decode(part.tokens, continues=True) + (more.text or ""),
    )


def _result_tokens(tokenizer: Tokenizer, output: str) -> list[int]:
    try:
        return tokenizer.encode(f"<result>{output}</result>")
    except UsageError:
        # A character tokenizer does not know all characters: no output of a tool may end a run.
        return tokenizer.encode("<result></result>")


def _check_alphabet(tokenizer: Tokenizer, names: Sequence[str]) -> None:
    tags = "".join(f"<{name}></{name}>" for name in (*names, "result"))
    try:
        tokenizer.encode(tags)
    except UsageError as error:
        raise UsageError(f"rollout.workflow: the model cannot write the tags of tools ({tags}): {error}") from error
