"""Evaluation records and estimates: answers.jsonl, accuracy, pass@k without bias, standard errors."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from palestra.errors import PalestraError
from palestra.rollout.types import Trajectory
from palestra.runs.store import written
from palestra.tasks.task import Status, Verdict

Mode = Literal["greedy", "samples"]
"""The most likely answer, or several that are drawn."""


@dataclass(frozen=True)
class Judged:
    """One answer with its verdict."""

    text: str
    tokens: int
    """How many the model wrote."""
    stop_reason: str
    """eos, stop or length."""
    verdict: Verdict

    @classmethod
    def of(cls, trajectory: Trajectory) -> "Judged":
        """What a workflow gave."""
        return cls(trajectory.completion, trajectory.drawn, trajectory.stop_reason, trajectory.verdict)

    @property
    def correct(self) -> bool:
        """By the status, not by a score above 0: a part of the points is no right answer."""
        return self.verdict.status == Status.CORRECT

    @property
    def truncated(self) -> bool:
        """Whether the limit on new tokens, or the context, ended it."""
        return self.stop_reason == "length"


@dataclass(frozen=True)
class EvaluationRecord:
    """A problem and all answers of one mode to it."""

    id: str
    """Of the problem."""
    task: str
    """Its name in this run."""
    mode: Mode
    prompt: str
    """As the model read it, special tokens included."""
    prompt_tokens: int
    answers: tuple[Judged, ...]
    """None where the prompt leaves no room for an answer, which counts as wrong."""

    @property
    def key(self) -> tuple[str, Mode]:
        """No two records of an evaluation share it."""
        return self.id, self.mode

    @property
    def right(self) -> int:
        """How many of the answers are right."""
        return sum(answer.correct for answer in self.answers)

    @property
    def failed(self) -> bool:
        """Whether a judge failed on an answer, so that nothing is known of it."""
        return any(answer.verdict.status == Status.ERROR for answer in self.answers)


def line(record: EvaluationRecord) -> str:
    """The record as a line of JSON."""
    return json.dumps({**vars(record), "answers": [_plain(answer) for answer in record.answers]}) + "\n"


def write_records(path: Path, records: Iterable[EvaluationRecord]) -> None:
    """Write a file of records atomically."""
    with written(path) as file:
        for record in records:
            file.write(line(record).encode())


def read_records(path: Path) -> list[EvaluationRecord]:
    """The records of a file; what a kill has left of a last line is passed over."""
    return [_record(row) for row in json_lines(path)]


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that only grows; none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                yield json.loads(text)
            except ValueError as error:
                raise PalestraError(f"{path}:{number} is not a line of JSON ({error}); remove the line") from error


def _plain(answer: Judged) -> dict[str, Any]:
    verdict = {**vars(answer.verdict), "status": str(answer.verdict.status), "parts": dict(answer.verdict.parts)}
    return {"text": answer.text, "tokens": answer.tokens, "stop_reason": answer.stop_reason, **verdict}


def _record(row: dict[str, Any]) -> EvaluationRecord:
    answers = tuple(_judged(answer) for answer in row.pop("answers"))
    return EvaluationRecord(**row, answers=answers)


def _judged(row: dict[str, Any]) -> Judged:
    said = {name: row.pop(name) for name in ("text", "tokens", "stop_reason")}
    return Judged(**said, verdict=Verdict(status=Status(row.pop("status")), **row))


LEVEL, NORMAL = 0.95, 1.959963984540054  # an interval's share, and how many standard errors that is on each side
RESAMPLES, BOOTSTRAP_SEED = 4000, 0


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and how far another draw of problems could lie from it."""

    mean: float
    problems: int
    error: float | None
    """The standard error over problems; null for a single one."""
    interval: tuple[float, float] | None
    """95 %: Wilson's where every value is 0 or 1, else by bootstrap over problems; null for a single one."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n answers, c of them right, drawn without replacement, have a right one.

    1 − C(n−c, k) / C(n, k): the unbiased estimate of the chance for k fresh answers (Chen et al., 2021, equation 1).
    Whether one of the *first* k is right estimates the same with more noise; 1 − (1 − c/n)^k is biased. In whole
    numbers up to the one division, which Python rounds correctly.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass@{k} of {n} answers with {c} right ones: expected 0 ≤ right ≤ answers and 1 ≤ k ≤ answers"
        )
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value a problem."""
    if not values:
        raise ValueError("there are no problems to take a mean over")
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, 1, None, None)
    whole = all(value in (0.0, 1.0) for value in values)
    interval = _wilson(mean, len(values)) if whole else _bootstrap(values)
    return Estimate(mean, len(values), stdev(values) / math.sqrt(len(values)), interval)


