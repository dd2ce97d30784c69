"""Workflows by name: a single turn, and several turns with feedback after a wrong completion."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from palestra.data.chat import Message, render
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.types import Generation, StopReason
from palestra.rollout.episode import Episode, Transcript, Workflow, sampled, trajectory
from palestra.rollout.types import Trajectory
from palestra.runs.run import ROOT
from palestra.spec.imports import load_named
from palestra.spec.kinds.posttrain import AgentSpec, EnvironmentSpec, MultiTurnSpec, ToolsSpec, WorkflowSpec
from palestra.tasks.task import Problem, Status


async def single_turn(episode: Episode) -> list[Trajectory]:
    """Complete the prompt `samples` times; it is computed once for all."""
    completions = await episode.generate(episode.prompt, n=episode.samples)
    verdicts = await episode.verdicts(completions)
    return [trajectory(episode.prompt, *pair) for pair in zip(completions, verdicts, strict=True)]


def make_workflow(spec: WorkflowSpec, root: Path = Path(ROOT)) -> Workflow:
    """The workflow of a spec; `root` is the folder of runs."""
    if spec.name == "custom":
        return load_named(spec.function, "rollout.workflow.function")
    if isinstance(spec, MultiTurnSpec):
        return multi_turn(spec)
    if isinstance(spec, ToolsSpec):
        from palestra.rollout.tools import tools

        return tools(spec)
    if isinstance(spec, EnvironmentSpec):
        from palestra.rollout.environment import environment

        return environment(spec, root)
    if isinstance(spec, AgentSpec):
        from palestra.rollout.agents.agent import agent  # needs the extra `serve`

        return agent(spec)
    return single_turn


def feedback_tokens(problem: Problem, tokenizer: Tokenizer, feedback: str, turn: int = 1) -> tuple[int, ...]:
    """The tokens between the completion of turn `turn`, counted from 1, and the next one.

    In a conversation that is what the chat template writes after an assistant's content, from the end of its turn to
    the generation prompt; after a plain prompt it is the feedback on a line of its own. Special strings in the feedback
    are text.
    """
    try:
        if isinstance(problem.prompt, str):
            return tuple(tokenizer.encode(f"\n{feedback}\n"))
        return tuple(tokenizer.encode_parts(_written(tokenizer, problem.prompt, feedback, turn))[0])
    except UsageError as error:
        raise UsageError(f"the feedback {feedback!r} cannot follow a completion of {problem.id}: {error}") from error


def following(sampled: Sequence[int], feedback: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The feedback after these tokens: without the token that ends a turn, where the model has sampled it itself."""
    for place, token in enumerate(feedback):
        if token in tokenizer.special_ids:
            return feedback[place + 1 :] if sampled and sampled[-1] == token else feedback
        if tokenizer.piece(token).strip():
            break
    return feedback


def _written(tokenizer: Tokenizer, prompt: Sequence[Message], feedback: str, turn: int) -> list[tuple[str, bool]]:
    """The text after a completion, as parts for the tokenizer: the feedback itself is ordinary text."""
    # Private-use characters that occur nowhere else stand for the contents.
    taken = f"{prompt}{feedback}{tokenizer.chat_template}"
    answer, reply = islice((chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in taken), 2)
    earlier = [*prompt, *[_message("assistant", answer), _message("user", feedback)] * (turn - 1)]
    before = render(tokenizer, earlier, add_generation_prompt=True)

    def after_answer(content: str) -> str:
        messages = [*earlier, _message("assistant", answer), _message("user", content)]
        whole = render(tokenizer, messages, add_generation_prompt=True)
        opening, found, rest = whole[len(before) :].partition(answer)
        # A template may put white space before a completion, which the model then samples.
        if not whole.startswith(before) or not found or opening.strip() or answer in rest:
            raise _unstable()
        return rest

    head, found, tail = after_answer(reply).partition(reply)
    real = after_answer(feedback)
    if not found or not real.startswith(head) or not real.endswith(tail) or len(real) < len(head) + len(tail):
        raise _unstable()
    return [(head, True), (real[len(head) : len(real) - len(tail)], False), (tail, True)]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _unstable() -> UsageError:
    return UsageError(
        "the chat template renders the beginning of a conversation differently once more turns follow, which would "
        "change tokens that the model has read and sampled. Use the workflow single_turn, plain prompts, or a template "
        "whose rendering of the conversation so far is always a prefix of the longer one"
    )


def multi_turn(spec: MultiTurnSpec) -> Workflow:
    """The workflow of a spec. Every turn is trained, with the verdict of the last one, discounted by their number."""

    async def workflow(episode: Episode) -> list[Trajectory]:
        problem, tokenizer = episode.problem, episode.tokenizer
        feedback = [feedback_tokens(problem, tokenizer, spec.feedback, turn) for turn in range(1, spec.turns)]

        async def go_on(sample: int, completion: Generation) -> Trajectory:
            transcript, turn = Transcript.of(episode.prompt), 1
            while True:
                verdict = await episode.verdict(completion, transcript.tokens)
                transcript = transcript.with_sampled(completion)
                # A completion that could not be verified must not be called wrong.
                ended = verdict.status in (Status.CORRECT, Status.ERROR) or completion.stop_reason == StopReason.ABORT
                if ended or turn == spec.turns:
                    break
                longer = transcript.with_context(following(completion.tokens, feedback[turn - 1], tokenizer))
                if len(longer.tokens) >= episode.context:
                    break
                transcript = longer
                (completion,) = await episode.generate(transcript.tokens, turn=turn, sample=sample)
                turn += 1
            reward = verdict.score * spec.discount ** (turn - 1)
            return transcript.trajectory(len(episode.prompt), verdict, reward, str(completion.stop_reason), tokenizer)

        return await sampled(episode, go_on)

    return workflow
