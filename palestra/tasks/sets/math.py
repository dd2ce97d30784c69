"""The tasks `gsm8k`, `math` and `aime`: word problems with numbers, competition problems with expressions."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar

from pydantic import Field

from palestra.data.readers import Row
from palestra.errors import UsageError
from palestra.tasks.dataset import files_of, load_rows, text_of
from palestra.tasks.prompts import Layout, PromptArgs, Shot, ask, shown, stops_of
from palestra.tasks.task import Answer, Message, Problem, Task, Verdict
from palestra.tasks.verify.final_answers import Extraction, judge_math, judge_number, number_of
from palestra.tasks.verify.latex.compare import import_values, memory_capped, require_math_verify
from palestra.tasks.verify.latex.extract import cut, last_boxed

MATH_LAYOUT = Layout("Problem:\n{question}\n\nSolution:")


class MathArgs(PromptArgs):
    """What the task is told."""

    source: str | None = None
    """A file, folder, URL or name on the Hub, with `problem` and `solution` or `answer`; null takes the 12,500 of
    EleutherAI/hendrycks_math; math500 under `PALESTRA_DATA`, or HuggingFaceH4/MATH-500, has 500 of its test split."""
    extraction: Extraction = "flexible"
    r"""What counts as the answer: the last `\boxed`, else what follows `####` or "answer is"; flexible, where there is
    none of these, the last formula or number."""
    levels: list[Annotated[int, Field(ge=1, le=5)]] | None = Field(default=None, min_length=1)
    """Only problems of these levels, 1 to 5; null means all."""
    subjects: list[str] | None = Field(default=None, min_length=1)
    """Only problems of these subjects, such as algebra or counting_and_probability; null means all."""


class Math(Task[MathArgs]):
    """Problems of competitions, in LaTeX. The ids count within a subject, before anything is left out."""

    Args = MathArgs
    isolated: ClassVar[bool] = True
    stop: ClassVar[tuple[str, ...]] = ("Problem:", "\n\n\n")

    def __init__(self, args: MathArgs, name: str):
        super().__init__(args, name)
        self._capped = False
        require_math_verify(name)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer; none in a conversation."""
        return stops_of(self.args, self.stop)

    def problems(self, split: str) -> Sequence[Problem]:
        """The rows of a split, of the levels and subjects that the args name."""
        rows = self._numbered(split)
        examples = self._examples(rows if split == "train" or not self.args.shots else self._numbered("train"))
        subjects, levels = self.args.subjects, self.args.levels
        known = {row["subject"] for row in rows.values()}
        if unknown := set(subjects or ()) - known:
            raise UsageError(
                f"{self.name}: there is no subject {', '.join(sorted(unknown))}; there is {', '.join(sorted(known))}"
            )
        return [
            Problem(self.id(split, name), self._prompt(row["problem"], examples), row)
            for name, row in rows.items()
            if (levels is None or row["level"] in levels) and (subjects is None or row["subject"] in subjects)
        ]

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the answer ends with what is equal to the reference."""
        with memory_capped(self._capped):
            text = cut(answer.text, self.stops)
            return judge_math(problem.row["answer"], text, self.args.extraction, problem.row.get("problem", ""))

    def warm_up(self) -> None:
        """Import sympy, and from now on keep to little memory: called in a process that only judges."""
        import_values()
        self._capped = True

    def _prompt(self, question: str, examples: Sequence[Shot]) -> str | tuple[Message, ...]:
        return ask(self.args, MATH_LAYOUT, question, shown(self.args, examples, question))

    def _examples(self, rows: Mapping[str, Mapping[str, Any]]) -> list[Shot]:
        worked = (Shot(row["problem"], row["solution"]) for row in rows.values() if "solution" in row)
        return list(islice(worked, self.args.shots + 1))  # one more, because a question is not its own example

    def _numbered(self, split: str) -> dict[str, dict[str, Any]]:
        """All rows of a split by what identifies each, whatever is asked for."""
        files = (f"hendrycks_math_*_{split}.json", *files_of(split))
        rows = load_rows(self.args.source, default="EleutherAI/hendrycks_math", folder="math", files=files)
        counted: Counter[str] = Counter()
        found = {}
        for number, row in enumerate(rows):
            known = _known(row, number, f"{self.name}, split {split}")
            given = str(row.get("unique_id") or "").removesuffix(".json")  # MATH-500: test/precalculus/807.json
            name = "/".join(given.split("/")[-2:]) or f"{known['subject']}/{counted[known['subject']]}"
            found[name] = known
            counted[known["subject"]] += 1
        return found


class AimeArgs(PromptArgs):
    """What the task is told."""

    source: str | None = None
    """A file, folder, URL or name on the Hub, with `problem` and `answer`; null takes the 30 of 2024."""
    extraction: Extraction = "flexible"
    """As for `math`."""


class Aime(Task[AimeArgs]):
    """Problems of the American Invitational Mathematics Examination, with answers from 0 to 999; to evaluate on."""

    Args = AimeArgs
    splits: ClassVar[tuple[str, ...]] = ("test",)
    isolated: ClassVar[bool] = True
    stop: ClassVar[tuple[str, ...]] = Math.stop

    def __init__(self, args: AimeArgs, name: str):
        super().__init__(args, name)
        self._capped = False
        require_math_verify(name)
        if args.shots:
            raise UsageError(f"{name}: it has no train split, so `shots` must be 0")

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer; none in a conversation."""
        return stops_of(self.args, self.stop)

    def problems(self, split: str) -> Sequence[Problem]:
        """All rows."""
        rows = load_rows(
            self.args.source,
            default="HuggingFaceH4/aime_2024",  # which calls its only split train
            folder="math_eval/aime24",
            files=(*files_of("test"), *files_of("train")),
        )
        found = []
        for number, row in enumerate(rows):
            known = _known(row, number, f"{self.name}, split {split}")
            prompt = ask(self.args, MATH_LAYOUT, known["problem"])
            found.append(Problem(self.id(split, row.get("id", number)), prompt, known))
        return found

    def judge(self, problem: Problem, answer: Answer) -> Verdict:
        """Whether the answer ends with the right number."""
        with memory_capped(self._capped):
            text = cut(answer.text, self.stops)
            return judge_math(problem.row["answer"], text, self.args.extraction, problem.row.get("problem", ""))

    def warm_up(self) -> None:
        """As of `Math`."""
        import_values()
        self._capped = True


