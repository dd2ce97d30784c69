"""The specs of a pipeline's steps, written out: files read, `extends` merged, `set` applied; lines kept."""

import os
import sys
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.spec import overrides
from palestra.spec.compose import Reference, extend, read_spec
from palestra.spec.source import DataPath, Origin, Tree


def with_step_specs(tree: Tree) -> Tree:
    """A pipeline with the specs of its steps written out, named after the steps; any other spec as it is."""
    data = tree.data
    if not isinstance(data, dict) or data.get("kind") != "pipeline" or not isinstance(data.get("steps"), dict):
        return tree
    _look_beside(tree)
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
    changes = step.get("set")
    if isinstance(changes, dict):
        given = {key: tree.origin(("steps", name, "set", key)) for key in changes}
        inner = _changed(inner, changes, given)
    if isinstance(inner.data, dict):
        named = {"name": name.rpartition("/")[2]}
        inner = Tree({**inner.data, **named}, inner.origins | {("name",): Origin(origin.file, origin.line, "default")})
    rest = {key: value for key, value in step.items() if key != "set" or not isinstance(changes, dict)}
    steps = {**tree.data["steps"], name: {**rest, "spec": inner.data}}
    origins = {path: at for path, at in tree.origins.items() if path[: len(place)] != place}
    origins |= {(*place, *path): at for path, at in inner.origins.items()}
    return Tree({**tree.data, "steps": steps}, origins)


def _changed(inner: Tree, changes: dict[str, Any], origins: dict[str, Origin]) -> Tree:
    for key, value in changes.items():
        inner, paths = overrides.apply(inner, [(key, value)])
        inner = Tree(inner.data, inner.origins | {paths[0]: origins[key]})
    return inner


def _look_beside(tree: Tree) -> None:
    """A pipeline's own functions may lie beside its file; the processes that run its steps look there too."""
    file = tree.origin(("kind",)).file
    folder = os.path.dirname(os.path.abspath(file)) if file is not None else None
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
