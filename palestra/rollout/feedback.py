"""What stands between an answer and the next try: the feedback as the model's chat template, or plain text, puts it."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from palestra.data.chat import Message, render
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.tasks.types import Problem


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
