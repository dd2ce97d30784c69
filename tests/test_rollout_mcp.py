"""Tools of MCP servers in the tool workflow, over a real program: calls, wrong input, failures, no program left."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from scripted_generator import Scripted

from palestra.data.tokenizers import character_tokenizer
from palestra.errors import UsageError
from palestra.generate.types import Sampling
from palestra.rollout.episode import Episode, encode_problem
from palestra.rollout.mcp import McpServers, arguments_of
from palestra.rollout.tools import tools
from palestra.spec.kinds.posttrain import ToolsSpec
from palestra.tasks.task import Completion, Problem, Status, Verdict

SERVER = f"{sys.executable} {Path(__file__).parent / 'mcp_server.py'}"
KNOWS = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")


def programs() -> list[psutil.Process]:
    """Servers that run."""
    running = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # ended meanwhile, or a zombie
            if any("mcp_server" in part for part in one.cmdline()):
                running.append(one)
    return running


@pytest.fixture(scope="module")
def servers():
    made = McpServers([SERVER])
    yield made
    made.close()
    assert programs() == []


@pytest.mark.parametrize(
    ("name", "text", "result"),
    [
        ("double", "21", "42"),
        ("double", '{"number": 21}', "42"),
        ("join", '{"first": "a", "second": "b"}', "ab"),
        ("join", "ab", "error: expected a JSON object with first, second"),
        pytest.param("join", "[" * 100_000, "error: expected a JSON object with first, second", id="nested"),
    ],
)
def test_call_gives_what_the_server_says(servers, name, text, result):
    assert asyncio.run(servers.tools[name](text)) == result


@pytest.mark.parametrize(("name", "text", "why"), [("fail", "luck", "tool fail"), ("double", "many", "number")])
def test_call_that_fails_is_an_error_for_the_model(servers, name, text, why):
    result = asyncio.run(servers.tools[name](text))
    assert result.startswith("error: ")
    assert why in result


def test_workflow_runs_the_tool_and_its_program_ends_with_it(servers):
    workflow = tools(ToolsSpec(name="tools", tools=[], mcp=[SERVER]))
    assert len(programs()) == 2

    def write(prompt: str, index: int) -> str:
        return " 42" if "<result>42</result>" in prompt else "<double>21</double>"

    def verify(problem: Problem, completion: Completion) -> Verdict:
        right = completion.text.strip() == "42"
        return Verdict(float(right), Status.CORRECT if right else Status.WRONG)

    problem = Problem("sums/train/0", "Twice 21?")
    sampling, generator = Sampling(max_new_tokens=60), Scripted(KNOWS, write)
    prompt = encode_problem(problem, KNOWS)
    episode = Episode(problem, prompt, 1, 0, sampling, generator, verify, KNOWS, 500)  # type: ignore[arg-type]

    async def go(workflow):
        return await workflow(episode)

    (one,) = asyncio.run(go(workflow))
    assert one.reward == 1.0
    assert "<result>42</result>" in one.completion
    del workflow
    assert len(programs()) == 1


@pytest.mark.parametrize("server", ["no_such_program_here", f"{sys.executable} -c 1", "http://127.0.0.1:9/mcp"])
def test_server_that_is_none_is_refused_in_a_sentence(server):
    with pytest.raises(UsageError, match=r"rollout.workflow.mcp: no MCP server at"):
        McpServers([server])


def test_arguments_of_one_text_parameter_stay_text():
    schema = {"properties": {"query": {"type": "string"}}}
    assert arguments_of(" 12 ", schema) == {"query": "12"}
    assert arguments_of('{"query": "a"}', schema) == {"query": "a"}
    assert arguments_of('{"other": "a"}', schema) == {"query": '{"other": "a"}'}