def _known(row: Row, number: int, where: str) -> dict[str, Any]:
    """A row under one set of names; the answer is what the solution has in its last box, unless the row says it."""
    solution = str(row.get("solution") or "")
    boxed = last_boxed(solution)
    answer = text_of(row, "answer", number, where) if boxed is None or "answer" in row else boxed
    level = re.fullmatch(r"(?:Level )?([1-5])", str(row.get("level", "")))
    subject = str(row.get("type") or row.get("subject") or "other").lower().replace("&", "and")
    return {
        "problem": text_of(row, "problem", number, where),
        "answer": answer.strip(),
        **({"solution": solution} if solution else {}),
        "level": None if level is None else int(level[1]),
        "subject": "_".join(subject.split()),
    }


GSM8K_LAYOUT = Layout("Q: {question}\nA:")
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

    def _examples(self, rows: Sequence[Row]) -> list[Shot]:
        where = f"{self.name}, split train"
        first = enumerate(rows[: self.args.shots + 1])  # one more, because a question is not its own example
        return [Shot(text_of(row, "question", n, where), self._solution(row, n, where)) for n, row in first]

    def _solution(self, row: Row, number: int, where: str) -> str:
        r"""The worked solution as an answer would be written: `The answer is 72.`, in a conversation `\boxed{72}`."""
        worked, _, final = text_of(row, "answer", number, where).rpartition(MARK)
        final = final.strip()
        said = f"The answer is {final}." if self.args.format == "plain" else f"The answer is \\boxed{{{final}}}."
        return "\n".join([*([CALCULATOR.sub("", worked).strip()] if worked.strip() else []), said])

    def _problem(self, split: str, number: int, row: Row, examples: Sequence[Shot]) -> Problem:
        where = f"{self.name}, split {split}"
        question = text_of(row, "question", number, where)
        final = text_of(row, "answer", number, where).rpartition(MARK)[2].strip()
        if number_of(final) is None:
            raise UsageError(f"{where}, row {number + 1}: the answer {final!r:.60} is no number")
        known = {"question": question, "answer": final, "solution": self._solution(row, number, where)}
        prompt = ask(self.args, GSM8K_LAYOUT, question, shown(self.args, examples, question))
        return Problem(self.id(split, number), prompt, known)
