"""Workflows by name: a single turn, and several turns with feedback after a wrong completion."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from palestra.data.chat import Message, render
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.types import Generation, StopReason
from palestra.rollout.episode import Episode, Transcript, Workflow, sampled, trajectory
from palestra.rollout.types import Trajectory
from palestra.spec.imports import load_function
from palestra.spec.kinds.posttrain import MultiTurnSpec, ToolsSpec, WorkflowSpec
from palestra.tasks.task import Problem, Status


async def single_turn(episode: Episode) -> list[Trajectory]:
    """Answer the problem `samples` times; the prompt is computed once for all."""
    answers = await episode.generate(episode.prompt, n=episode.samples)
    verdicts = await episode.verdicts(answers)
    return [trajectory(episode.prompt, *pair) for pair in zip(answers, verdicts, strict=True)]


def make_workflow(spec: WorkflowSpec) -> Workflow:
    """From a problem to judged trajectories, as the spec asks for it."""
    if spec.name == "custom":
        return load_function(spec.function, "rollout.workflow.function")
    if isinstance(spec, MultiTurnSpec):
        return multi_turn(spec)
    if isinstance(spec, ToolsSpec):
        from palestra.rollout.tools import tools

        return tools(spec)
    return single_turn


def feedback_tokens(problem: Problem, tokenizer: Tokenizer, feedback: str, turn: int = 1) -> tuple[int, ...]:
    """All that follows the answer of turn number `turn`, counted from 1, up to where the next one begins.

    In a conversation that is what the chat template writes after an assistant's content, from what closes its turn to
    the generation prompt; after a plain prompt it is the feedback on a line of its own. Special strings in the feedback
    are text.
    """
    try:
        if isinstance(problem.prompt, str):
            return tuple(tokenizer.encode(f"\n{feedback}\n"))
        return tuple(tokenizer.encode_parts(_written(tokenizer, problem.prompt, feedback, turn))[0])
    except UsageError as error:
        raise UsageError(f"the feedback {feedback!r} cannot follow an answer to {problem.id}: {error}") from error


def following(drawn: Sequence[int], feedback: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The feedback after these tokens: without the token that closes a turn, where the model has drawn it itself."""
    for place, token in enumerate(feedback):
        if token in tokenizer.special_ids:
            return feedback[place + 1 :] if drawn and drawn[-1] == token else feedback
        if tokenizer.piece(token).strip():
            break
    return feedback


def _written(tokenizer: Tokenizer, prompt: Sequence[Message], feedback: str, turn: int) -> list[tuple[str, bool]]:
    """The text after an answer, as parts for the tokenizer: the feedback as the template has it is ordinary text."""
    # Characters for private use stand for contents; such as occur nowhere else.
    taken = f"{prompt}{feedback}{tokenizer.chat_template}"
    answer, said = islice((chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in taken), 2)
    earlier = [*prompt, *[_message("assistant", answer), _message("user", feedback)] * (turn - 1)]
    before = render(tokenizer, earlier, add_generation_prompt=True)

    def after_answer(content: str) -> str:
        messages = [*earlier, _message("assistant", answer), _message("user", content)]
        whole = render(tokenizer, messages, add_generation_prompt=True)
        opening, found, rest = whole[len(before) :].partition(answer)
        # A template may put white space before an answer, which the model then draws.
        if not whole.startswith(before) or not found or opening.strip() or answer in rest:
            raise _unstable()
        return rest

    head, found, tail = after_answer(said).partition(said)
    real = after_answer(feedback)
    if not found or not real.startswith(head) or not real.endswith(tail) or len(real) < len(head) + len(tail):
        raise _unstable()
    return [(head, True), (real[len(head) : len(real) - len(tail)], False), (tail, True)]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _unstable() -> UsageError:
    return UsageError(
        "the chat template writes the beginning of a conversation otherwise once more turns follow, so what the model "
        "has read and drawn would change under it. Use the workflow single_turn, plain prompts, or a template in which "
        "the conversation so far with a generation prompt is always how the longer conversation begins"
    )


def multi_turn(spec: MultiTurnSpec) -> Workflow:
    """The workflow of a spec. Every turn is trained, with the verdict of the last one, discounted by their number."""

    async def workflow(episode: Episode) -> list[Trajectory]:
        told = [
            feedback_tokens(episode.problem, episode.tokenizer, spec.feedback, turn) for turn in range(1, spec.turns)
        ]

        async def go_on(sample: int, answer: Generation) -> Trajectory:
            said, turn = Transcript.of(episode.prompt), 1
            while True:
                verdict = await episode.verdict(answer, said.tokens)
                said = said.drew(answer)
                # An answer that could not be judged must not be called wrong.
                if verdict.status in (Status.CORRECT, Status.ERROR) or answer.stop_reason == StopReason.ABORT:
                    break
                if turn == spec.turns:
                    break
                longer = said.told(following(answer.tokens, told[turn - 1], episode.tokenizer))
                if len(longer.tokens) >= episode.context:
                    break
                said = longer
                (answer,) = await episode.generate(said.tokens, turn=turn, sample=sample)
                turn += 1
            reward = verdict.score * spec.discount ** (turn - 1)
            return said.trajectory(len(episode.prompt), verdict, reward, str(answer.stop_reason), episode.tokenizer)

        return await sampled(episode, go_on)

    return workflow
