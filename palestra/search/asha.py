"""Asynchronous successive halving: which paused trial goes on, from the scores at the rungs alone.

Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", algorithm 2. Rung k is at `grace · η^k`.
A score here is such that higher is better.
"""

from collections.abc import Collection, Mapping, Sequence

Rung = Mapping[int, float]
"""The scores of the trials that came to a rung."""


def level(grace: int, reduction: int, rung: int) -> int:
    """Where a rung is, in steps or frames."""
    return grace * reduction**rung


def top(rung: Rung, count: int) -> list[int]:
    """The best trials of a rung, best first; of equals the earlier one."""
    return sorted(rung, key=lambda trial: (-rung[trial], trial))[:count]


def promotion(rungs: Sequence[Rung], moved: Sequence[Collection[int]], reduction: int) -> tuple[int, int] | None:
    """The trial that goes on, and the rung that it goes to; None where a new trial is due instead.

    `moved[k]` are the trials that went on from rung k before, or ended there. The highest rung is looked at first. Its
    candidates are the best ⌊n/η⌋ of the n trials that have come to it so far.
    """
    for index in range(len(rungs) - 1, -1, -1):
        candidates = top(rungs[index], len(rungs[index]) // reduction)
        for trial in candidates:
            if trial not in moved[index]:
                return trial, index + 1
    return None


def last_promotion(rungs: Sequence[Rung], moved: Sequence[Collection[int]]) -> tuple[int, int] | None:
    """Once nothing else is to be done: the best trial of the highest rung goes on, so that one comes to its end.

    With few trials ⌊n/η⌋ is 0 at a high rung, and the paper's rule, made for an endless stream of trials, would wait.
    """
    for index in range(len(rungs) - 1, -1, -1):
        waiting = {trial: score for trial, score in rungs[index].items() if trial not in moved[index]}
        if waiting:
            return top(waiting, 1)[0], index + 1
    return None
