"""Prompts drawn by how often they are solved: pass rates, and the weights that follow from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palestra.data.shuffle import Indices
from palestra.errors import UsageError
from palestra.spec.tasks import PoolSpec

LARGEST = 2**20
"""Prompts whose pass rates are remembered at most: 8 bytes each."""
SOLVED = 0.5
"""An answer with a score above this counts as solved."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


def pass_rate(scores: Sequence[float]) -> float:
    """The share of answers that are solved."""
    return sum(score > SOLVED for score in scores) / len(scores)


class Pool:
    """The pass rate of each prompt of a task when it was last answered.

    A prompt that was not answered yet has weight 1, as has one that is solved from `low` to `high` of the time. Easier
    and harder ones have the weight `outside`, and one that is solved `drop` of the time has none from then on.
    """

    def __init__(self, spec: PoolSpec, size: int, label: str):
        if size > LARGEST:
            raise UsageError(
                f"tasks.pool remembers pass rates of at most {LARGEST} prompts, and {label} has {size}: they would "
                f"never be asked twice. Give it a `count`"
            )
        self.spec, self.size = spec, size
        self._rates = np.full(size, np.nan)
        self._counts = {"unseen": size, "hard": 0, "between": 0, "easy": 0, "dropped": 0}

    @property
    def left(self) -> bool:
        """Whether there is a prompt to draw."""
        return self._heaviest > 0

    @property
    def _heaviest(self) -> float:
        counts = self._counts
        if counts["unseen"] or counts["between"]:
            return 1.0
        return self.spec.outside if counts["hard"] or counts["easy"] else 0.0

    def observe(self, index: int, rate: float) -> None:
        """Note how often a prompt was solved just now."""
        before = float(self._rates[index])
        if self._class(before) == "dropped":  # answers that were under way when it was dropped do not bring it back
            return
        self._rates[index] = rate
        self._counts[self._class(before)] -= 1
        self._counts[self._class(rate)] += 1

    def chances(self, indices: Indices) -> Floats:
        """How likely each prompt is to be drawn where a pass comes to it; 1 for those with the largest weight."""
        rates = self._rates[indices]
        weights = np.full(len(rates), self.spec.outside)
        weights[np.isnan(rates) | ((rates >= self.spec.low) & (rates <= self.spec.high))] = 1.0
        if self.spec.drop is not None:
            weights[rates >= self.spec.drop] = 0.0
        return weights / (self._heaviest or 1.0)

    def metrics(self) -> dict[str, float]:
        """How many prompts there are of each kind."""
        return {name: float(count) for name, count in self._counts.items()}

    def state(self) -> dict[str, Any]:
        """All that was observed."""
        seen = np.flatnonzero(~np.isnan(self._rates))
        return {"seen": seen.tolist(), "rates": self._rates[seen].tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._rates = np.full(self.size, np.nan)
        self._counts = dict.fromkeys(self._counts, 0) | {"unseen": self.size}
        for index, rate in zip(state["seen"], state["rates"], strict=True):
            self.observe(index, rate)

    def _class(self, rate: float) -> str:
        if np.isnan(rate):
            return "unseen"
        if self.spec.drop is not None and rate >= self.spec.drop:
            return "dropped"
        if rate < self.spec.low:
            return "hard"
        return "easy" if rate > self.spec.high else "between"
