"""The task `humaneval`: functions to be completed from a signature and a docstring (Chen et al., arXiv:2107.03374)."""

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.errors import UsageError
from palestra.tasks.code import complete_code, syntax_tree
from palestra.tasks.code_tests import CodeArgs, judge_code, shared_sandbox, why_weak
from palestra.tasks.rows import load_rows, text_of
from palestra.tasks.task import Task
from palestra.tasks.types import Answer, Problem, Verdict

FILES = ("HumanEval.jsonl", "HumanEval.jsonl.gz", "test-*.parquet", "*/test-*.parquet", "*.jsonl", "*.parquet")


class HumanEval(Task[CodeArgs]):
    """HumanEval's 164 problems: the rest of a function, judged by the row's `check`.

    A plain prompt is the row's own and ends at the next statement that begins a line, as in lm-eval. An answer may
    also be the whole function, or stand in a Markdown fence.
    """

    Args = CodeArgs
    splits = ("test",)
    isolated = True
    stop = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer; in a conversation it has a function in it, which they would cut."""
        return () if self.args.format == "chat" and self.args.stop is None else super().stops

    def problems(self, split: str) -> Sequence[Problem]:
        """The problems, in the order of the rows."""
        raw = load_rows(self.args.source, default="openai/openai_humaneval", files=FILES, folder="humaneval")
        return [self._problem(split, given, place) for place, given in enumerate(raw)]

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the completed function passes the check."""
        code = complete_code(problem.row["prompt"], answer.text, problem.row["entry_points"][0])
        return judge_code(code, problem.row, self.args)

    def warm_up(self) -> None:
        """Start the sandbox, or say why there is none, before the first answer."""
        shared_sandbox(self.args.sandbox).start()

    def _problem(self, split: str, given: Mapping[str, Any], place: int) -> Problem:
        prompt, test, entry_point, number = (
            text_of(given, column, place, self.name) for column in ("prompt", "test", "entry_point", "task_id")
        )
        check = f"{test}\ncheck({entry_point})"
        # The tests may use the prompt's other functions: those are taken from the prompt, not from the answer.
        setup = f"{prompt}    pass\n"
        try:
            syntax_tree(setup)
            weak = why_weak(syntax_tree(test), ["candidate"])
        except SyntaxError as error:
            raise UsageError(f"{self.name}, row {place + 1}: its prompt or test is no Python: {error}") from error
        row = {
            "prompt": prompt,
            "tests": [check],
            "setup": setup,
            "entry_points": [entry_point],
            "weak": weak,
            "solution": given.get("canonical_solution", ""),
        }
        asked = (
            "Complete this Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{prompt.rstrip()}\n```"
        )
        shown = prompt if self.args.format == "plain" else ({"role": "user", "content": asked},)
        return Problem(self.id(split, number), shown, row)
