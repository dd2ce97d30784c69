"""Filling `${var}`, or `${var:default}`, in a spec with the values of `-s var=value`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from palestra.errors import UsageError
from palestra.spec.source import DataPath, Origin, Tree, dotted, read_value

# `$${` is a literal `${`.
_TOKEN = re.compile(r"\$\$\{|\$\{([^{}:]+)(?::([^{}]+))?\}")
_WHOLE = re.compile(r"\$\{[^{}]+\}")


@dataclass(frozen=True)
class Filled:
    """A tree with its variables filled, and which variables stood where."""

    tree: Tree
    variables: list[tuple[DataPath, str]]
    defaults: Mapping[str, str]
    """Values of the spec itself, for variables that are not given."""

    def require_values(self, given: Mapping[str, Any], replaced: Iterable[DataPath] = ()) -> None:
        """Raise if a variable has no value, naming all of them; one inside a `replaced` path needs none."""
        missing = [
            (path, name)
            for path, name in self.variables
            if name not in given
            and name not in self.defaults
            and not any(path[: len(other)] == other for other in replaced)
        ]
        if not missing:
            return
        lines = [f"  {self.tree.where(path)}  {dotted(path)}: ${{{name}}}" for path, name in missing]
        flags = " ".join(f"-s {name}=..." for name in dict.fromkeys(name for _, name in missing))
        raise UsageError("the spec has variables without a value:\n" + "\n".join(lines) + f"\nGive them with {flags}")

    def require_use(self, given: Mapping[str, Any]) -> None:
        """Raise if a variable was given that the spec does not have, naming the nearest."""
        known = sorted({name for _, name in self.variables})
        for name in given:
            if name in known:
                continue
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"Its variables are: {', '.join(known) or 'none'}."
            raise UsageError(f"-s {name}: the spec has no variable ${{{name}}}. {hint}")


def fill(tree: Tree, given: Mapping[str, Any]) -> Filled:
    """Replace every `${var}` that has a value; a scalar that is nothing but `${var}` gets the value's YAML type."""
    found: list[tuple[DataPath, str]] = []
    origins = dict(tree.origins)
    defaults = dict(_defaults(tree.data))
    values = {**defaults, **given}

    def visit(value: Any, path: DataPath) -> Any:
        if isinstance(value, dict):
            return {key: visit(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item, (*path, index)) for index, item in enumerate(value)]
        return text(value, path) if isinstance(value, str) else value

    def text(value: str, path: DataPath) -> Any:
        names = [name for name, _ in _TOKEN.findall(value) if name]
        found.extend((path, name) for name in names)
        used = [name for name in dict.fromkeys(names) if name in given]
        if used:
            how = ", ".join(f"-s {name}" for name in used)
            origins[path] = replace(origins.get(path, Origin()), how=how)
        if _WHOLE.fullmatch(value) and names[0] in values:
            whole = values[names[0]]
            return read_value(whole, f"-s {names[0]}") if isinstance(whole, str) else whole
        return _TOKEN.sub(lambda match: literal(match[0], match[1]), value)

    def literal(token: str, name: str | None) -> str:
        if name is None:
            return "${"
        return str(values[name]) if name in values else token

    return Filled(Tree(visit(tree.data, ()), origins), found, defaults)


def _defaults(data: Any) -> Iterator[tuple[str, str]]:
    """Variables that have a default somewhere in the data, which holds wherever they stand."""
    if isinstance(data, str):
        yield from ((name, default) for name, default in _TOKEN.findall(data) if default)
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _defaults(value)


def escape(data: Any) -> Any:
    """The tree with every `${` written `$${`, so that filling gives it back."""
    if isinstance(data, Mapping):
        return {key: escape(value) for key, value in data.items()}
    if isinstance(data, list):
        return [escape(value) for value in data]
    return data.replace("${", "$${") if isinstance(data, str) else data
