"""The problems of an evaluation as tokens, and all that says whether two evaluations asked the same."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.rollout.episode import encode_problem
from palestra.spec.tasks import TaskUse
from palestra.tasks.task import Task
from palestra.tasks.types import Problem


@dataclass(frozen=True)
class Question:
    """A problem, with its prompt as the model reads it."""

    problem: Problem
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Questions:
    """What is asked of one task."""

    use: TaskUse
    stops: tuple[str, ...]
    args: Mapping[str, Any]
    """All args of the task, defaults included."""
    questions: tuple[Question, ...]
    total: int
    """How many problems the split has."""

    @property
    def label(self) -> str:
        """The name of the task in this run."""
        return self.use.label

    @property
    def chat(self) -> bool:
        """Whether the model is asked in conversations."""
        return any(not isinstance(question.problem.prompt, str) for question in self.questions)

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What makes a score on these questions comparable with another; plain data."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(f"{question.problem.id} {question.prompt}\n".encode())
        return {
            "task": self.use.task,
            "split": self.use.split,
            "args": dict(self.args),
            "reward": None if self.use.reward is None else self.use.reward.model_dump(mode="json"),
            "problems": len(self.questions),
            "of": self.total,
            "format": "chat" if self.chat else "plain",
            "stop": list(self.stops),
            "first_prompt": tokenizer.decode(self.questions[0].prompt, specials=True),
            "first_prompt_tokens": list(self.questions[0].prompt),
            "prompts_sha256": digest.hexdigest(),
        }


def ask(uses: Sequence[TaskUse], tasks: Mapping[str, Task], tokenizer: Tokenizer, problems: int) -> list[Questions]:
    """The first `problems` of each task's split, ready to be asked; `tasks` are by label, as `Judges` has them."""
    return [_asked(use, tasks[use.label], tokenizer, problems) for use in uses]


def _asked(use: TaskUse, task: Task, tokenizer: Tokenizer, problems: int) -> Questions:
    found = task.problems(use.split)
    total = len(found)
    if not total:
        raise UsageError(f"the split {use.split!r} of {use.label} has no problems")
    chosen = [found[index] for index in range(min(problems, total))]
    twice = [id for id, count in Counter(problem.id for problem in chosen).items() if count > 1]
    if twice:
        raise UsageError(f"{len(twice)} ids of {use.label} stand for several problems each, {twice[0]} is one of them")
    questions = tuple(Question(problem, encode_problem(problem, tokenizer)) for problem in chosen)
    return Questions(use, task.stops, task.args.model_dump(mode="json"), questions, total)
