"""From a `search:` or `sweep:` block to whole specs: every value checked against the spec around it."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from pydantic import ValidationError

from palestra.errors import UsageError
from palestra.spec import compose
from palestra.spec.base import ExperimentSpec
from palestra.spec.blocks import METRICS, Axis, SearchSpec, SweepAxis, SweepSpec, label
from palestra.spec.compose import merge
from palestra.spec.kinds import spec_type
from palestra.spec.lm import LmSpec
from palestra.spec.load import resolved
from palestra.spec.model import Cadence, Conflict, plain, split
from palestra.spec.renames import original
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
    tree, _ = compose.apply(Tree(dict(data), {}), values.items())
    return tree.data


def search_conflicts(spec: ExperimentSpec) -> list[Conflict]:
    """All that is wrong with the search of a spec that is fine without it."""
    search = spec.search
    if search is None:
        return []
    goal = [Conflict(("search", *path), reason) for path, reason in _goal_conflicts(spec, search)]
    return goal + [Conflict(("search", "space", key), reason) for key, reason in _space_conflicts(spec, search.space)]


def _goal_conflicts(spec: ExperimentSpec, search: SearchSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    own = METRICS.get(spec.kind, (None, None))[0]
    if search.metric is None and own is None:
        yield ("metric",), f"missing; kind {spec.kind} has no metric that its trials are compared by: name one"
    elif search.metric not in (None, own) and search.direction is None:
        yield ("direction",), f"missing; expected 'maximize' or 'minimize', for {search.metric}"
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
        reasons: set[str] = set()  # an unknown key is as unknown at both ends
        for value in axis.values:
            reason = _problem_with(data, {key: value}, key)
            if reason is None and axis.form == "choice":
                reason = _fits_nowhere(data, key, value, space)
            if reason is not None and reason not in reasons:
                reasons.add(reason)
                yield key, reason


def _problem_with(data: Mapping[str, Any], values: Mapping[str, Any], key: str) -> str | None:
    """What is wrong with a value by itself; fields that do not fit together are another matter."""
    try:
        changed = with_values(data, values)
    except UsageError as error:
        return str(error).partition(": ")[2]
    error = _error(changed)
    if error is None or all(details["type"] == "conflicts" for details in error.errors()):
        return None
    return _words(changed, key)


def _fits_nowhere(data: Mapping[str, Any], key: str, value: Any, space: Mapping[str, Axis]) -> str | None:
    """Why a choice fits together with no values of the other fields, if it does not."""
    first = with_values(data, {key: value})
    if _error(first) is None:
        return None
    others = {other: _tried(axis) for other, axis in space.items() if other != key}
    for tried in islice(product(*others.values()), COMBINATIONS):
        try:
            changed = with_values(data, {key: value, **dict(zip(others, tried, strict=True))})
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


def _words(data: Mapping[str, Any], key: str) -> str:
    try:
        validate(dict(data), {(): Origin(how="python")})
    except SpecError as error:
        return "; ".join(p.advice if p.path == key else f"{p.path}: {p.advice}" for p in error.problems)
    raise AssertionError("valid after all")


LENGTH = 64
"""The longest name: services cut longer ones off, and two that differ only behind that become one."""
DIGITS = 8
"""Hexadecimal digits of a name's hash: of 10,000 runs with one label, two would collide once in 100 sweeps."""
FIXED = ("kind", "name", "search", "sweep", "extends")


@dataclass(frozen=True)
class Point:
    """One run of a sweep: where it is on every axis, and its spec, whose name is the run's."""

    at: dict[str, Any]
    spec: ExperimentSpec

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.spec.name


def points(spec: ExperimentSpec) -> list[Point]:
    """The runs of a spec's sweep, the last axis varying fastest; raises where one of them is no valid spec."""
    sweep = spec.sweep
    if sweep is None:
        raise UsageError(f"{spec.name} has no block 'sweep': say there what to vary, sweep.axes")
    runs = _runs(spec, sweep)
    made = [Point(at, run.model_copy(update={"name": run_name(run, sweep, at)})) for at, run in runs]
    if not made:
        raise UsageError(f"{spec.name}: sweep.exclude leaves out every run")
    return made


def sweep_conflicts(spec: ExperimentSpec) -> list[Conflict]:
    """All that is wrong with the sweep of a spec that is fine without it."""
    sweep = spec.sweep
    if sweep is None:
        return []
    conflicts = [Conflict(("sweep", "axes", axis), reason) for axis, reason in _axis_conflicts(sweep)]
    if sweep.tokens_per_parameter is not None and not issubclass(spec_type(spec.kind), LmSpec):
        reason = f"expected null, because a run of kind {spec.kind} is not counted in tokens of a model's data"
        conflicts.append(Conflict(("sweep", "tokens_per_parameter"), reason))
    if conflicts:
        return conflicts
    reasons: set[str] = set()  # one wrong value is in many runs
    seen: dict[str, dict[str, Any]] = {}
    try:
        for at, run in _runs(spec, sweep, reasons):
            same = identity(run)
            if same in seen:
                reasons.add(f"{_where(seen[same])} and {_where(at)} are the same run")
            seen[same] = at
    except UsageError as error:
        reasons.add(str(error))
    if not reasons and not seen:
        return [Conflict(("sweep", "exclude"), "leaves out every run")]
    return [Conflict(("sweep", "axes"), reason) for reason in sorted(reasons)]