def _wilson(share: float, n: int) -> tuple[float, float]:
    """Of a share of n (Wilson, 1927). Unlike resampling it does not call 5 of 5 certain."""
    scale = 1 + NORMAL**2 / n
    center = (share + NORMAL**2 / (2 * n)) / scale
    reach = NORMAL / scale * math.sqrt(share * (1 - share) / n + NORMAL**2 / (4 * n * n))
    return max(0.0, center - reach), min(1.0, center + reach)


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentiles of the means of problems drawn with replacement; the same at every call."""
    import numpy as np

    # Few distinct values, many problems: how often each is drawn says all.
    counts = Counter(values)
    distinct = sorted(counts)
    shares = np.array([counts[value] for value in distinct]) / len(values)
    drawn = np.random.default_rng(BOOTSTRAP_SEED).multinomial(len(values), shares, RESAMPLES)
    low, high = np.quantile(drawn @ np.array(distinct) / len(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


NO_ROOM = "no_room"
"""Stands beside the statuses for prompts that leave no room for an answer in the context."""


@dataclass(frozen=True)
class ProblemOutcome:
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


def outcome(records: Sequence[EvaluationRecord], k: Sequence[int]) -> ProblemOutcome:
    """Of the records of one task and one mode. Every problem counts, also one that leaves no room for an answer."""
    answers = [answer for record in records for answer in record.answers]
    statuses = Counter(str(answer.verdict.status) for answer in answers)
    without = sum(not record.answers for record in records)
    names = dict.fromkeys(name for answer in answers for name in answer.verdict.parts)
    return ProblemOutcome(
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


def task_metrics(task: str, greedy: ProblemOutcome | None, samples: ProblemOutcome | None) -> dict[str, float]:
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


def _passed(record: EvaluationRecord, k: int) -> float:
    return pass_at_k(len(record.answers), record.right, k) if record.answers else 0.0


def _estimated(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean} | ({} if found.error is None else {f"{name}_se": found.error})


def _details(prefix: str, found: ProblemOutcome) -> dict[str, float]:
    rates = {status: count / max(1, found.answers) for status, count in found.statuses.items() if status != NO_ROOM}
    named = {"score": found.score, "truncated": found.truncated, "tokens": found.tokens}
    named |= {status: rates.get(status, 0.0) for status in ("unparsable", "timeout", "error")}
    named |= {NO_ROOM: found.statuses.get(NO_ROOM, 0) / found.problems}
    named |= {f"parts/{name}": value for name, value in found.parts.items()}
    return {f"{prefix}/{name}": value for name, value in named.items()}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


@contextmanager
def growing(path: Path, kept: Iterable[str]) -> Iterator[Callable[[str], None]]:
    """What appends a line that is on the disk's way when it returns; the file begins anew with the lines in `kept`.

    Those are what an earlier process left, without its torn last line and what has to be done again.
    """
    with written(path) as file:
        file.writelines(line.encode() for line in kept)
    with path.open("a", encoding="utf-8") as file:

        def append(line: str) -> None:
            file.write(line)
            file.flush()

        yield append
