"""From a file or a dict to a validated spec: read, extend, fill variables, override, validate."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from palestra.errors import UsageError
from palestra.spec import overrides as dotted_overrides
from palestra.spec import variables as spec_variables
from palestra.spec.base import ExperimentSpec, NamedSpec
from palestra.spec.compose import Reference, extend, read_spec
from palestra.spec.plain import plain
from palestra.spec.presets import PRESETS
from palestra.spec.source import DataPath, Origin, Origins, Tree, write_text
from palestra.spec.steps import with_step_specs
from palestra.spec.validate import validate

Source = str | PathLike[str] | Mapping[str, Any] | NamedSpec
"""A spec as a person gives it: "file.yaml", "file.yaml:name", a path, a dict or a spec."""


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

    def to_yaml(self) -> str:
        """The spec in full, defaults included; loading it gives the same spec."""
        return to_yaml(self.spec)


def load(
    source: Source,
    *,
    variables: Mapping[str, Any] | None = None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
) -> Loaded:
    """Load and validate a spec; texts in `variables` and `overrides` get YAML typing, Python values stay."""
    given = plain(variables or {})
    filled = spec_variables.fill(with_step_specs(read(source)), given)
    pairs = [(path, plain(value)) for path, value in dotted_overrides.parse(overrides)]
    tree, replaced = dotted_overrides.apply(filled.tree, pairs)
    filled.require_values(given, replaced)
    filled.require_use(given)
    return Loaded(validate(tree.data, tree.origins), tree.data, tree.origins)


def resolved(data: Mapping[str, Any]) -> ExperimentSpec:
    """The spec of data that is resolved already, as a run stores it: nothing is extended or filled in again."""
    return validate(dict(data), {(): Origin(how="python")})


def to_yaml(spec: NamedSpec) -> str:
    """The spec in full, defaults included, as YAML; loading it gives the same spec."""
    return write_text(spec_variables.escape(plain(spec)))


def read(source: Source) -> Tree:
    """A spec as it is given, with what it extends: variables are not filled in, and nothing is checked."""
    if isinstance(source, NamedSpec):
        return Tree(spec_variables.escape(plain(source)), {(): Origin(how="python")})
    if isinstance(source, Mapping):
        return extend(Tree(plain(source), {(): Origin(how="python")}), beside=None)
    if isinstance(source, str):
        return read_spec(Reference.parse(source))
    if isinstance(source, PathLike):
        return read_spec(Reference.parse(fspath(source)))
    raise UsageError(f"a spec is a file, a dict or a spec object; got {type(source).__name__}")
