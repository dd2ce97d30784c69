"""The tasks `gsm8k`, `math`, `aime` and `answers`: questions whose final answer is compared with the row's."""

import json
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import islice, repeat
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field

from palestra.data.readers import Row
from palestra.errors import MissingExtra, UsageError
from palestra.tasks.dataset import files_of, load_rows, text_of
from palestra.tasks.task import Completion, Message, Problem, Task, TaskArgs, Verdict
from palestra.tasks.verify.final_answers import VERIFIERS, Comparison, Extraction, number_of
from palestra.tasks.verify.latex.compare import memory_capped
from palestra.tasks.verify.latex.extract import cut, last_boxed
from palestra.tasks.verify.latex.normalize import plain_text
from palestra.tasks.verify.lm_eval import Rule, verify_gsm8k, verify_minerva

BOXED = "{question}\n\nReason step by step, and put your final answer within \\boxed{}."
"""The template of a question in a conversation."""
LM_EVAL_SEED = 1234
"""Of lm-eval's worked examples: each prompt has others, sampled one prompt after the other."""
MINERVA = Path(__file__).with_name("minerva.json")
"""The worked examples of Minerva (Lewkowycz et al., 2022), with their boxes as lm-eval has them."""
CALCULATOR = re.compile(r"<<[^>]*>>")  # GSM8K's annotations of the steps of a solution


class QuestionArgs(TaskArgs):
    """Args of every task of questions."""

    format: Literal["chat", "plain"] = "chat"
    """Ask in a conversation, for models with a chat template; or as plain text, for base models."""
    system: str | None = None
    """The system prompt; in plain text, what comes first. Null means none."""
    template: str | None = Field(default=None, pattern=r"\{question\}")
    """How a question is put, with `{question}` in its place; null takes the task's own template."""
    shots: int = Field(default=0, ge=0, le=64)
    """How many worked examples precede the question: the first of the train split."""
    extraction: Extraction = "flexible"
    r"""What of a completion is its answer: a `\boxed`, else what follows `####` or "the answer is"; flexible, where
    there is none of these, the last number, formula or line."""


A = TypeVar("A", bound=QuestionArgs)


class Question(NamedTuple):
    """A row of a task of questions."""

    id: str | int
    text: str
    row: Mapping[str, Any]
    """Has an `answer`, and a `solution` where it can be a worked example."""


class Questions(Task[A]):
    """Questions with a final answer. Verdicts have the parts `strict` and `flexible`, whichever the score is."""

    isolated: ClassVar[bool] = True
    template: ClassVar[str] = "Q: {question}\nA:"
    """How a question is put in plain text."""
    compare: Comparison = "math"

    def __init__(self, args: A, name: str):
        super().__init__(args, name)
        self._capped = False
        if self.compare == "math" and find_spec("math_verify") is None:
            raise MissingExtra(f"the task {name}", "eval")

    @property
    def asked(self) -> str:
        """How a question is put, unless the args say it."""
        return self.template if self.args.format == "plain" else BOXED

    @abstractmethod
    def questions(self, split: str) -> Iterator[Question]:
        """The questions of a split, in the order of their rows."""

    @property
    def stops(self) -> tuple[str, ...]:
        """None in a conversation: the strings of `stop` begin another question of plain text."""
        return super().stops if self.args.format == "plain" or self.args.stop is not None else ()

    def problems(self, split: str) -> Sequence[Problem]:
        questions = list(self.questions(split))
        examples = self.examples(questions, split) if self.args.shots else repeat(())
        return [
            Problem(self.id(split, one.id), self._prompt(one.text, shots), one.row)
            for one, shots in zip(questions, examples, strict=False)
        ]

    def examples(self, questions: Sequence[Question], split: str) -> Iterator[Sequence[Question]]:
        """The worked examples before each question; one more than are shown, because none is its own example."""
        train = questions if split == "train" else self.questions("train")
        worked = (question for question in train if "solution" in question.row)
        return repeat(list(islice(worked, self.args.shots + 1)))

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        text, row = cut(completion.text, self.stops), problem.row
        question = row.get("question") or row.get("problem", "")
        with memory_capped(self._capped):
            return VERIFIERS[self.compare](row["answer"], text, self.args.extraction, question)

    def warm_up(self) -> None:
        """Import sympy, and limit memory from now on: this runs in a process that only verifies."""
        if self.compare == "math":
            import_module("palestra.tasks.verify.latex.values")
            self._capped = True

    def _prompt(self, question: str, shots: Sequence[Question]) -> str | tuple[Message, ...]:
        args = self.args
        template = args.template or self.asked
        others = [shot for shot in shots if shot.text != question][: args.shots]
        worked = [(template.replace("{question}", shot.text), shot.row["solution"]) for shot in others]
        asked = template.replace("{question}", question)
        if args.format == "plain":
            return "\n\n".join([*filter(None, [args.system]), *map(" ".join, worked), asked])
        messages = [{"role": "system", "content": args.system}] if args.system else []
        for text, solution in worked:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": solution}]
        return (*messages, {"role": "user", "content": asked})

    def _solution(self, worked: str, answer: str) -> str:
        r"""A worked solution as a model would write it: `The answer is 72.`, in a conversation `\boxed{72}`."""
        final = f"The answer is {answer}." if self.args.format == "plain" else f"The answer is \\boxed{{{answer}}}."
        return f"{worked.strip()}\n{final}" if worked.strip() else final


