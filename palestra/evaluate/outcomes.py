"""From judged answers to numbers: accuracy, pass@k, truncation, statuses and parts, of a task and of all."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from palestra.evaluate.estimates import Estimate, estimate, pass_at_k
from palestra.evaluate.records import Record

NO_ROOM = "no_room"
"""Stands beside the statuses for prompts that leave no room for an answer in the context."""


@dataclass(frozen=True)
class Outcome:
    """What the answers of one mode to the problems of a task came to."""

    problems: int
    answers: int
    accuracy: Estimate
    """The share of right answers."""
    pass_at: dict[int, Estimate]
    """By k."""
    score: float
    """The mean of the scores, where a part of the points counts as a part."""
    truncated: float
    """The share of answers that were cut off."""
    tokens: float
    """The mean length of an answer."""
    statuses: dict[str, int]
    """Answers by status."""
    parts: dict[str, float]
    """The mean of each part of the scores over all answers; 0 for an answer that has no such part."""
    sandbox: dict[str, int]
    """Answers by how well their code was locked in, where it was run."""

    def plain(self) -> dict[str, Any]:
        """The same as JSON has it."""
        found = {**asdict(self), **{f"pass@{k}": asdict(passed) for k, passed in self.pass_at.items()}}
        return {name: value for name, value in found.items() if name != "pass_at"}


def outcome(records: Sequence[Record], k: Sequence[int]) -> Outcome:
    """Of the records of one task and one mode. Every problem counts, also one that leaves no room for an answer."""
    answers = [answer for record in records for answer in record.answers]
    statuses = Counter(str(answer.verdict.status) for answer in answers)
    without = sum(not record.answers for record in records)
    names = dict.fromkeys(name for answer in answers for name in answer.verdict.parts)
    return Outcome(
        problems=len(records),
        answers=len(answers),
        accuracy=estimate([record.right / max(1, len(record.answers)) for record in records]),
        pass_at={one: estimate([_passed(record, one) for record in records]) for one in k},
        score=fmean(_mean([answer.verdict.score for answer in record.answers]) for record in records),
        truncated=_mean([float(answer.truncated) for answer in answers]),
        tokens=_mean([float(answer.tokens) for answer in answers]),
        statuses={**statuses, **({NO_ROOM: without} if without else {})},
        parts={name: _mean([answer.verdict.parts.get(name, 0.0) for answer in answers]) for name in names},
        sandbox=dict(Counter(answer.verdict.sandbox for answer in answers if answer.verdict.sandbox is not None)),
    )


def task_metrics(task: str, greedy: Outcome | None, samples: Outcome | None) -> dict[str, float]:
    """The numbers of a task, `eval/<task>/…`; beside greedy answers, the details of drawn ones under `samples/`."""
    found: dict[str, float] = {}
    if greedy is not None:
        found |= _estimated(f"eval/{task}/accuracy", greedy.accuracy) | _details(f"eval/{task}", greedy)
    if samples is not None:
        for k, passed in samples.pass_at.items():
            found |= _estimated(f"eval/{task}/pass@{k}", passed)
        found |= _details(f"eval/{task}" if greedy is None else f"eval/{task}/samples", samples)
    return found


def overall(metrics: Mapping[str, float], tasks: Sequence[str]) -> dict[str, float]:
    """The means over the tasks, each task counting the same: `eval/accuracy`, `eval/pass@k`, `eval/truncated`."""
    first = f"eval/{tasks[0]}/"
    names = [key.removeprefix(first) for key in metrics if key.startswith(first)]
    shown = [name for name in names if re.fullmatch(r"accuracy|truncated|pass@\d+", name)]
    return {f"eval/{name}": fmean(metrics[f"eval/{task}/{name}"] for task in tasks) for name in shown}


def _passed(record: Record, k: int) -> float:
    return pass_at_k(len(record.answers), record.right, k) if record.answers else 0.0


def _estimated(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean} | ({} if found.error is None else {f"{name}_se": found.error})


def _details(prefix: str, found: Outcome) -> dict[str, float]:
    rates = {status: count / max(1, found.answers) for status, count in found.statuses.items() if status != NO_ROOM}
    named = {"score": found.score, "truncated": found.truncated, "tokens": found.tokens}
    named |= {status: rates.get(status, 0.0) for status in ("unparsable", "timeout", "error")}
    named |= {NO_ROOM: found.statuses.get(NO_ROOM, 0) / found.problems}
    named |= {f"parts/{name}": value for name, value in found.parts.items()}
    return {f"{prefix}/{name}": value for name, value in named.items()}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
