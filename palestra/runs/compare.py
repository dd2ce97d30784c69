"""Two runs side by side: which fields of the spec differ, and what came of each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.runs.run import Run
from palestra.spec.difference import Difference, differences


@dataclass(frozen=True)
class Result:
    """One number of both runs; None on the side that does not have it."""

    metric: str
    a: float | None
    b: float | None


@dataclass(frozen=True)
class RunDifference:
    """What tells two runs apart."""

    spec: list[Difference]
    results: list[Result]


def diff(a: Run, b: Run) -> RunDifference:
    """Spec fields that differ, and the last headline values (mean over seeds) and summaries of both runs."""
    left, right = _numbers(a), _numbers(b)
    results = [Result(metric, left.get(metric), right.get(metric)) for metric in {**left, **right}]
    return RunDifference(differences(a.spec, b.spec), results)


def _numbers(run: Run) -> dict[str, float]:
    return dict(_leaves({**run.progress(), "summary": run.summary()}))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            inner = prefix if key == "headline" else f"{prefix}{key}."
            yield from _leaves(value, inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value
