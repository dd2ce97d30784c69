"""Programs that a model writes into its answer: run in the real sandbox, read as results, ended with the workflow."""

import asyncio
import gc
import time
from typing import Any

import psutil
import pytest
from scripted_generator import Scripted
from test_rollout_tools import TOKENIZER, episode, judged, roll, told_text

from palestra.errors import UsageError
from palestra.rollout import tools as calling
from palestra.rollout.tools import Tool, make_tools, tools
from palestra.spec.kinds.posttrain import ToolsSpec
from palestra.tasks.sandbox.sandbox import Sandbox


@pytest.fixture(scope="module", autouse=True)
def lockable() -> None:
    try:
        with Sandbox() as sandbox:
            sandbox.start()
    except UsageError as error:
        pytest.skip(f"this machine cannot lock programs in: {error}")


@pytest.fixture(scope="module")
def python() -> Tool:
    return make_tools(["python"])["python"]


def result(python: Tool, code: str) -> str:
    return asyncio.run(python(code))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(2**10)", "1024"),
        ("\nfor n in range(3):\n    print(n)\n", "0\n1\n2"),
        ("x = 1", ""),
        ("print('so far'); 1/0", "so far\nerror: ZeroDivisionError: division by zero"),
        ("def f(:", "error: SyntaxError: invalid syntax"),
        ("raise SystemExit(4)", "error: it ended with code 4"),
        ("import os; os._exit(0)", ""),
        ("print('naïve 日本語')", "naïve 日本語"),
    ],
)
def test_result_of_a_program_is_its_output_and_its_error(python: Tool, code: str, said: str) -> None:
    assert result(python, code) == said


def test_result_of_a_program_that_writes_much_has_its_beginning_and_its_end(python: Tool) -> None:
    said = result(python, "print('a' * 5000 + 'z' * 5000)")
    assert said == "a" * 1000 + " [… 8000 characters left out …] " + "z" * 1000
    assert result(python, "while True: print('y' * 1000)").endswith("\nerror: it wrote too much")


def test_program_that_never_ends_is_ended_and_the_tool_goes_on(python: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "SECONDS", 0.5)
    assert result(python, "while True: pass") == "error: it ran for more than 0.5 seconds"
    assert result(python, "print(1)") == "1"


def test_programs_do_not_block_the_loop(python: Tool) -> None:
    async def run() -> int:
        program, turns = asyncio.ensure_future(python("import time; time.sleep(1)")), 0
        while not program.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    assert asyncio.run(run()) > 10


def test_call_of_several_lines_where_the_task_stops_at_a_line_break() -> None:
    program = "<python>total = 12\ntotal += 34\nprint(total)\n</python>"

    def script(prompt: str, _: int) -> str:
        if "</result>" in prompt:
            return "46\n"
        return program[len(prompt.partition("=")[2]) :]

    generator = Scripted(TOKENIZER, script)
    workflow = tools(ToolsSpec(name="tools", tools=["python", "calculator"]))
    (one,) = asyncio.run(rolled(workflow, episode(generator, verify=judged())))
    assert one.completion == f"{program}<result>46</result>46\n"
    assert told_text(one) == "<result>46</result>"
    assert one.reward == 1.0
    assert [request.sampling.stop for request in generator.requests] == [
        ("\n", "</python>", "</calculator>"),
        ("</python>",),
        ("\n", "</python>", "</calculator>"),
    ]


def test_stop_string_that_is_another_tools_tag_inside_a_call_belongs_to_the_input() -> None:
    def script(prompt: str, _: int) -> str:
        if "</result>" in prompt:
            return "46\n"
        return "1</calculator>" if prompt.endswith("</python>") else "<calculator>2</python>"

    one, generator = roll(script, tools=["calculator", "python"])
    assert one.completion.startswith("<calculator>2</python>1</calculator><result>error: only numbers")
    assert [request.sampling.stop for request in generator.requests][1] == ("</calculator>",)
    assert one.reward == 1.0


async def rolled(workflow: Any, episode: Any) -> Any:
    return await workflow(episode)


def test_sandbox_ends_with_the_workflow() -> None:
    gc.collect()
    before = set(psutil.Process().children())
    workflow = tools(ToolsSpec(name="tools", tools=["python"]))
    started = set(psutil.Process().children()) - before
    assert started
    del workflow
    gc.collect()
    deadline = time.monotonic() + 20
    while any(one.is_running() for one in started):  # a zombie is, too
        assert time.monotonic() < deadline
        time.sleep(0.05)
