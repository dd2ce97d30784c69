"""The workflow with tools: the model writes a call, reads its result, and goes on.

A call is the tool's name as a tag around its input: `<calculator>12*34</calculator>`, `<python>print(2**8)</python>`.
At the closing tag the tool runs, and `<result>408</result>` is put behind it for the model to read. What it writes
after its last result is its answer. Calls beyond the limit are text like any other. All of it is one turn: it shares
one limit on new tokens, in which results do not count.
"""

from collections.abc import Sequence
from dataclasses import replace

from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.types import Generation, StopReason
from palestra.rollout.calling import Tool, make_tools
from palestra.rollout.episode import Episode
from palestra.rollout.start import Workflow
from palestra.rollout.transcript import Transcript, sampled
from palestra.rollout.types import Trajectory
from palestra.spec.kinds.posttrain import ToolsSpec

NOTHING = Generation((), (), (), StopReason.LENGTH, "")


def tools(spec: ToolsSpec) -> Workflow:
    """The workflow of a spec. Results are read, not trained; the verdict is of the answer alone."""
    there, closing = make_tools(spec.tools), _closing(spec.tools)

    async def workflow(episode: Episode) -> list[Trajectory]:
        _check_alphabet(episode.tokenizer, spec.tools)
        own, limit = episode.sampling.stop, episode.sampling.max_new_tokens
        every = (*own, *map(str, closing))

        async def go_on(sample: int, part: Generation) -> Trajectory:
            said, calls, turn = Transcript.of(episode.prompt), 0, 0
            while calls < spec.calls and part.stop_reason == StopReason.STOP:
                tool, begun = closing.get(part.stop_match), _begun(part.text or "", spec.tools)
                left = limit - said.drawn - len(part.tokens)
                if tool is not None and begun in (tool, None):
                    said, calls = said.drew(part), calls + 1
                    result = await _called(there[tool], tool, part.text or "") if left > 0 else ""
                    longer = said.told(_result_tokens(episode.tokenizer, result))
                    part, stops = NOTHING, every if calls < spec.calls else own
                    if left < 1 or len(longer.tokens) >= episode.context:
                        break
                    said = longer
                elif begun is not None and isinstance(part.stop_match, str):
                    # A stop string inside a call ends neither the call nor the answer.
                    stops = (f"</{begun}>",)
                    if left < 1 or len(said.tokens) + len(part.tokens) >= episode.context:
                        part = replace(part, stop_reason=StopReason.LENGTH)
                        break
                else:
                    break
                turn += 1
                asked = _sampling(episode, stops, left)
                (more,) = await asked.generate(said.tokens + part.tokens, turn=turn, sample=sample)
                part = _joined(part, more, episode.tokenizer)
            verdict = await episode.verdict(part, said.tokens)
            said = replace(said.drew(part), turns=((len(episode.prompt), len(said.tokens) + len(part.tokens)),))
            return said.trajectory(
                len(episode.prompt), verdict, verdict.score, str(part.stop_reason), episode.tokenizer
            )

        return await sampled(_sampling(episode, every, limit), go_on)

    return workflow


def _closing(names: Sequence[str]) -> dict[str | int | None, str]:
    """Tools by the stop string that ends their calls."""
    return {f"</{name}>": name for name in names}


def _sampling(episode: Episode, stop: tuple[str, ...], limit: int) -> Episode:
    """The same with other stop strings and another limit on new tokens."""
    return replace(episode, sampling=replace(episode.sampling, stop=stop, max_new_tokens=limit))


def _begun(text: str, names: Sequence[str]) -> str | None:
    """The tool whose call has begun last and has not ended."""
    begun = [(text.rfind(f"<{name}>"), name) for name in names if text.rfind(f"<{name}>") > text.rfind(f"</{name}>")]
    return max(begun)[1] if begun else None


async def _called(run: Tool, name: str, text: str) -> str:
    """The result of a call that ends the text: its input stands behind the last opening tag."""
    _, found, given = text.rpartition(f"<{name}>")
    return await run(given) if found else f"error: there is no <{name}> before </{name}>"


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
        # A tokenizer of characters has none for the others: no output of a tool may end a run.
        return tokenizer.encode("<result></result>")


def _check_alphabet(tokenizer: Tokenizer, names: Sequence[str]) -> None:
    tags = "".join(f"<{name}></{name}>" for name in (*names, "result"))
    try:
        tokenizer.encode(tags)
    except UsageError as error:
        raise UsageError(f"rollout.workflow: the model cannot write the tags of tools ({tags}): {error}") from error
