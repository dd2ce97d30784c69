"""Whether a search fits the spec around it: every key, both ends of every range and every choice, before it runs."""

from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

from pydantic import ValidationError

from palestra.errors import UsageError
from palestra.spec import overrides
from palestra.spec.base import Conflict, ExperimentSpec
from palestra.spec.cadence import Cadence
from palestra.spec.kinds import spec_type
from palestra.spec.search import METRICS, Axis, SearchSpec
from palestra.spec.source import Origin, Tree
from palestra.spec.validate import SpecError, validate

OURS = ("kind", "name", "seed", "max_session", "search", "sweep", "hooks", "track", "extends")
"""Fields that make a trial another experiment, or the search another search."""
COMBINATIONS = 500
"""So many are looked at for one that a choice fits into."""


def given_data(spec: ExperimentSpec) -> dict[str, Any]:
    """The spec as it was given, without defaults, its search and its sweep: what values are laid over."""
    data = spec.model_dump(mode="json", exclude_unset=True)
    return {key: value for key, value in data.items() if key not in ("search", "sweep")}


def with_values(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a spec with these values at these dotted paths."""
    tree, _ = overrides.apply(Tree(dict(data), {}), values.items())
    return tree.data


def search_conflicts(spec: ExperimentSpec) -> list[Conflict]:
    """All that is wrong with the search of a spec that is fine without it."""
    search = spec.search
    if search is None:
        return []
    found = [Conflict(("search", *path), reason) for path, reason in _goal_conflicts(spec, search)]
    return found + [Conflict(("search", "space", key), reason) for key, reason in _space_conflicts(spec, search.space)]


def _goal_conflicts(spec: ExperimentSpec, search: SearchSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    own = METRICS.get(spec.kind, (None, None))[0]
    if search.metric is None and own is None:
        yield ("metric",), f"missing; kind {spec.kind} has no metric that its trials are compared by: name one"
    elif search.metric not in (None, own) and search.direction is None:
        yield ("direction",), f"missing; expected 'maximise' or 'minimise', for {search.metric}"
    if search.pruner is None:
        return
    asha, at = search.pruner.asha, ("pruner", "asha")
    if asha.by not in spec.counts:
        yield (*at, "by"), f"expected {' or '.join(spec.counts)}, which this kind counts; got '{asha.by}'"
    whole = getattr(getattr(spec, "train", None), asha.by, None)
    if isinstance(whole, int) and asha.grace >= whole:
        yield (*at, "grace"), f"expected fewer than the {whole} {asha.by} of the whole run, got {asha.grace}"
    metric = search.metric or own or ""
    if metric.startswith("eval/") and not isinstance(spec.every.eval, Cadence):
        yield at, f"nothing says exactly when {metric} is measured before the end: set every.eval"


def _space_conflicts(spec: ExperimentSpec, space: Mapping[str, Axis]) -> Iterator[tuple[str, str]]:
    data = given_data(spec)
    for key, axis in space.items():
        parts = key.split(".")
        if parts[0] in OURS:
            yield key, f"'{parts[0]}' cannot be searched: it tells experiments apart"
            continue
        outer = [other for other in space if other != key and parts[: len(other.split("."))] == other.split(".")]
        if outer:
            yield key, f"lies inside '{outer[0]}', which is varied too: vary one of them"
            continue
        told: set[str] = set()  # an unknown key is as unknown at both ends
        for value in axis.values:
            reason = _problem_with(data, {key: value}, key)
            if reason is None and axis.form == "choice":
                reason = _fits_nowhere(data, key, value, space)
            if reason is not None and reason not in told:
                told.add(reason)
                yield key, reason


def _problem_with(data: Mapping[str, Any], values: Mapping[str, Any], key: str) -> str | None:
    """What is wrong with a value by itself; fields that do not fit together are another matter."""
    try:
        changed = with_values(data, values)
    except UsageError as error:
        return str(error).partition(": ")[2]
    error = _error(changed)
    if error is None or _is_conflict(error):
        return None
    return _words(changed, key)


def _fits_nowhere(data: Mapping[str, Any], key: str, value: Any, space: Mapping[str, Axis]) -> str | None:
    """Why a choice fits together with no values of the other fields, if it does not."""
    first = with_values(data, {key: value})
    if _error(first) is None:
        return None
    others = {other: _tried(axis) for other, axis in space.items() if other != key}
    for drawn in islice(product(*others.values()), COMBINATIONS):
        try:
            changed = with_values(data, {key: value, **dict(zip(others, drawn, strict=True))})
        except UsageError:  # another key is wrong and says so itself
            continue
        if _error(changed) is None:
            return None
    return f"{value!r} fits no values of the others: {_words(first, key)}"


def _tried(axis: Axis) -> list[Any]:
    """Values to try a field with: all choices, or both ends and the middle."""
    if axis.form == "choice":
        return axis.values
    low, high = axis.values
    return [low, high, (low + high) // 2 if axis.form == "int" else (low + high) / 2]


def _error(data: Mapping[str, Any]) -> ValidationError | None:
    try:
        spec_type(data["kind"]).model_validate(dict(data))
    except ValidationError as error:
        return error
    return None


def _is_conflict(error: ValidationError) -> bool:
    return all(details["type"] == "conflicts" for details in error.errors())


def _words(data: Mapping[str, Any], key: str) -> str:
    try:
        validate(dict(data), {(): Origin(how="python")})
    except SpecError as error:
        lines = []
        for problem in error.problems:
            place = "" if problem.path == key else f"{problem.path}: "
            lines.append(f"{place}{problem.reason}" + (f". {problem.hint}" if problem.hint else ""))
        return "; ".join(lines)
    raise AssertionError("valid after all")
