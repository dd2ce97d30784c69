"""Reads what suites said of a run: results.json of each of its sessions."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palestra.runs.run import Run
from palestra.runs.store import read_json

RESULTS = "results.json"
MEAN = "centred"
"""The name of a suite's mean centred accuracy beside its tasks."""


@dataclass(frozen=True)
class Measured:
    """One number of a suite."""

    seed: int
    suite: str
    step: int
    tokens: int
    task: str
    """`centred` for the mean over the suite."""
    type: str
    """likelihood, texts, task, or mean."""
    value: float


def measured(run: Run) -> list[Measured]:
    """All that suites have measured of a run, by seed, suite, step and task; empty where it has none."""
    return [one for session in run.sessions for one in _of_session(session.path / RESULTS, session.seed)]


def _of_session(path: Path, seed: int) -> Iterator[Measured]:
    if not path.exists():
        return
    for suite, found in read_json(path)["suites"].items():
        for row in found["rows"]:
            at = (seed, suite, row["step"], row["tokens"])
            for task, result in row["tasks"].items():
                yield Measured(*at, task, result["type"], result["value"])
            if MEAN in row:
                yield Measured(*at, MEAN, "mean", row[MEAN])
