"""Curricula: lessons that unlock each other, and prompts weighted by their pass rates."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from palestra.data.mixture import Indices, stream_key
from palestra.errors import UsageError
from palestra.spec.tasks import PoolSpec

ALPHA, PRIOR = 0.1, 0.5  # success is a moving average over prompts with this weight of the latest, from this value on
LEARNED, GRADUATED = 0.8, 0.95
"""Success at a plateau from which a lesson unlocks those after it, and from which it is no longer sampled."""
FLOOR = 0.1  # the least weight of an open lesson before normalization
NOVELTY = 0.01  # how fast the bonus of a new lesson decays, per prompt
WINDOW, STRETCH = 50, 10  # a plateau is of the latest WINDOW prompts; their variation is that of means of STRETCH
VARIATION = 0.1
"""Largest coefficient of variation of these means at a plateau; a rise of 1 % a prompt is a variation of 14 %."""
CORRELATION = 0.2353
"""No trend: |r| of time and pass rate is below this, where p > 0.1 in a t-test with WINDOW - 2 degrees of freedom."""


@dataclass
class Lesson:
    """The progress of one lesson."""

    success: float = PRIOR
    seen: int = 0
    """Prompts observed."""
    learned: bool = False
    """Whether it has reached `LEARNED` at a plateau, which unlocks those after it."""
    graduated: bool = False
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The latest pass rates."""

    def observe(self, rate: float) -> None:
        self.success += ALPHA * (rate - self.success)
        self.seen += 1
        self.rates.append(rate)
        flat = plateau(self.rates)
        self.learned = self.learned or (flat and self.success >= LEARNED)
        self.graduated = self.graduated or (flat and self.success >= GRADUATED)


