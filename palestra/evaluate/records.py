"""Evaluation records and estimates: answers.jsonl, accuracy, unbiased pass@k, standard errors."""

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

from palestra.runs.store import read_lines, write_bytes
from palestra.spec.kinds.evaluate import TokenPrice
from palestra.tasks.task import Status, Verdict

Mode = Literal["greedy", "samples"]
"""One greedy completion, or several that are sampled."""


@dataclass(frozen=True)
class VerifiedCompletion:
    """A completion with its verdict."""

    text: str
    tokens: int
    """How many the model wrote."""
    stop_reason: str
    """eos, stop or length."""
    verdict: Verdict

    @property
    def correct(self) -> bool:
        """By the status, not by a score above 0: partial credit is not a correct answer."""
        return self.verdict.status == Status.CORRECT

    @property
    def truncated(self) -> bool:
        """Whether the limit on new tokens, or the context, ended it."""
        return self.stop_reason == "length"


@dataclass(frozen=True)
class EvaluationRecord:
    """A problem and its completions in one mode."""

    id: str
    """Of the problem."""
    task: str
    """Its name in this run."""
    mode: Mode
    prompt: str
    """As the model read it, special tokens included."""
    prompt_tokens: int
    answers: tuple[VerifiedCompletion, ...]
    """Empty where the prompt leaves no room for a completion, which counts as wrong."""
    further_tokens: int = 0
    """What further turns read: all that came before each of them."""

    @property
    def key(self) -> tuple[str, Mode]:
        """No two records of an evaluation share it."""
        return self.id, self.mode

    @property
    def right(self) -> int:
        """How many of the completions are correct."""
        return sum(answer.correct for answer in self.answers)

    @property
    def failed(self) -> bool:
        """Whether the verifier failed on a completion, so that nothing is known of it."""
        return any(answer.verdict.status == Status.ERROR for answer in self.answers)


SHOWN = 4
"""Problems of a task and mode in a table of completions."""


def record_rows(records: Iterable[EvaluationRecord], step: int) -> list[dict[str, Any]]:
    """The first completion of each of the first few problems of each task and mode, for people."""
    shown: Counter[tuple[str, str]] = Counter()
    rows = []
    for record in records:
        shown[record.task, record.mode] += 1
        if shown[record.task, record.mode] <= SHOWN and record.answers:
            first = record.answers[0]
            row = {"step": step, "task": record.task, "prompt": record.prompt, "completion": first.text}
            rows.append(row | {"score": first.verdict.score, "status": str(first.verdict.status)})
    return rows


def line(record: EvaluationRecord) -> str:
    """The record as a line of JSON."""
    return json.dumps({**vars(record), "answers": [_plain(answer) for answer in record.answers]}) + "\n"


def write_records(path: Path, records: Iterable[EvaluationRecord]) -> None:
    """Write a file of records atomically."""
    write_bytes(path, "".join(map(line, records)).encode())


def read_records(path: Path) -> list[EvaluationRecord]:
    """The records of a file; a last line that a kill truncated is skipped."""
    return [EvaluationRecord(answers=tuple(map(_completion, row.pop("answers"))), **row) for row in read_lines(path)]


def _plain(answer: VerifiedCompletion) -> dict[str, Any]:
    verdict = {**vars(answer.verdict), "status": str(answer.verdict.status), "parts": dict(answer.verdict.parts)}
    return {"text": answer.text, "tokens": answer.tokens, "stop_reason": answer.stop_reason, **verdict}


def _completion(row: dict[str, Any]) -> VerifiedCompletion:
    written = (row.pop("text"), row.pop("tokens"), row.pop("stop_reason"))
    return VerifiedCompletion(*written, Verdict(status=Status(row.pop("status")), **row))


def usage(records: Iterable[EvaluationRecord], price: TokenPrice | None) -> dict[str, float]:
    """Tokens that the model read and wrote, and what they cost at a price; a prompt is read once for all samples."""
    counts = [
        (record.prompt_tokens + record.further_tokens, sum(answer.tokens for answer in record.answers))
        for record in records
        if record.answers
    ]
    prompt, completion = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    cost = {} if price is None else {"cost": (prompt * price.prompt + completion * price.completion) / 1e6}
    return {"prompt_tokens": prompt, "completion_tokens": completion, **cost}


