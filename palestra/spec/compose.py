"""One spec out of files: `extends`, collections, `${var}` variables and dotted overrides."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palestra.errors import UsageError, did_you_mean
from palestra.spec.model import mapped
from palestra.spec.source import DataPath, Origin, SourceError, Tree, dotted, read_file, read_value


@dataclass(frozen=True)
class Reference:
    """A file and, where it holds several specs, the name of one of them."""

    path: Path
    name: str | None = None

    @classmethod
    def parse(cls, text: str, beside: Path | None = None) -> "Reference":
        """What "file.yaml", "file.yaml:name" or ":name" refers to, seen from the file `beside`."""
        file, colon, name = text.rpartition(":")
        if not colon or "/" in name or os.sep in name:  # no name; a colon inside a folder's name or after a drive
            file, name = text, ""
        if file:
            folder = beside.parent if beside else Path()
            return cls(Path(os.path.normpath(folder / file)), name or None)
        if beside is None:
            raise SourceError(f"'{text}' names no file; write file.yaml{text}")
        return cls(beside, name)

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" if self.name else str(self.path)


def read_spec(reference: Reference, chain: tuple[Reference, ...] = ()) -> Tree:
    """The spec that a reference names, with what it extends merged in and its default name filled in."""
    tree, name = _pick(read_file(reference.path), reference)
    here = Reference(reference.path, name)
    if here in chain:
        circle = " → ".join(map(str, (*chain[chain.index(here) :], here)))
        raise SourceError(f"{tree.where(('extends',))}: 'extends' goes in a circle: {circle}")
    tree = extend(tree, beside=reference.path, chain=(*chain, here))
    if "name" in tree.data:
        return tree
    origin = tree.origin(())
    named = Tree({"name": name or reference.path.stem}, {("name",): Origin(origin.file, origin.line, how="default")})
    return merge(named, tree)


def extend(tree: Tree, beside: Path | None, chain: tuple[Reference, ...] = ()) -> Tree:
    """The tree laid over the specs it extends, the later ones over the earlier; a `name` is not inherited."""
    bases = tree.data.get("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    where = tree.where(("extends",))
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise SourceError(f"{where}: 'extends' takes a file such as base.yaml or base.yaml:name, or a list of them")
    merged = Tree({}, {})
    for base in bases:
        reference = Reference.parse(base, beside)
        if not reference.path.exists():
            raise SourceError(f"{where}: 'extends' names {reference.path}, and there is no such file")
        merged = merge(merged, _without(read_spec(reference, chain), "name"))
    return merge(merged, _without(tree, "extends"))


def merge(base: Tree, top: Tree) -> Tree:
    """`top` over `base`: mappings merge key by key, everything else replaces."""
    replaced: list[DataPath] = []

    def visit(below: Any, above: Any, path: DataPath) -> Any:
        if not isinstance(below, dict) or not isinstance(above, dict):
            replaced.append(path)
            return above
        both = {key: visit(below[key], above[key], (*path, key)) for key in below if key in above}
        return below | above | both

    data = visit(base.data, top.data, ())
    origins = {path: origin for path, origin in base.origins.items() if not _inside(path, replaced)}
    return Tree(data, origins | top.origins)


def _inside(path: DataPath, others: Iterable[DataPath]) -> bool:
    return any(path[: len(other)] == other for other in others)


def _without(tree: Tree, key: str) -> Tree:
    data = {name: value for name, value in tree.data.items() if name != key}
    return Tree(data, {path: origin for path, origin in tree.origins.items() if path[:1] != (key,)})


def _pick(file: Tree, reference: Reference) -> tuple[Tree, str | None]:
    """The one spec of a file, or the named one of a collection together with its name."""
    path = reference.path
    if not isinstance(file.data, dict) or not file.data:
        raise SourceError(f"{path} holds no spec; a spec is a mapping with a key 'kind'")
    if "kind" in file.data or "extends" in file.data:
        if reference.name:
            raise SourceError(f"{path} holds one spec (it has a 'kind'), so it has no ':{reference.name}'")
        return file, None
    for key, value in file.data.items():
        if not isinstance(value, dict) and not key.startswith("_"):
            raise SourceError(
                f"{file.where((key,))}: a spec needs a key 'kind', or a file holds several named specs;"
                f" this one has no 'kind' and '{key}' is not a mapping"
            )
    names = [key for key in file.data if not key.startswith("_")]
    name = reference.name or (names[0] if len(names) == 1 else None)
    if name is None:
        listed = "\n".join(f"  {path}:{name}" for name in names)
        raise UsageError(f"{path} holds {len(names)} specs; say which:\n{listed}")
    if name not in names:
        hint = did_you_mean(name, names, f"It holds: {', '.join(names) or 'none'}.")
        raise UsageError(f"{path} holds no spec '{name}'. {hint}")
    origins = {at[1:]: origin for at, origin in file.origins.items() if at[:1] == (name,)}
    return Tree(file.data[name], origins), name


# `$${` is a literal `${`.
_TOKEN = re.compile(r"\$\$\{|\$\{([^{}:]+)(?::([^{}]*))?\}")


@dataclass(frozen=True)
class Filled:
    """A tree with its variables filled, and which variables stood where."""

    tree: Tree
    variables: list[tuple[DataPath, str]]
    defaults: Mapping[str, str]
    """Values of the spec itself, for variables that are not given."""

    def require_values(self, given: Mapping[str, Any], replaced: Iterable[DataPath] = ()) -> None:
        """Raise if a variable has no value, naming all of them; one inside a `replaced` path needs none."""
        known = {*given, *self.defaults}
        missing = [(path, name) for path, name in self.variables if name not in known and not _inside(path, replaced)]
        if not missing:
            return
        lines = [f"  {self.tree.where(path)}  {dotted(path)}: ${{{name}}}" for path, name in missing]
        flags = " ".join(f"-s {name}=..." for name in dict.fromkeys(name for _, name in missing))
        raise UsageError("the spec has variables without a value:\n" + "\n".join(lines) + f"\nGive them with {flags}")

    def require_use(self, given: Mapping[str, Any]) -> None:
        """Raise if a variable was given that the spec does not have, naming the nearest."""
        known = sorted({name for _, name in self.variables})
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known, f"Its variables are: {', '.join(known) or 'none'}.")
                raise UsageError(f"-s {name}: the spec has no variable ${{{name}}}. {hint}")


def fill(tree: Tree, given: Mapping[str, Any]) -> Filled:
    """Replace every `${var}` that has a value; a scalar that is nothing but `${var}` gets the value's YAML type."""
    uses: list[tuple[DataPath, str]] = []
    origins = dict(tree.origins)
    defaults: dict[str, str] = {}
    for name, default in _defaults(tree.data):
        if defaults.setdefault(name, default) != default:
            both = f"'{defaults[name]}' and '{default}'"
            raise UsageError(f"the variable ${{{name}}} has two defaults in the spec, {both}: give it one of them")
    values = {**defaults, **given}

    def visit(value: Any, path: DataPath) -> Any:
        if isinstance(value, dict):
            return {key: visit(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item, (*path, index)) for index, item in enumerate(value)]
        return text(value, path) if isinstance(value, str) else value

    def text(value: str, path: DataPath) -> Any:
        names = [token[1] for token in _TOKEN.finditer(value) if token[1]]
        uses.extend((path, name) for name in names)
        used = [name for name in dict.fromkeys(names) if name in given]
        if used:
            how = ", ".join(f"-s {name}" for name in used)
            origins[path] = replace(origins.get(path, Origin()), how=how)
        if (only := _TOKEN.fullmatch(value)) and only[1] in values:
            whole = values[only[1]]
            return read_value(whole, f"-s {only[1]}") if isinstance(whole, str) else whole
        return _TOKEN.sub(lambda token: str(values.get(token[1], token[0])) if token[1] else "${", value)

    return Filled(Tree(visit(tree.data, ()), origins), uses, defaults)


def _defaults(data: Any) -> Iterator[tuple[str, str]]:
    """Variables that have a default somewhere in the data, which holds wherever they stand."""
    if isinstance(data, str):
        yield from ((token[1], token[2]) for token in _TOKEN.finditer(data) if token[2] is not None)
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _defaults(value)


def escape(data: Any) -> Any:
    """The tree with every `${` written `$${`, so that filling gives it back."""
    return mapped(data, lambda value: value.replace("${", "$${") if isinstance(value, str) else value)


def parse(overrides: Iterable[str] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The dotted paths and values of `path=value` texts (with YAML typing) or of a mapping (values as they are)."""
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    pairs = []
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"override '{text}': expected path=value, for example algorithm.lr=3e-4")
        pairs.append((path.strip(), read_value(value, f"override {path.strip()}")))
    return pairs


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