class Lessons:
    """A graph of lessons: `after` names, for each, the lessons that must be learned before it begins."""

    def __init__(self, after: Mapping[str, Sequence[str]], seed: int):
        try:
            TopologicalSorter(after).prepare()
        except CycleError as error:
            cycle = " after ".join(reversed(error.args[1]))
            raise UsageError(f"these lessons wait for each other, so none can begin: {cycle}") from error
        self.after = {name: tuple(before) for name, before in after.items()}
        self.lessons = {name: Lesson() for name in after}
        self._seed = seed

    def open(self, left: Sequence[str]) -> list[str]:
        """The lessons to sample from, of those that have prompts left; one with none left counts as learned.

        Where all of these have graduated, all are sampled again.
        """
        started = [name for name in left if self._unlocked(name, left)]
        return [name for name in started if not self.lessons[name].graduated] or started

    def weights(self, left: Sequence[str]) -> dict[str, float]:
        """The share of each open lesson."""
        raw = {name: weight(self.lessons[name].success, self.lessons[name].seen) for name in self.open(left)}
        damped = {name: max(FLOOR, value / (1 + sum(raw.values()))) for name, value in raw.items()}
        return {name: value / sum(damped.values()) for name, value in damped.items()}

    def choose(self, number: int, left: Sequence[str]) -> str:
        """The lesson of prompt `number`."""
        weights = self.weights(left)
        uniform = stream_key(self._seed, "lesson", number) / 2**64
        for name, share in weights.items():
            uniform -= share
            if uniform < 0:
                return name
        return next(reversed(weights))  # shares that sum to a little less than 1

    def observe(self, label: str, rate: float) -> None:
        self.lessons[label].observe(rate)

    def metrics(self, left: Sequence[str]) -> dict[str, float]:
        weights, metrics = self.weights(left), {}
        for name, lesson in self.lessons.items():
            metrics[f"lessons/{name}/success"] = lesson.success
            metrics[f"lessons/{name}/share"] = weights.get(name, 0.0)
            metrics[f"lessons/{name}/unlocked"] = float(self._unlocked(name, left))
            metrics[f"lessons/{name}/graduated"] = float(lesson.graduated)
        return metrics

    def state(self) -> dict[str, Any]:
        return {name: {**vars(lesson), "rates": list(lesson.rates)} for name, lesson in self.lessons.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in self.lessons:
            self.lessons[name] = Lesson(**state[name])
            self.lessons[name].rates = deque(state[name]["rates"], maxlen=WINDOW)

    def _unlocked(self, name: str, left: Sequence[str]) -> bool:
        return all(self.lessons[other].learned or other not in left for other in self.after[name])


def weight(success: float, seen: int) -> float:
    """The weight of a lesson: 4s(1 - s), largest at s = ½, with a bonus that decays as prompts are seen."""
    return max(0.0, 4 * success * (1 - success)) * (1 + math.exp(-NOVELTY * seen))


def plateau(rates: Sequence[float]) -> bool:
    """Whether the latest pass rates neither rise nor fall, and are steady.

    The variation is that of means of `STRETCH` rates: single ones, of a few completions, vary by chance alone.
    """
    if len(rates) < WINDOW:
        return False
    values = np.array(rates)
    means = values.reshape(-1, STRETCH).mean(axis=1)
    time, away = np.arange(WINDOW) - (WINDOW - 1) / 2, values - values.mean()
    # Rates that are all the same have no correlation, however their mean is rounded.
    spread = (time @ time) * (away @ away) if np.ptp(values) > 0 else 0.0
    correlation = (time @ away) / math.sqrt(spread) if spread > 0 else 0.0
    return bool(means.std() <= VARIATION * means.mean() and abs(correlation) < CORRELATION)


LARGEST = 2**20  # prompts of a pool at most, 8 bytes each
SOLVED = 0.5  # a completion with a score above this counts as solved

Floats = np.ndarray[Any, np.dtype[np.float64]]


def pass_rate(scores: Sequence[float]) -> float:
    """The share of completions with a score above `SOLVED`."""
    return sum(score > SOLVED for score in scores) / len(scores)


class PromptPool:
    """The latest pass rate of each prompt of a task.

    An unseen prompt has weight 1, as has one with a pass rate from `low` to `high`. Easier and harder ones have the
    weight `outside`, and one that reaches the rate `drop` is never sampled again.
    """

    KINDS = ("unseen", "hard", "between", "easy", "dropped")

    def __init__(self, spec: PoolSpec, size: int, label: str):
        if size > LARGEST:
            raise UsageError(
                f"tasks.pool remembers pass rates of at most {LARGEST} prompts, and {label} has {size}: none would be "
                "sampled twice. Give it a `count`"
            )
        self.spec = spec
        self._weights = np.array([1.0, spec.outside, 1.0, spec.outside, 0.0])  # by kind, as are the counts
        self._rates, self._counts = np.full(size, np.nan), np.array([size, 0, 0, 0, 0])

    @property
    def left(self) -> bool:
        return self._heaviest > 0

    @property
    def _heaviest(self) -> float:
        return float(self._weights[self._counts > 0].max())

    def observe(self, index: int, rate: float) -> None:
        before, after = self._kinds(np.array([self._rates[index], rate]))
        if self.KINDS[before] == "dropped":  # completions in flight when it was dropped do not bring it back
            return
        self._rates[index] = rate
        self._counts[before] -= 1
        self._counts[after] += 1

    def chances(self, indices: Indices) -> Floats:
        """The probability that each prompt is sampled when a pass reaches it; 1 for those with the largest weight."""
        return self._weights[self._kinds(self._rates[indices])] / (self._heaviest or 1.0)

    def metrics(self) -> dict[str, float]:
        return dict(zip(self.KINDS, map(float, self._counts), strict=True))

    def state(self) -> dict[str, Any]:
        seen = np.flatnonzero(~np.isnan(self._rates))
        return {"seen": seen.tolist(), "rates": self._rates[seen].tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._rates[:] = np.nan
        self._rates[state["seen"]] = state["rates"]
        self._counts = np.bincount(self._kinds(self._rates), minlength=len(self.KINDS))

    def _kinds(self, rates: Floats) -> Indices:
        """The kind of each pass rate, as a place in `KINDS`."""
        drop = math.inf if self.spec.drop is None else self.spec.drop
        tests = [np.isnan(rates), rates >= drop, rates < self.spec.low, rates > self.spec.high]
        return np.select(tests, [0, 4, 1, 3], 2)
