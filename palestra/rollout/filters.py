"""Which groups are not trained on: those that teach nothing, answers of the wrong length, the user's own rule."""

from collections.abc import Callable

from palestra.errors import PalestraError
from palestra.rollout.types import Group
from palestra.spec.algorithm import FiltersSpec
from palestra.spec.imports import load_function

SAME = 1e-6
"""Rewards that differ by no more than this are the same: dense scores carry rounding."""


class FilterFailed(PalestraError):
    """A filter of the user raised; its traceback is the cause."""


def make_filter(spec: FiltersSpec) -> Callable[[Group], str | None]:
    """What says why a group is left out, in a word that metrics are named after; None where it is trained on.

    The words: zero_variance, too_short, too_long, and the name of the user's function.
    """
    keep = None if spec.function is None else load_function(spec.function, "algorithm.filters.function")

    def reason(group: Group) -> str | None:
        if spec.zero_variance and max(group.rewards) - min(group.rewards) <= SAME:
            return "zero_variance"
        lengths = [trajectory.drawn for trajectory in group.trajectories]
        if spec.min_tokens is not None and min(lengths) < spec.min_tokens:
            return "too_short"
        if spec.max_tokens is not None and max(lengths) > spec.max_tokens:
            return "too_long"
        if keep is not None and spec.function is not None and not _asked(keep, spec.function, group):
            return spec.function.rpartition(":")[2]
        return None

    return reason


def _asked(keep: Callable[[Group], object], name: str, group: Group) -> bool:
    where = f"the filter {name}, asked about {group.problem.id} (number {group.number}),"
    try:
        kept = keep(group)
    except Exception as error:
        raise FilterFailed(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(kept, bool):
        raise FilterFailed(f"{where} returned {kept!r}: expected True to train on the group, or False to leave it out")
    return kept
