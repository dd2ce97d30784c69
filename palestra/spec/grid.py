"""From a spec with a sweep to its runs: every combination of the axes as a whole spec, with a name of its own."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from palestra.errors import UsageError
from palestra.spec.base import Conflict, ExperimentSpec
from palestra.spec.compose import merge
from palestra.spec.execution import split
from palestra.spec.kinds import spec_type
from palestra.spec.lm import LmSpec
from palestra.spec.load import resolved
from palestra.spec.plain import plain
from palestra.spec.source import Tree
from palestra.spec.space import given_data, with_values
from palestra.spec.sweep import SweepAxis, SweepSpec, label
from palestra.spec.validate import SpecError

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
    made = [Point(at, _named(run, sweep, at)) for at, run in _runs(spec, sweep)]
    if not made:
        raise UsageError(f"{spec.name}: sweep.exclude leaves out every run")
    return made


def sweep_conflicts(spec: ExperimentSpec) -> list[Conflict]:
    """All that is wrong with the sweep of a spec that is fine without it."""
    sweep = spec.sweep
    if sweep is None:
        return []
    found = [Conflict(("sweep", "axes", axis), reason) for axis, reason in _axis_conflicts(sweep)]
    if sweep.tokens_per_parameter is not None and not issubclass(spec_type(spec.kind), LmSpec):
        reason = f"expected null, because a run of kind {spec.kind} is not counted in tokens of a model's data"
        found.append(Conflict(("sweep", "tokens_per_parameter"), reason))
    if found:
        return found
    told: set[str] = set()  # one wrong value is in many runs
    seen: dict[str, dict[str, Any]] = {}
    try:
        for at, run in _runs(spec, sweep, told):
            same = identity(run)
            if same in seen:
                told.add(f"{_where(seen[same])} and {_where(at)} are the same run")
            seen[same] = at
    except UsageError as error:
        told.add(str(error))
    if not told and not seen:
        return [Conflict(("sweep", "exclude"), "leaves out every run")]
    return [Conflict(("sweep", "axes"), reason) for reason in sorted(told)]


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
    spec: ExperimentSpec, sweep: SweepSpec, told: set[str] | None = None
) -> Iterator[tuple[dict[str, Any], ExperimentSpec]]:
    """Every combination that is not excluded, and its spec; with `told`, problems go there instead of being raised."""
    base = given_data(spec)
    for chosen in product(*(axis.settings for axis in sweep.axes.values())):
        at = dict(zip(sweep.axes, chosen, strict=True))
        if sweep.excludes({axis: label(value) for axis, value in at.items()}):
            continue
        try:
            run = resolved(_laid(base, sweep, at))
            if sweep.tokens_per_parameter is not None:
                run = _with_tokens(run, sweep.tokens_per_parameter)
        except SpecError as error:
            if told is None:
                raise
            told.update(f"{problem.path}: {problem.reason}" for problem in error.problems)
        except UsageError as error:
            if told is None:
                raise
            told.add(str(error))
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
        return value * factor
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


def _named(run: ExperimentSpec, sweep: SweepSpec, at: Mapping[str, Any]) -> ExperimentSpec:
    return run.model_copy(update={"name": run_name(run, sweep, at)})


def run_name(run: ExperimentSpec, sweep: SweepSpec, at: Mapping[str, Any]) -> str:
    """Where the run is on the axes, the suffix, and a hash of all that comes of it depends on: at most 64 characters.

    The hash keeps names apart whatever is cut off, and gives a run whose spec was changed another name.
    """
    words = [_word(name, sweep.axes[name], value) for name, value in at.items()]
    tail = f"{f'-{sweep.suffix}' if sweep.suffix else ''}-{identity(run)[:DIGITS]}"
    body = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(words)).lstrip("._-")
    return f"{(body or 'run')[: LENGTH - len(tail)].rstrip('._-')}{tail}"


def identity(run: ExperimentSpec) -> str:
    """The sha256 of all that comes of a run depends on: neither its name nor where and how it is carried out."""
    known = {key: value for key, value in split(run, plain(run)).counted.items() if key != "name"}
    return hashlib.sha256(json.dumps(known, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _word(name: str, axis: SweepAxis, value: Any) -> str:
    """A setting in a run's name: texts by themselves, numbers and all else after the axis."""
    return value if isinstance(value, str) else f"{name.rpartition('.')[2]}{label(value)}"


def _where(at: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {label(value)}" for axis, value in at.items())
