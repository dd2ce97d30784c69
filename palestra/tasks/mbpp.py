"""The task `mbpp`: short Python functions for a sentence and three tests (Austin et al., arXiv:2108.07732)."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import Field

from palestra.errors import UsageError
from palestra.tasks.code import BEGIN, DONE, extract_code
from palestra.tasks.code_tests import CodeArgs, inspect_tests, judge_code, shared_sandbox
from palestra.tasks.rows import load_rows
from palestra.tasks.task import Task
from palestra.tasks.types import Answer, Message, Problem, Verdict

NUMBERS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
"""The task ids of each split, as the paper has them."""
SHOWN = (2, 3, 4)  # those of the paper's own prompts, and of lm-eval's
FILES = ("mbpp.jsonl", "mbpp.jsonl.gz", "full/*.parquet", "*.parquet", "sanitized-mbpp.json")


class MbppArgs(CodeArgs):
    """Which problems of MBPP, and how they are asked."""

    few_shot: int = Field(default=0, ge=0, le=3)
    """How many solved problems come before each, as in lm-eval, which takes 3."""


class Mbpp(Task[MbppArgs]):
    """Mostly Basic Python Problems, the full or the sanitised rows, in the format of lm-eval.

    An answer is right if its code passes all tests of the row. Four rows have tests that need the code's own classes
    or give it a type; they are `weak`, judged beside the code, and left out of `train` unless the args say otherwise.
    """

    Args = MbppArgs
    splits = ("train", "validation", "test", "prompt")
    isolated = True
    stop = (DONE,)

    def problems(self, split: str) -> Sequence[Problem]:
        """The problems of a split, by their task ids."""
        rows = [self._rows[number] for number in NUMBERS[split] if number in self._rows]
        kept = [row for row in rows if split != "train" or self.args.weak or not row["weak"]]
        return [Problem(self.id(split, row["task_id"]), self._prompt(row), row) for row in kept]

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the code passes the tests."""
        return judge_code(extract_code(answer.text, problem.row["entry_points"]), problem.row, self.args)

    def warm_up(self) -> None:
        """Start the sandbox, or say why there is none, before the first answer."""
        shared_sandbox(self.args.sandbox).start()

    @cached_property
    def _rows(self) -> dict[int, dict[str, Any]]:
        raw = load_rows(self.args.source, default="google-research-datasets/mbpp", files=FILES)
        return {row["task_id"]: row for row in (_row(given, place) for place, given in enumerate(raw, 1))}

    def _prompt(self, row: Mapping[str, Any]) -> str | tuple[Message, ...]:
        missing = [str(number) for number in SHOWN[: self.args.few_shot] if number not in self._rows]
        if missing:
            raise UsageError(f"few_shot shows the problems {', '.join(missing)}, which the source does not have")
        shown = [self._rows[number] for number in SHOWN[: self.args.few_shot]]
        if self.args.format == "plain":
            return "".join(f"{_question(one)}{one['solution']}\n{DONE}\n\n" for one in shown) + _question(row)
        turns = [(_asked(one), f"```python\n{one['solution']}\n```") for one in shown]
        texts = [*(text for turn in turns for text in turn), _asked(row)]
        return tuple({"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts))


def _asked(row: Mapping[str, Any]) -> str:
    tests = "\n".join(row["tests"])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} Your code should pass these tests:"
        f"\n\n{tests}\n"
    )


def _question(row: Mapping[str, Any]) -> str:
    return f"{_asked(row)}{BEGIN}\n"


def _row(given: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A row of the full or the sanitised data, in one form."""
    text = given.get("text", given.get("prompt"))
    tests, code = given.get("test_list"), given.get("code", "")
    if not isinstance(given.get("task_id"), int) or not isinstance(text, str) or not tests:
        raise UsageError(
            f"row {place} is no row of MBPP: expected task_id, text or prompt, test_list; it has {', '.join(given)}"
        )
    setup = "\n".join([*(given.get("test_imports") or []), given.get("test_setup_code") or ""]).strip()
    try:
        needs = inspect_tests(tests, setup, code)
    except SyntaxError as error:
        raise UsageError(
            f"row {place}, task_id {given['task_id']}: its tests or code are no Python: {error}"
        ) from error
    return {
        "task_id": given["task_id"],
        "text": text,
        "tests": list(tests),
        "setup": "\n".join(part for part in (needs.imports, setup) if part),
        "entry_points": list(needs.entry_points),
        "weak": needs.weak,
        "solution": code,
    }