LEVEL, NORMAL = 0.95, 1.959963984540054  # an interval's share, and how many standard errors that is on each side
RESAMPLES, BOOTSTRAP_SEED = 4000, 0


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, and how far that of another sample of problems could lie from it."""

    mean: float
    problems: int
    error: float | None
    """The standard error over problems; null for a single one."""
    interval: tuple[float, float] | None
    """95 %: Wilson's where every value is 0 or 1, else by bootstrap over problems; null for a single one."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n completions, c of them correct, sampled without replacement, have a correct one.

    1 − C(n−c, k) / C(n, k): the unbiased estimate for k fresh completions (Chen et al., 2021, equation 1). Whether one
    of the *first* k is correct estimates the same with more noise; 1 − (1 − c/n)^k is biased. In integers up to the
    one division, which Python rounds correctly.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass@{k} of {n} completions with {c} correct: expected 0 ≤ correct ≤ completions and 1 ≤ k ≤ completions"
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
    """Percentiles of the means of problems resampled with replacement; the same at every call."""
    import numpy as np

    # Few distinct values, many problems: sampling how often each occurs is enough.
    counts = Counter(values)
    distinct = sorted(counts)
    shares = np.array([counts[value] for value in distinct]) / len(values)
    resampled = np.random.default_rng(BOOTSTRAP_SEED).multinomial(len(values), shares, RESAMPLES)
    low, high = np.quantile(resampled @ np.array(distinct) / len(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


NO_ROOM = "no_room"
"""Counted with the statuses: prompts that leave no room for a completion in the context."""


@dataclass(frozen=True)
class ProblemOutcome:
    """The results of one mode on the problems of a task."""

    problems: int
    answers: int
    accuracy: Estimate
    """The share of correct completions."""
    pass_at: dict[int, Estimate]
    """By k."""
    score: float
    """The mean score, partial credit included."""
    truncated: float
    """The share of completions that were truncated."""
    tokens: float
    """The mean length of a completion."""
    statuses: dict[str, int]
    """Completions by status."""
    parts: dict[str, float]
    """The mean of each part of the scores over all completions; 0 for one that has no such part."""
    sandbox: dict[str, int]
    """Completions by the isolation level of their code, where it was run."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        fields = asdict(self)
        return {**fields, **{f"pass@{k}": passed for k, passed in fields.pop("pass_at").items()}}


def outcome(records: Sequence[EvaluationRecord], k: Sequence[int]) -> ProblemOutcome:
    """Of the records of one task and one mode. Every problem counts, also one without room for a completion."""
    answers = [answer for record in records for answer in record.answers]
    statuses = Counter(str(answer.verdict.status) for answer in answers)
    without = sum(not record.answers for record in records)
    names = dict.fromkeys(name for answer in answers for name in answer.verdict.parts)
    tried = [(len(record.answers), record.right) for record in records]  # n completions, c of them correct
    return ProblemOutcome(
        problems=len(records),
        answers=len(answers),
        accuracy=estimate([c / max(1, n) for n, c in tried]),
        pass_at={each: estimate([pass_at_k(n, c, each) if n else 0.0 for n, c in tried]) for each in k},
        score=fmean(_mean([answer.verdict.score for answer in record.answers]) for record in records),
        truncated=_mean([float(answer.truncated) for answer in answers]),
        tokens=_mean([float(answer.tokens) for answer in answers]),
        statuses={**statuses, **({NO_ROOM: without} if without else {})},
        parts={name: _mean([answer.verdict.parts.get(name, 0.0) for answer in answers]) for name in names},
        sandbox=dict(Counter(answer.verdict.sandbox for answer in answers if answer.verdict.sandbox is not None)),
    )


def task_metrics(task: str, greedy: ProblemOutcome | None, samples: ProblemOutcome | None) -> dict[str, float]:
    """The numbers of a task, `eval/<task>/…`; with greedy ones, the details of sampled ones are under `samples/`."""
    metrics: dict[str, float] = {}
    if greedy is not None:
        metrics |= estimated(f"eval/{task}/accuracy", greedy.accuracy) | _details(f"eval/{task}", greedy)
    if samples is not None:
        for k, passed in samples.pass_at.items():
            metrics |= estimated(f"eval/{task}/pass@{k}", passed)
        metrics |= _details(f"eval/{task}" if greedy is None else f"eval/{task}/samples", samples)
    return metrics


def overall(metrics: Mapping[str, float], tasks: Sequence[str]) -> dict[str, float]:
    """The means over the tasks, each task counting the same: `eval/accuracy`, `eval/pass@k`, `eval/truncated`."""
    first = f"eval/{tasks[0]}/"
    names = [key.removeprefix(first) for key in metrics if key.startswith(first)]
    shown = [name for name in names if re.fullmatch(r"accuracy|truncated|pass@\d+", name)]
    return {f"eval/{name}": fmean(metrics[f"eval/{task}/{name}"] for task in tasks) for name in shown}


def estimated(name: str, estimate: Estimate) -> dict[str, float]:
    """The metrics of an estimate: its mean and, under `…_se`, its standard error."""
    return {name: estimate.mean} | ({} if estimate.error is None else {f"{name}_se": estimate.error})


def _details(prefix: str, results: ProblemOutcome) -> dict[str, float]:
    named = {"score": results.score, "truncated": results.truncated, "tokens": results.tokens}
    for status in ("unparsable", "timeout", "error"):
        named[status] = results.statuses.get(status, 0) / max(1, results.answers)
    named[NO_ROOM] = results.statuses.get(NO_ROOM, 0) / results.problems
    named |= {f"parts/{name}": value for name, value in results.parts.items()}
    return {f"{prefix}/{name}": value for name, value in named.items()}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


@contextmanager
def growing(path: Path, kept: Iterable[str]) -> Iterator[Callable[[str], None]]:
    """Rewrite a file with the lines in `kept`, then yield a function that appends a line and flushes it.

    `kept` is what an earlier process left, without its truncated last line and what has to be done again.
    """
    write_bytes(path, "".join(kept).encode())
    with path.open("a", encoding="utf-8") as file:

        def append(line: str) -> None:
            file.write(line)
            file.flush()

        yield append