def _axis_conflicts(sweep: SweepSpec) -> Iterator[tuple[str, str]]:
    """Fields that cannot be swept, and fields that two axes set."""
    before: dict[str, str] = {}
    for name, axis in sweep.axes.items():
        for path in _paths(name, axis):
            if path.split(".")[0] in FIXED:
                yield name, f"'{path}' cannot be swept: it tells experiments apart"
            if axis.form == "multiply":  # comes after all others and keeps what they set
                continue
            other = next((old for old in before if before[old] != name and _overlap(old, path)), None)
            if other is not None:
                yield name, f"sets '{path}', and so does axis '{before[other]}'"
            before[path] = name


def _overlap(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _paths(name: str, axis: SweepAxis) -> list[str]:
    """The dotted paths that an axis sets."""
    if axis.points is None:
        return axis.of or [name]
    return sorted({path for part in axis.points.values() for path in _leaves(part, "")})


def _leaves(part: Mapping[str, Any], above: str) -> Iterator[str]:
    for key, value in part.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _runs(
    spec: ExperimentSpec, sweep: SweepSpec, reasons: set[str] | None = None
) -> Iterator[tuple[dict[str, Any], ExperimentSpec]]:
    """Every combination that is not excluded, and its spec; problems are added to `reasons`, or else raised."""
    base = given_data(spec)
    for chosen in product(*(axis.settings for axis in sweep.axes.values())):
        at = dict(zip(sweep.axes, chosen, strict=True))
        if sweep.excludes({axis: label(value) for axis, value in at.items()}):
            continue
        try:
            run = resolved(_laid(base, sweep, at))
            if sweep.tokens_per_parameter is not None:
                run = _with_tokens(run, sweep.tokens_per_parameter)
        except UsageError as error:
            if reasons is None:
                raise
            problems = error.problems if isinstance(error, SpecError) else ()
            reasons.update([f"{problem.path}: {problem.reason}" for problem in problems] or [str(error)])
        else:
            yield at, run


def _laid(base: dict[str, Any], sweep: SweepSpec, at: Mapping[str, Any]) -> dict[str, Any]:
    """The data of one run: first what is set, then what is multiplied."""
    data = base
    for name, axis in sweep.axes.items():
        if axis.points is not None:
            data = merge(Tree(data, {}), Tree(axis.points[at[name]], {})).data
        elif axis.values is not None:
            data = with_values(data, dict.fromkeys(axis.of or [name], at[name]))
    for name, axis in sweep.axes.items():
        if axis.multiply is not None:
            for path in axis.of or [name]:
                data = with_values(data, {path: _times(_at(data, path, name), at[name], path)})
    return data


def _at(data: Any, path: str, axis: str) -> Any:
    for part in path.split("."):
        if not isinstance(data, Mapping) or part not in data:
            raise UsageError(f"sweep.axes.{axis}: the spec gives no {path} to multiply")
        data = data[part]
    return data


def _times(value: Any, factor: float, path: str) -> Any:
    """A number times a factor; a schedule as a whole, that is its start and its end."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        product = value * factor
        return int(product) if isinstance(value, int) and float(product).is_integer() else product
    if isinstance(value, Mapping) and "start" in value:
        return {**value, **{key: value[key] * factor for key in ("start", "end") if key in value}}
    raise UsageError(f"sweep.axes: {path} is neither a number nor a schedule, so it cannot be multiplied")


def _with_tokens(run: ExperimentSpec, ratio: float) -> ExperimentSpec:
    """The same for as many whole steps as fit into that many tokens for each active parameter."""
    assert isinstance(run, LmSpec)
    shape = run.model.shape
    if shape is None or shape.vocab is None:
        missing = "model.shape" if shape is None else "model.shape.vocab"
        raise UsageError(f"sweep.tokens_per_parameter: parameters are counted from {missing}, which is not given")
    steps = int(ratio * shape.parameters(active=True)) // (run.train.batch * run.data.context)
    return resolved(with_values(given_data(run), {"train.steps": max(1, steps)}))


def run_name(run: ExperimentSpec, sweep: SweepSpec, at: Mapping[str, Any]) -> str:
    """Where the run is on the axes, the suffix, and a hash of all that comes of it depends on: at most 64 characters.

    The hash keeps names apart whatever is cut off, and gives a run whose spec was changed another name.
    """
    # Texts by themselves, numbers and all else after the axis.
    words = [v if isinstance(v, str) else f"{name.rpartition('.')[2]}{label(v)}" for name, v in at.items()]
    tail = f"{f'-{sweep.suffix}' if sweep.suffix else ''}-{identity(run)[:DIGITS]}"
    body = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(words)).lstrip("._-")
    return f"{(body or 'run')[: LENGTH - len(tail)].rstrip('._-')}{tail}"


def identity(run: ExperimentSpec) -> str:
    """The sha256 of all that comes of a run depends on: neither its name nor where and how it is carried out."""
    known = {key: value for key, value in split(run, plain(run)).counted.items() if key != "name"}
    return hashlib.sha256(json.dumps(original(known), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _where(at: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {label(value)}" for axis, value in at.items())
