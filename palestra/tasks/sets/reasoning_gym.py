"""The task `reasoning_gym`: any of the generated tasks of the package of that name, with its own scoring.

Some of its generators iterate over sets of strings, whose order differs from process to process. So problems are made
in a process of their own, with a fixed hash seed, and the entry that the scorer needs is part of the row.
"""

import ast
import json
import os
import re
from collections.abc import Sequence
from functools import cache, cached_property
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from palestra.errors import MissingExtra, UsageError, did_you_mean
from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict
from palestra.work.pool import Pool, TaskFailed

HELD_OUT_PART = 10
"""One problem in ten, by a hash of the question, is held out."""


class ReasoningGymArgs(TaskArgs):
    """Args of `reasoning_gym`."""

    task: str = Field(min_length=1)
    """The name of the task there, such as leg_counting."""
    seed: int = Field(default=0, ge=0)
    """The seed of its problems."""
    size: int = Field(default=1000, ge=1)
    """How many problems are made; those asked twice are left out, and one in ten is held out."""
    config: dict[str, Any] = Field(default={})
    """The config of the task there, such as {min_animals: 2}; see its documentation."""
    format: Literal["plain", "chat"] = "plain"
    """Prompts as a text to continue, or as a question in a conversation."""
    partial: bool = False
    """Score answers as the package does, which knows half-right ones; else an answer is right or not."""


class ReasoningGym(Task[ReasoningGymArgs]):
    """Problems and scoring of the package reasoning-gym.

    In plain text all of an answer counts, or what stands in its last `<answer>…</answer>`; in a conversation only that.
    """

    Args = ReasoningGymArgs
    isolated = True  # its scorers parse and compute what the model wrote
    named, extra = "task", "reasoning-gym"

    @classmethod
    def names(cls) -> dict[str, str]:
        """Its tasks, read from the text of its modules: importing it takes seconds."""
        found = find_spec("reasoning_gym")
        if found is None or found.origin is None:
            raise MissingExtra("the task reasoning_gym", "reasoning-gym")
        modules = sorted(Path(found.origin).parent.rglob("*.py"))
        texts = (text for path in modules if "register_dataset(" in (text := path.read_text()))
        named = (re.findall(r'^DATASET_NAME = "(\w+)"|^register_dataset\(\s*"(\w+)"', text, re.M) for text in texts)
        listed = dict.fromkeys(sorted(a or b for pairs in named for a, b in pairs), "")
        return listed | {"composite": "the tasks that it mixes, as `config: {datasets: …}`"}

    @property
    def stops(self) -> tuple[str, ...]:
        """Plain completions end with an empty line, because some answers have several lines."""
        if self.args.stop is not None:
            return tuple(self.args.stop)
        return ("\n\n",) if self.args.format == "plain" else ()

    def problems(self, split: str) -> Sequence[Problem]:
        """The different problems of a split."""
        self.check_split(split)
        problems: dict[str, Problem] = {}
        for entry in _entries(self.args.task, self.args.seed, self.args.size, json.dumps(self.args.config)):
            digest = blake2b(entry["question"].encode(), digest_size=8)
            held_out = int.from_bytes(digest.digest(), "little") % HELD_OUT_PART == 0
            if held_out == (split == "test"):
                problems.setdefault(digest.hexdigest(), self._problem(split, digest.hexdigest(), entry))
        if not problems:
            raise UsageError(
                f"{self.name}: none of {self.args.size} problems of {self.args.task} is in the split '{split}'; "
                "make more of them with `size`"
            )
        return list(problems.values())

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """As the package scores it."""
        tagged = re.findall(r"<answer>(.*?)</answer>", completion.text, re.DOTALL)
        text = tagged[-1].strip() if tagged else completion.text.strip()
        if not text or (self.args.format == "chat" and not tagged):
            return Verdict(0.0, Status.UNPARSABLE, {"score": 0.0})
        score = float(self._scorer.score_answer(text, ast.literal_eval(problem.row["entry"])))
        right = score >= 1.0
        status = Status.CORRECT if right else Status.WRONG
        return Verdict(score if self.args.partial else float(right), status, {"score": score}, note=text[:200])

    def warm_up(self) -> None:
        """Load the package, which takes seconds that no answer should pay for."""
        _ = self._scorer

    @cached_property
    def _scorer(self) -> Any:
        return _dataset(self.args.task, self.args.seed, 1, self.args.config)

    def _problem(self, split: str, row: str, entry: dict[str, Any]) -> Problem:
        question, chat = entry["question"].strip(), self.args.format == "chat"
        data = {"answer": entry["answer"], "entry": entry["entry"]}
        if entry["answer"] is not None:  # some puzzles have many answers and give none
            data["solution"] = f"<answer>{entry['answer']}</answer>" if chat else f" {entry['answer']}"
        if not chat:
            return Problem(self.id(split, row), f"{question}\nAnswer:", data)
        request = f"{question}\n\nThink first. Then write the answer alone between <answer> and </answer>."
        return Problem(self.id(split, row), ({"role": "user", "content": request},), data)


@cache
def _maker() -> Pool:
    """The process that makes problems: importing the package takes seconds, once."""
    return Pool(1, name="reasoning_gym", env={"PYTHONHASHSEED": "0"})


@cache
def _entries(task: str, seed: int, size: int, config: str) -> list[dict[str, Any]]:
    """Question, answer and entry of all problems, made in another process."""
    if find_spec("reasoning_gym") is None:
        raise MissingExtra("the task reasoning_gym", "reasoning-gym")
    made = _maker().submit(_made_entries, task, seed, size, config, log=Path(os.devnull))  # the package prints
    try:
        return made.result()
    except TaskFailed as error:
        raise UsageError(f"reasoning_gym cannot make problems of {task!r}: {error.message}") from error


def _dataset(task: str, seed: int, size: int, config: dict[str, Any]) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **config)


def _literal(value: Any) -> Any:
    """What `ast.literal_eval` can give back: tuples stay tuples, which some scorers ask for."""
    if isinstance(value, dict):
        return {_literal(key): _literal(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_literal, value)) if type(value) in (list, tuple, set) else [_literal(v) for v in value]
    if hasattr(value, "item"):  # numbers and texts of NumPy
        return _literal(value.item())
    try:
        return value if ast.literal_eval(repr(value)) == value else repr(value)
    except (ValueError, SyntaxError):
        return repr(value)


def _made_entries(task: str, seed: int, size: int, config: str) -> list[dict[str, Any]]:
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        names = f"It has: {', '.join(sorted(DATASETS))}"
        raise UsageError(f"it has no such task. {did_you_mean(task, DATASETS)} {names}".replace("  ", " "))
    try:
        made = _dataset(task, seed, size, json.loads(config))
        # From the first on, because some sample each from a generator that they keep.
        entries = [made[number] for number in range(size)]
    except (AssertionError, TypeError, ValueError) as error:  # how its tasks refuse a config
        raise UsageError(f"{type(error).__name__}: {error}") from error
    return [{"question": e["question"], "answer": e["answer"], "entry": repr(_literal(e))} for e in entries]
