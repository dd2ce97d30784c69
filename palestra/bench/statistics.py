"""Interquartile mean and its bootstrap interval (Agarwal et al. 2021): what a few seeds say, and how surely."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Interval(NamedTuple):
    """The ends of an interval."""

    low: float
    high: float


def interquartile_mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The mean of what is left without the lowest and the highest quarter (rounded down), over the last dimension."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def bootstrap_interval(values: Sequence[float], level: float = 0.95, seed: int = 0) -> Interval:
    """The percentile interval of the interquartile mean of `values` drawn again with replacement; seeded."""
    known = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(known), size=(RESAMPLES, len(known)))
    means = interquartile_mean(known[drawn])
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))
