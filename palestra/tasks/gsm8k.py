"""GSM8K: word problems of grade school whose answer is a number (arXiv:2110.14168)."""

import re
from collections.abc import Sequence
from typing import ClassVar

from palestra.data.readers import Row
from palestra.errors import UsageError
from palestra.tasks.final_answers import Extraction, judge_number, number_of
from palestra.tasks.math_answers import cut
from palestra.tasks.prompts import Example, Layout, PromptArgs, ask, shown, stops_of
from palestra.tasks.rows import files_of, load_rows, text_of
from palestra.tasks.task import Task
from palestra.tasks.types import Answer, Problem, Verdict

LAYOUT = Layout("Q: {question}\nA:")
MARK = "####"  # before the final answer of a row
CALCULATOR = re.compile(r"<<[^>]*>>")


class Gsm8kArgs(PromptArgs):
    """What the task is told."""

    source: str | None = None
    """A file, folder, URL or name on the Hub, with `question` and `answer`; null takes openai/gsm8k."""
    extraction: Extraction = "flexible"
    r"""What counts as the answer: a `\boxed`, else the number after `####` or `The answer is`; flexible, where there is
    none of these, the last number."""


class Gsm8k(Task[Gsm8kArgs]):
    """Word problems whose answer is a number. Verdicts have the parts `strict` and `flexible`, both always."""

    Args = Gsm8kArgs
    stop: ClassVar[tuple[str, ...]] = ("[Question]", "Question:", "Q:", "\n\n\n")

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer; none in a conversation."""
        return stops_of(self.args, self.stop)

    def problems(self, split: str) -> Sequence[Problem]:
        """All rows of a split."""
        rows = self._rows(split)
        examples = self._examples(rows if split == "train" or not self.args.shots else self._rows("train"))
        return [self._problem(split, number, row, examples) for number, row in enumerate(rows)]

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the answer ends with the right number."""
        return judge_number(problem.row["answer"], cut(answer.text, self.stops), self.args.extraction)

    def _rows(self, split: str) -> list[Row]:
        files = (f"{split}.jsonl", f"main/{split}-*.parquet", *files_of(split))
        return load_rows(self.args.source, default="openai/gsm8k", files=files)

    def _examples(self, rows: Sequence[Row]) -> list[Example]:
        where = f"{self.name}, split train"
        first = enumerate(rows[: self.args.shots + 1])  # one more, because a question is not its own example
        return [Example(text_of(row, "question", n, where), self._solution(row, n, where)) for n, row in first]

    def _solution(self, row: Row, number: int, where: str) -> str:
        r"""The worked solution as an answer would be written: `The answer is 72.`, in a conversation `\boxed{72}`."""
        worked, _, final = text_of(row, "answer", number, where).rpartition(MARK)
        final = final.strip()
        said = f"The answer is {final}." if self.args.format == "plain" else f"The answer is \\boxed{{{final}}}."
        return "\n".join([*([CALCULATOR.sub("", worked).strip()] if worked.strip() else []), said])

    def _problem(self, split: str, number: int, row: Row, examples: Sequence[Example]) -> Problem:
        where = f"{self.name}, split {split}"
        question = text_of(row, "question", number, where)
        final = text_of(row, "answer", number, where).rpartition(MARK)[2].strip()
        if number_of(final) is None:
            raise UsageError(f"{where}, row {number + 1}: the answer {final!r:.60} is no number")
        known = {"question": question, "answer": final, "solution": self._solution(row, number, where)}
        prompt = ask(self.args, LAYOUT, question, shown(self.args, examples, question))
        return Problem(self.id(split, number), prompt, known)
