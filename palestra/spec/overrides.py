"""Setting values by dotted path: `algorithm.lr=3e-4`, `tasks.0.weight=2`."""

from collections.abc import Iterable, Mapping
from typing import Any

from palestra.errors import UsageError
from palestra.spec.source import DataPath, Origin, Tree, dotted, read_value


def parse(overrides: Iterable[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The dotted paths and values of `path=value` texts (with YAML typing) or of a mapping (values as they are)."""
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    return [_parse(text) for text in overrides]


def apply(tree: Tree, overrides: Iterable[tuple[str, Any]]) -> tuple[Tree, list[DataPath]]:
    """The tree with the values set, in order, and the paths that were set."""
    paths: list[DataPath] = []
    for text, value in overrides:
        parts = text.split(".")
        if not all(parts):
            raise UsageError(f"override '{text}': expected a dotted path such as algorithm.lr")
        data, path = _set(tree.data, parts, value, ())
        origins = {at: origin for at, origin in tree.origins.items() if at[: len(path)] != path}
        made = range(min(_depth(tree.data, path) + 1, len(path)), len(path) + 1)
        tree = Tree(data, origins | {path[:length]: Origin(how="override") for length in made})
        paths.append(path)
    return tree, paths


def _parse(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"override '{text}': expected path=value, for example algorithm.lr=3e-4")
    return path.strip(), read_value(value, f"override {path.strip()}")


def _depth(here: Any, path: DataPath) -> int:
    """How many parts of a path are there already."""
    for depth, part in enumerate(path):
        if here is None or (isinstance(here, dict) and part not in here):
            return depth
        here = here[part]
    return len(path)


def _set(here: Any, parts: list[str], value: Any, path: DataPath) -> tuple[Any, DataPath]:
    """A copy of `here` with the value at the end of `parts`, and the path on which it lies."""
    if not parts:
        return value, path
    key, *rest = parts
    if isinstance(here, list):
        if not key.isdecimal() or int(key) >= len(here):
            count = f"'{dotted(path)}' is a list of {len(here)}, so '{key}' must be an index below {len(here)}"
            raise UsageError(f"override '{dotted((*path, *parts))}': {count}")
        index = int(key)
        child, at = _set(here[index], rest, value, (*path, index))
        return [*here[:index], child, *here[index + 1 :]], at
    if here is not None and not isinstance(here, dict):
        raise UsageError(f"override '{dotted((*path, *parts))}': '{dotted(path)}' is {here!r}, not a mapping")
    if here is None and key.isdecimal():
        whole = f"there is no list '{dotted(path)}' in the spec to set an item of: give the whole list"
        raise UsageError(f"override '{dotted((*path, *parts))}': {whole}, {dotted(path)}='[...]'")
    below = here or {}
    child, at = _set(below.get(key), rest, value, (*path, key))
    return {**below, key: child}, at
