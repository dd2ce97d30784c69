"""IFEval: prompts with instructions that a program can check (arXiv:2311.07911), Google's rows and AllenAI's."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from palestra.data.languages import language_of
from palestra.errors import UsageError
from palestra.tasks.dataset import files_of, load_rows
from palestra.tasks.task import Completion, Message, Problem, Status, Task, TaskArgs, Verdict
from palestra.tasks.verify.instructions import BadInstruction, instructions_of

PLACES = {
    "train": ("allenai/RLVR-IFeval", None, files_of("train")),
    "test": ("google/IFEval", "ifeval", ("input_data.jsonl", "ifeval_input_data.jsonl", *files_of("test"))),
}
"""Where the rows of a split are: on the Hub, the folder under `PALESTRA_DATA`, the files."""


class IfEvalArgs(TaskArgs):
    """Args of `ifeval`."""

    source: str | None = None
    """A file, folder, URL or name on the Hub; null takes RLVR-IFeval to train on, Google's 541 prompts as test."""
    score: Literal["prompt_strict", "prompt_loose", "inst_strict", "inst_loose"] = "prompt_strict"
    """The reward: whether all instructions are followed, or which share of them, by the strict or the loose reading."""
    format: Literal["chat", "plain"] = "chat"
    """Ask in a conversation, for models with a chat template; or as plain text, for base models."""
    system: str | None = None
    """The system prompt, or in plain text what stands first; null takes the row's own, if it has one."""
    prompt: Literal["lm_eval"] | None = None
    """Plain text as lm-eval has it, with nothing after the request; null: an empty line follows."""


class IfEval(Task[IfEvalArgs]):
    """Follow the instructions of a prompt. `inst_…` is the share of this prompt's instructions that are followed."""

    Args = IfEvalArgs
    splits: ClassVar[tuple[str, ...]] = tuple(PLACES)
    # Detecting the language of a long text takes tens of milliseconds, eight times over in the loose reading.
    isolated: ClassVar[bool] = True

    def problems(self, split: str) -> Sequence[Problem]:
        """All prompts of a split; rows that cannot be verified are an error now, not after hours."""
        default, folder, files = PLACES[split]
        rows = load_rows(self.args.source, default=default, files=files, folder=folder)
        return [self._problem(split, number, row) for number, row in enumerate(rows)]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """Which instructions the answer follows."""
        try:
            instructions = instructions_of(problem.row)
        except BadInstruction as error:
            return Verdict(0.0, Status.ERROR, note=str(error))
        strict = [one.strict(completion.text) for one in instructions]
        loose = [followed or one.loose(completion.text) for one, followed in zip(instructions, strict, strict=True)]
        parts = {
            "prompt_strict": float(all(strict)),
            "prompt_loose": float(all(loose)),
            "inst_strict": sum(strict) / len(strict),
            "inst_loose": sum(loose) / len(loose),
        }
        score = parts[self.args.score]
        missed = [one.name for one, followed in zip(instructions, strict, strict=True) if not followed]
        status = Status.CORRECT if score == 1.0 else Status.WRONG if completion.text.strip() else Status.UNPARSABLE
        return Verdict(score, status, parts, note=f"not followed: {', '.join(missed)}" if missed else "")

    def warm_up(self) -> None:
        """Load the language detector, which takes longer than a verification."""
        language_of("warm")

    def _problem(self, split: str, number: int, row: Mapping[str, Any]) -> Problem:
        try:
            instructions_of(row)
            prompt = _prompt(row)
        except BadInstruction as error:
            raise UsageError(f"{self.name}, split {split}, row {number + 1}: {error}") from error
        if self.args.system is not None:
            rest = [one for one in prompt if one["role"] != "system"]
            prompt = ({"role": "system", "content": self.args.system}, *rest)
        plain = "\n\n".join(message["content"] for message in prompt) + ("" if self.args.prompt else "\n\n")
        return Problem(self.id(split, row.get("key", number)), prompt if self.args.format == "chat" else plain, row)


def _prompt(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The request, up to the user's last turn: a `prompt`, or a conversation in `messages`."""
    if isinstance(row.get("prompt"), str):
        return ({"role": "user", "content": row["prompt"]},)
    messages = row.get("messages")
    if not isinstance(messages, Sequence) or not all(_is_message(one) for one in messages):
        raise BadInstruction("expected a `prompt`, or `messages` with `role` and `content`")
    last = max((place for place, one in enumerate(messages) if one["role"] == "user"), default=None)
    if last is None:
        raise BadInstruction("expected a message of the user in `messages`")
    return tuple({"role": one["role"], "content": one["content"]} for one in messages[: last + 1])


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