class Gsm8kArgs(QuestionArgs):
    """Args of `gsm8k`."""

    source: str | None = None
    """A file, folder, URL or name on the Hub, with `question` and `answer`; null takes openai/gsm8k."""
    rule: Rule | None = None
    """lm-eval's rule, `strict-match` or `flexible-extract`, in place of `extraction`; null: ours."""
    prompt: Literal["lm_eval"] | None = None
    """Template, stop strings and worked examples of lm-eval, these sampled by its seed; null: ours."""


class Gsm8k(Questions[Gsm8kArgs]):
    """Word problems whose answer is a number."""

    Args = Gsm8kArgs
    isolated: ClassVar[bool] = False
    stop: ClassVar[tuple[str, ...]] = ("[Question]", "Question:", "Q:", "\n\n\n")
    compare: Comparison = "number"

    @property
    def asked(self) -> str:
        return super().asked if self.args.prompt is None else "Question: {question}\nAnswer:"

    @property
    def stops(self) -> tuple[str, ...]:
        theirs = self.args.prompt is not None and self.args.stop is None
        return ("Question:", "</s>", "<|im_end|>") if theirs else super().stops

    def examples(self, questions: Sequence[Question], split: str) -> Iterator[Sequence[Question]]:
        if self.args.prompt is None:
            return super().examples(questions, split)
        train, draw = list(self.questions("train")), Random(LM_EVAL_SEED)
        return (draw.sample(train, self.args.shots) for _ in questions)

    def questions(self, split: str) -> Iterator[Question]:
        where, files = f"{self.name}, split {split}", (f"{split}.jsonl", f"main/{split}-*.parquet", *files_of(split))
        for number, row in enumerate(load_rows(self.args.source, default="openai/gsm8k", files=files)):
            question = text_of(row, "question", number, where)
            solved = text_of(row, "answer", number, where)
            worked, _, answer = solved.rpartition("####")
            answer = answer.strip()
            if number_of(answer) is None:
                raise UsageError(f"{where}, row {number + 1}: the answer {answer!r:.60} is not a number")
            solution = solved if self.args.prompt else self._solution(CALCULATOR.sub("", worked), answer)
            yield Question(number, question, {"question": question, "answer": answer, "solution": solution})

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        if self.args.rule is None:
            return super().verify(problem, completion)
        return verify_gsm8k(problem.row["answer"], cut(completion.text, self.stops), self.args.rule)


class AnswersArgs(QuestionArgs):
    """Args of `answers`."""

    source: str = Field(min_length=1)
    """A file, or a folder, URL or name on the Hub with files for the splits, such as train.jsonl and test.jsonl."""
    question: list[str] = Field(default=["question"], min_length=1)
    """The columns of the question, joined in this order; `a.b` is inside of `a`, `a.0` its first."""
    answer: str | None = Field(default="answer", min_length=1)
    """The column of the answer; null where there is none and a `reward` scores completions."""
    solution: str | None = None
    """The column of a worked solution, for `shots`; null shows the answer alone."""
    id: str | None = None
    """The column that identifies a row; null counts them."""
    compare: Comparison = "number"
    """What answers are: numbers, mathematical expressions (extra `eval`), or words, case and punctuation aside."""


class Answers(Questions[AnswersArgs]):
    """Questions from any file: SVAMP and its like as JSON lines, Parquet or Arrow."""

    Args = AnswersArgs
    stop: ClassVar[tuple[str, ...]] = ("Question:", "Q:", "\n\n\n")

    def __init__(self, args: AnswersArgs, name: str):
        self.compare = args.compare
        super().__init__(args, name)

    def questions(self, split: str) -> Iterator[Question]:
        args, where, ids = self.args, f"{self.name}, split {split}", set()
        for number, row in enumerate(load_rows(args.source, default=args.source, files=files_of(split))):
            question = " ".join(text_of(row, column, number, where).strip() for column in args.question)
            answer = "" if args.answer is None else text_of(row, args.answer, number, where).strip()
            if args.answer is not None and self.compare == "number" and number_of(answer) is None:
                why = f"the answer {answer!r:.60} is not a number; `compare` can be math or words"
                raise UsageError(f"{where}, row {number + 1}: {why}")
            if args.answer is not None and self.compare == "words" and not plain_text(answer):
                why = f"the answer {answer!r:.60} has no letters and no digits; `compare` can be number or math"
                raise UsageError(f"{where}, row {number + 1}: {why}")
            id = number if args.id is None else text_of(row, args.id, number, where)
            if id in ids:
                raise UsageError(f"{where}: two rows have the same {args.id!r}; leave `id` out")
            ids.add(id)
            worked = "" if args.solution is None else text_of(row, args.solution, number, where)
            known = {"question": question, "answer": answer, "solution": self._solution(worked, answer)}
            yield Question(id, question, {**row, **known})

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        if self.args.answer is None:
            raise UsageError(f"{self.name}: `answer` is null: without the right answers, give the task a `reward`")
        return super().verify(problem, completion)


