"""From a file or a dict, with the specs of pipeline steps, to a validated spec; spec differences and hashes."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.spec import compose
from palestra.spec.algorithm import PRESETS
from palestra.spec.base import ExperimentSpec, NamedSpec
from palestra.spec.cluster import EnvClusterSpec
from palestra.spec.compose import Reference, extend, read_spec
from palestra.spec.model import mapped, plain
from palestra.spec.renames import original
from palestra.spec.source import DataPath, Origin, Origins, Tree, write_text
from palestra.spec.validate import validate


class _Absent:
    """The value of a field that one side does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True)
class Difference:
    """A field whose value differs; `ABSENT` on the side that does not have it."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.before!r} → {self.after!r}"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """The fields that differ between two trees of plain data, by dotted path; 1 and 1.0 are the same number."""
    return list(_compare("", a, b))


def spec_hash(spec: ExperimentSpec) -> str:
    """The sha256 of all values of a spec, defaults included; key order, renames and 1 versus 1.0 do not change it."""
    data = original(plain(spec))
    if spec.kind == "control" and data["cluster"] == plain(EnvClusterSpec()):
        del data["cluster"]  # it came later, and hashes of before name the rows of benchmarks
    if spec.kind == "control" and data["init"] is None:
        del data["init"]  # as above
    if spec.kind == "control" and data["algorithm"].get("hold") == 1:
        del data["algorithm"]["hold"]  # as above
    return hashlib.sha256(_canonical(data).encode()).hexdigest()


def _compare(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if type(a) is type(b) and isinstance(a, str | int | float | None) and a == b:
        return  # most are, and are not written as JSON for it
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in (*a, *(key for key in b if key not in a)):
            yield from _compare(f"{path}.{key}" if path else str(key), a.get(key, ABSENT), b.get(key, ABSENT))
    elif _are_mappings(a) and _are_mappings(b) and len(a) == len(b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _compare(f"{path}.{index}", left, right)
    elif a is ABSENT or b is ABSENT or _canonical(a) != _canonical(b):
        yield Difference(path, a, b)


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _canonical(value: Any) -> str:
    """The value as JSON, with whole floats as integers, so that 1 and 1.0 are written alike."""
    data = mapped(value, lambda leaf: int(leaf) if isinstance(leaf, float) and leaf.is_integer() else leaf)
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def with_step_specs(tree: Tree) -> Tree:
    """A pipeline with the specs of its steps written out, named after the steps; any other spec as it is."""
    data = tree.data
    if not isinstance(data, dict) or data.get("kind") != "pipeline" or not isinstance(data.get("steps"), dict):
        return tree
    file = tree.origin(("kind",)).file
    folder = None if file is None else os.path.dirname(os.path.abspath(file))
    if folder is not None and folder not in sys.path:  # of the pipeline's own functions, also for its worker processes
        sys.path.append(folder)
    for name, step in data["steps"].items():
        if isinstance(step, dict) and isinstance(step.get("spec"), str | dict):
            tree = _with_spec(tree, name, step)
    return tree


def _with_spec(tree: Tree, name: str, step: dict[str, Any]) -> Tree:
    place: DataPath = ("steps", name, "spec")
    origin = tree.origin(place)
    beside = Path(origin.file) if origin.file is not None else None
    if isinstance(step["spec"], str):
        reference = Reference.parse(step["spec"], beside)
        if not reference.path.exists():
            raise UsageError(f"{origin.where}: steps.{name}.spec names {reference.path}, and there is no such file")
        inner = read_spec(reference)
    else:
        below = {path[len(place) :]: at for path, at in tree.origins.items() if path[: len(place)] == place}
        inner = extend(Tree(step["spec"], below), beside)
    changes = step["set"] if isinstance(step.get("set"), dict) else {}
    for key, value in changes.items():
        inner, (path,) = compose.apply(inner, [(key, value)])
        inner = Tree(inner.data, inner.origins | {path: tree.origin(("steps", name, "set", key))})
    if isinstance(inner.data, dict):
        named = {"name": name.rpartition("/")[2]}
        inner = Tree({**inner.data, **named}, inner.origins | {("name",): Origin(origin.file, origin.line, "default")})
    rest = {key: value for key, value in step.items() if key != "set" or not isinstance(value, dict)}
    steps = {**tree.data["steps"], name: {**rest, "spec": inner.data}}
    origins = {path: at for path, at in tree.origins.items() if path[: len(place)] != place}
    origins |= {(*place, *path): at for path, at in inner.origins.items()}
    return Tree({**tree.data, "steps": steps}, origins)


Source = str | PathLike[str] | Mapping[str, Any] | NamedSpec
"""A spec as a person gives it: "file.yaml", "file.yaml:name", a path, a dict or a spec."""
Overrides = Iterable[str] | Mapping[str, Any]
"""Fields of a spec as on the command line, `["algorithm.lr=1e-3"]`, or values by dotted path."""


@dataclass(frozen=True)
class Loaded:
    """A validated spec, the data it was given as, and where each value came from."""

    spec: ExperimentSpec
    data: dict[str, Any]
    origins: Origins

    def origin(self, path: str | DataPath) -> str:
        """Where a value came from: "file.yaml:7", "override", "-s env", "python", "preset grpo" or a default."""
        parts = tuple(path.split(".")) if isinstance(path, str) else path
        here: Any = self.data
        at: DataPath = ()
        for part in parts:
            if isinstance(here, list) and str(part).isdecimal() and int(part) < len(here):
                part = int(part)
            elif not isinstance(here, dict) or part not in here:
                return self._default(parts)
            here, at = here[part], (*at, part)
        return str(Tree(self.data, self.origins).origin(at))

    def given(self) -> dict[str, str]:
        """Where each value came from that is not a default, by its dotted path."""
        origins = {".".join(map(str, path)): self.origin(path) for path in _leaves(plain(self.spec), ())}
        return {path: origin for path, origin in origins.items() if not origin.startswith("default")}

    def _default(self, path: DataPath) -> str:
        """Where a value came from that was not given: from the preset of an algorithm, or from its field."""
        given: Any = self.data.get("algorithm")
        name = given.get("preset") if isinstance(given, dict) and path[0] == "algorithm" else None
        preset: Any = PRESETS.get(name, {}) if isinstance(name, str) else {}
        for part in path[1:]:
            if not isinstance(preset, dict) or part not in preset:
                return self.spec.default_origin(path)
            preset, given = preset[part], given.get(part) if isinstance(given, dict) else None
            if isinstance(given, dict) and isinstance(preset, dict):
                other = "type" in given and given["type"] != preset.get("type")
                if other or given.get("where") == "none":  # what is given replaces all that the preset has there
                    return self.spec.default_origin(path)
        return f"preset {name}" if preset != {} else self.spec.default_origin(path)


def _leaves(data: Any, path: DataPath) -> Iterator[DataPath]:
    """The paths of all values of a tree; an empty mapping and a list of plain values are values."""
    below = data.items() if isinstance(data, dict) else enumerate(data) if _are_mappings(data) else ()
    yield from (leaf for key, value in below for leaf in _leaves(value, (*path, key)))
    if not below:
        yield path


def load(source: Source, *, variables: Mapping[str, Any] | None = None, overrides: Overrides = ()) -> Loaded:
    """Load and validate a spec; texts in `variables` and `overrides` get YAML typing, Python values stay."""
    given = plain(variables or {})
    filled = compose.fill(with_step_specs(read(source)), given)
    pairs = [(path, plain(value)) for path, value in compose.parse(overrides)]
    tree, replaced = compose.apply(filled.tree, pairs)
    filled.require_values(given, replaced)
    filled.require_use(given)
    return Loaded(validate(tree.data, tree.origins), tree.data, tree.origins)


def resolved(data: Mapping[str, Any]) -> ExperimentSpec:
    """The spec of data that is resolved already, as a run stores it: nothing is extended or filled in again."""
    return validate(dict(data), {(): Origin(how="python")})


def to_yaml(spec: NamedSpec) -> str:
    """The spec in full, defaults included, as YAML; loading it gives the same spec."""
    return write_text(compose.escape(plain(spec)))


def read(source: Source) -> Tree:
    """A spec as it is given, with what it extends: variables are not filled in, and nothing is checked."""
    if isinstance(source, NamedSpec):
        return Tree(compose.escape(plain(source)), {(): Origin(how="python")})
    if isinstance(source, Mapping):
        return extend(Tree(plain(source), {(): Origin(how="python")}), beside=None)
    if isinstance(source, str | PathLike):
        return read_spec(Reference.parse(fspath(source)))
    raise UsageError(f"a spec is a file, a dict or a spec object; got {type(source).__name__}")
