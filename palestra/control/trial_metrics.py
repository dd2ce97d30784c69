"""The metrics of a trial, as SLM-Lab's users know them, from the returns logged by its sessions.

R_i is the logged return at log point i (the mean of the last 100 finished episodes of the *sampling* policy), f_i its
frame, o_i its number of optimizer steps, and s_i = R_i − R_random, the strength over a random policy.

The score, `total_reward_ma`, is the mean of R_i over the log points of the last quarter of the frames. SLM-Lab takes
its last 100 log points: at the budget and log frequency of most of its tables (400 points) that is the same quarter,
and unlike a number of points a share of the frames does not change with how often a run writes a row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

SHARE = 0.25  # of the frames in total_reward_ma


@dataclass(frozen=True)
class SessionMetrics:
    """One session's numbers; `nan` where a denominator is 0."""

    total_reward_ma: float
    """Mean of the R_i in the last quarter of the frames: the score of SLM-Lab's benchmark tables."""
    strength: float
    """Mean of s_i over the whole run."""
    max_strength: float
    final_strength: float
    sample_efficiency: float
    """Σ(s_i / f_i) / Σ(1 / f_i): strength weighted towards early frames."""
    training_efficiency: float
    """Σ(s_i / o_i) / Σ(1 / o_i): the same by optimizer steps."""
    stability: float
    """1 − |Σ min(s_{i+1} − s_i, 0) / Σ_{i<N} s_i|: 1 when it never got worse."""


def score(returns: Sequence[float], frames: Sequence[float], window: float | None = None) -> float:
    """The mean of the R_i whose f_i is among the last `window` frames; by default the last quarter of them."""
    reward, at = np.asarray(returns, dtype=np.float64), np.asarray(frames, dtype=np.float64)
    return float(reward[at > at[-1] - (SHARE * at[-1] if window is None else window)].mean())


def session_metrics(
    returns: Sequence[float], frames: Sequence[float], updates: Sequence[float], random_return: float
) -> SessionMetrics:
    """The metrics of one session from its log points."""
    reward = np.asarray(returns, dtype=np.float64)
    strength = reward - random_return
    worse = np.minimum(np.diff(strength), 0).sum()
    return SessionMetrics(
        total_reward_ma=score(returns, frames),
        strength=float(strength.mean()),
        max_strength=float(strength.max()),
        final_strength=float(strength[-1]),
        sample_efficiency=_efficiency(strength, np.asarray(frames, dtype=np.float64)),
        training_efficiency=_efficiency(strength, np.asarray(updates, dtype=np.float64)),
        stability=1 - abs(_divide(worse, strength[:-1].sum())),
    )


def consistency(returns: Sequence[Sequence[float]], random_return: float) -> float:
    """1 − 2·Σ_i std_j(s_ij) / Σ_i mean_j(s_ij) over sessions j (sample std); `nan` for one session."""
    shortest = min(map(len, returns))
    strength = np.array([r[:shortest] for r in returns], dtype=np.float64) - random_return
    if len(strength) < 2:
        return math.nan
    return 1 - 2 * _divide(strength.std(axis=0, ddof=1).sum(), strength.mean(axis=0).sum())


def trial_metrics(sessions: Sequence[SessionMetrics]) -> dict[str, float]:
    """The mean over sessions of each metric, and the standard deviation of the score."""
    means = {name: float(np.mean([asdict(s)[name] for s in sessions])) for name in asdict(sessions[0])}
    scores = [s.total_reward_ma for s in sessions]
    return means | {"total_reward_ma_std": float(np.std(scores, ddof=1)) if len(scores) > 1 else math.nan}


def summarize(rows: Mapping[int, Sequence[Mapping[str, float]]], random_return: float, updates: str) -> dict[str, Any]:
    """What a trial came to, from each seed's rows of metrics; `updates` names the column of optimizer steps so far."""
    evaluated = {seed: [row["eval/return"] for row in logged if "eval/return" in row] for seed, logged in rows.items()}
    last = {seed: values[-1] for seed, values in evaluated.items() if values}
    summary: dict[str, Any] = {"random_return": random_return, "eval/return_by_seed": last}
    if last:
        summary |= {
            "eval/return": fmean(last.values()),
            "eval/return_std": stdev(last.values()) if len(last) > 1 else math.nan,
        }
    # Before the first episode has ended there is no return to log.
    points = [logged for all_rows in rows.values() if (logged := [row for row in all_rows if "return" in row])]
    if not points:
        return summary
    returns = [[row["return"] for row in logged] for logged in points]
    sessions = [
        session_metrics(each, [row["frame"] for row in logged], [row[updates] for row in logged], random_return)
        for each, logged in zip(returns, points, strict=True)
    ]
    return summary | trial_metrics(sessions) | {"consistency": consistency(returns, random_return)}


def _efficiency(strength: np.ndarray, cost: np.ndarray) -> float:
    """The mean strength weighted by 1 / cost; log points from before anything was spent do not count."""
    strength, cost = strength[cost > 0], cost[cost > 0]
    return _divide((strength / cost).sum(), (1 / cost).sum())


def _divide(a: float, b: float) -> float:
    return float(a / b) if b else math.nan
