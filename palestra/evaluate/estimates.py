"""Estimates over problems: pass@k without bias, means with their standard errors and intervals. Plain numbers."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

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
    centre = (share + NORMAL**2 / (2 * n)) / scale
    reach = NORMAL / scale * math.sqrt(share * (1 - share) / n + NORMAL**2 / (4 * n * n))
    return max(0.0, centre - reach), min(1.0, centre + reach)


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
