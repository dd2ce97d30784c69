"""Questions with short answers in any file: SVAMP and its like as JSON lines, Parquet or Arrow, columns as they are."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from palestra.data.readers import Row
from palestra.errors import UsageError
from palestra.tasks.dataset import files_of, load_rows, text_of
from palestra.tasks.prompts import Layout, PromptArgs, Shot, ask, shown, stops_of
from palestra.tasks.task import Answer, Problem, Task, Verdict
from palestra.tasks.verify.final_answers import Extraction, judge_math, judge_number, judge_words, number_of
from palestra.tasks.verify.latex.compare import import_values, memory_capped, require_math_verify
from palestra.tasks.verify.latex.extract import cut

LAYOUT = Layout("Q: {question}\nA:")
JUDGES: dict[str, Callable[[str, str, Extraction], Verdict]] = {
    "number": judge_number,
    "words": judge_words,
}


class AnswersArgs(PromptArgs):
    """What the task is told."""

    source: str = Field(min_length=1)
    """A file, or a folder, URL or name on the Hub with files for the splits, such as train.jsonl and test.jsonl."""
    question: list[str] = Field(default=["question"], min_length=1)
    """The columns of the question, put together in this order; `a.b` is inside of `a`, `a.0` its first."""
    answer: str | None = Field(default="answer", min_length=1)
    """The column of the answer; null where there is none and a `reward` judges."""
    solution: str | None = None
    """The column of a worked solution, for `shots`; null shows the answer alone."""
    id: str | None = None
    """The column that identifies a row; null counts them."""
    compare: Literal["number", "math", "words"] = "number"
    """What answers are: numbers, mathematical expressions (extra `eval`), or words, case and punctuation aside."""
    extraction: Extraction = "flexible"
    r"""What counts as the answer: a `\boxed`, else what follows `####` or "the answer is"; flexible, where there is
    none of these, the last number, formula or line."""


class Answers(Task[AnswersArgs]):
    """Questions of your own. Verdicts have the parts `strict` and `flexible`, whatever the score is."""

    Args = AnswersArgs
    isolated: ClassVar[bool] = True
    stop: ClassVar[tuple[str, ...]] = ("Question:", "Q:", "\n\n\n")

    def __init__(self, args: AnswersArgs, name: str):
        super().__init__(args, name)
        self._capped = False
        if args.compare == "math":
            require_math_verify(name)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer; none in a conversation."""
        return stops_of(self.args, self.stop)

    def problems(self, split: str) -> Sequence[Problem]:
        """All rows of a split."""
        rows = self._rows(split)
        train = rows if split == "train" or not self.args.shots else self._rows("train")
        examples = [self._example(row, number) for number, row in enumerate(train[: self.args.shots + 1])]
        found = [self._problem(split, number, row, examples) for number, row in enumerate(rows)]
        if self.args.id is not None and len({problem.id for problem in found}) < len(found):
            raise UsageError(f"{self.name}, split {split}: two rows have the same {self.args.id!r}; leave `id` out")
        return found

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the answer ends with what the row says."""
        if self.args.answer is None:
            raise UsageError(f"{self.name}: `answer` is null: without the right answers, give the task a `reward`")
        with memory_capped(self._capped):
            text, gold = cut(answer.text, self.stops), problem.row["answer"]
            if self.args.compare == "math":
                return judge_math(gold, text, self.args.extraction, problem.row.get("question", ""))
            return JUDGES[self.args.compare](gold, text, self.args.extraction)

    def warm_up(self) -> None:
        """Import sympy where it may be needed, and keep to little memory: called in a process that only judges."""
        if self.args.compare == "math":
            import_values()
            self._capped = True

    def _rows(self, split: str) -> list[Row]:
        return load_rows(self.args.source, default=self.args.source, files=files_of(split))

    def _question(self, row: Row, number: int, where: str) -> str:
        return " ".join(text_of(row, column, number, where).strip() for column in self.args.question)

    def _example(self, row: Row, number: int) -> Shot:
        where = f"{self.name}, split train"
        return Shot(self._question(row, number, where), self._solution(row, number, where))

    def _answer(self, row: Row, number: int, where: str) -> str:
        return "" if self.args.answer is None else text_of(row, self.args.answer, number, where).strip()

    def _solution(self, row: Row, number: int, where: str) -> str:
        answer = self._answer(row, number, where)
        said = f"The answer is {answer}." if self.args.format == "plain" else f"The answer is \\boxed{{{answer}}}."
        if self.args.solution is None:
            return said
        return f"{text_of(row, self.args.solution, number, where).strip()}\n{said}"

    def _problem(self, split: str, number: int, row: Row, examples: Sequence[Shot]) -> Problem:
        where = f"{self.name}, split {split}"
        question = self._question(row, number, where)
        answer = self._answer(row, number, where)
        if self.args.answer and self.args.compare == "number" and number_of(answer) is None:
            raise UsageError(
                f"{where}, row {number + 1}: the answer {answer!r:.60} is no number; `compare` can be math or words"
            )
        name = number if self.args.id is None else text_of(row, self.args.id, number, where)
        known = {**row, "question": question, "answer": answer, "solution": self._solution(row, number, where)}
        prompt = ask(self.args, LAYOUT, question, shown(self.args, examples, question))
        return Problem(self.id(split, name), prompt, known)