class MathArgs(QuestionArgs):
    """Args of `math`."""

    source: str | None = None
    """A file, folder, URL or name on the Hub, with `problem` and `solution` or `answer`; null takes the 12,500 of
    EleutherAI/hendrycks_math; math500 under `PALESTRA_DATA`, or HuggingFaceH4/MATH-500, has 500 of its test split."""
    levels: list[Annotated[int, Field(ge=1, le=5)]] | None = Field(default=None, min_length=1)
    """Only problems of these levels, 1 to 5; null means all."""
    subjects: list[str] | None = Field(default=None, min_length=1)
    """Only problems of these subjects, such as algebra or counting_and_probability; null means all."""
    rule: Literal["lm_eval_math_verify"] | None = None
    """The metric `math_verify` of lm-eval's minerva_math, in place of `extraction`; null: ours."""
    prompt: Literal["lm_eval"] | None = None
    """Template, stop strings and the four worked examples of lm-eval's minerva_math; null: ours."""


class Math(Questions[MathArgs]):
    """Competition problems in LaTeX. Ids count within a subject, before `levels` and `subjects` are applied."""

    Args = MathArgs
    stop: ClassVar[tuple[str, ...]] = ("Problem:", "\n\n\n")
    template: ClassVar[str] = "Problem:\n{question}\n\nSolution:"

    @property
    def asked(self) -> str:
        return super().asked if self.args.prompt is None else self.template

    @property
    def stops(self) -> tuple[str, ...]:
        theirs = self.args.prompt is not None and self.args.stop is None
        return ("Problem:",) if theirs else super().stops

    def examples(self, questions: Sequence[Question], split: str) -> Iterator[Sequence[Question]]:
        if self.args.prompt is None:
            return super().examples(questions, split)
        rows = json.loads(MINERVA.read_text())
        if self.args.shots > len(rows):
            raise UsageError(f"{self.name}: minerva_math has {len(rows)} worked examples, not {self.args.shots}")
        return repeat([Question(number, row["problem"], row) for number, row in enumerate(rows)])

    def questions(self, split: str) -> Iterator[Question]:
        files = (f"hendrycks_math_*_{split}.json", *files_of(split))
        rows = load_rows(self.args.source, default="EleutherAI/hendrycks_math", folder="math", files=files)
        counts: Counter[str] = Counter()
        for number, row in enumerate(rows):
            known = _math_row(row, number, f"{self.name}, split {split}")
            path = str(row.get("unique_id") or "").removesuffix(".json")  # MATH-500: test/precalculus/807.json
            subject = known["subject"]
            yield Question("/".join(path.split("/")[-2:]) or f"{subject}/{counts[subject]}", known["problem"], known)
            counts[subject] += 1

    def problems(self, split: str) -> Sequence[Problem]:
        problems = super().problems(split)
        known = {problem.row["subject"] for problem in problems}
        subjects = set(self.args.subjects or known)
        levels = self.args.levels or {problem.row["level"] for problem in problems}
        if unknown := subjects - known:
            raise UsageError(
                f"{self.name}: there is no subject {', '.join(sorted(unknown))}; there is {', '.join(sorted(known))}"
            )
        return [one for one in problems if one.row["level"] in levels and one.row["subject"] in subjects]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        if self.args.rule is None:
            return super().verify(problem, completion)
        solution = problem.row.get("solution") or f"\\boxed{{{problem.row['answer']}}}"
        with memory_capped(self._capped):
            return verify_minerva(solution, cut(completion.text, self.stops))


class AimeArgs(QuestionArgs):
    """Args of `aime`."""

    source: str | None = None
    """A file, folder, URL or name on the Hub, with `problem` and `answer`; null takes the 30 of 2024."""


class Aime(Questions[AimeArgs]):
    """Problems of the American Invitational Mathematics Examination, with answers from 0 to 999; to evaluate on."""

    Args = AimeArgs
    splits: ClassVar[tuple[str, ...]] = ("test",)
    stop: ClassVar[tuple[str, ...]] = Math.stop
    template: ClassVar[str] = Math.template

    def __init__(self, args: AimeArgs, name: str):
        super().__init__(args, name)
        if args.shots:
            raise UsageError(f"{name}: it has no train split, so `shots` must be 0")

    def questions(self, split: str) -> Iterator[Question]:
        files = (*files_of("test"), *files_of("train"))  # the Hub's rows call their only split train
        rows = load_rows(self.args.source, default="HuggingFaceH4/aime_2024", folder="math_eval/aime24", files=files)
        for number, row in enumerate(rows):
            known = _math_row(row, number, f"{self.name}, split {split}")
            yield Question(row.get("id", number), known["problem"], known)


def _math_row(row: Row, number: int, where: str) -> dict[str, Any]:
    """A row under one set of names; the answer is the column `answer`, else what the solution has in its last box."""
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
