"""One spec out of files: picking it from a collection of named specs, and merging what it `extends`."""

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.spec.source import DataPath, Origin, SourceError, Tree, read_file


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
    kept = {path: origin for path, origin in base.origins.items() if not _inside(path, replaced)}
    return Tree(data, kept | top.origins)


def _inside(path: DataPath, others: list[DataPath]) -> bool:
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
        near = get_close_matches(name, names, n=1)
        hint = f"Did you mean '{near[0]}'?" if near else f"It holds: {', '.join(names) or 'none'}."
        raise UsageError(f"{path} holds no spec '{name}'. {hint}")
    origins = {at[1:]: origin for at, origin in file.origins.items() if at[:1] == (name,)}
    return Tree(file.data[name], origins), name
