"""Text to plain data: YAML 1.2 core scalars, anchors and merge keys, and the line on which each value was written."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from palestra.errors import UsageError

DataPath = tuple[str | int, ...]
"""Where a value is in a tree of mappings and lists."""


@dataclass(frozen=True)
class Origin:
    """Where a value came from: a line of a file, or by hand (`how`: "override", "-s env", "python")."""

    file: str | None = None
    line: int | None = None
    how: str = "file"

    @property
    def where(self) -> str:
        """The place to look at, for error messages."""
        if self.file is None:
            return self.how
        return f"{self.file}:{self.line}" + ("" if self.how == "file" else f" ({self.how})")

    def __str__(self) -> str:
        return self.where if self.how == "file" else self.how


Origins = dict[DataPath, Origin]


class Tree(NamedTuple):
    """Plain data (mappings, lists and scalars) and the origin of every value in it."""

    data: Any
    origins: Origins

    def origin(self, path: DataPath) -> Origin:
        """Where the value at a path came from: its own origin or that of the mapping or list around it."""
        known = (self.origins.get(path[:length]) for length in range(len(path), -1, -1))
        return next((origin for origin in known if origin is not None), Origin(how="python"))

    def where(self, path: DataPath) -> str:
        """The place to look at for a path, for error messages."""
        return self.origin(path).where


def dotted(path: DataPath) -> str:
    """A path as people write it: "algorithm.lr"."""
    return ".".join(map(str, path))


class SourceError(UsageError):
    """A file that cannot be read as a spec."""


_INT = r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = (
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"

# What a plain scalar is under the YAML 1.2 core schema, first match first; all else is text. Unlike YAML 1.1, which
# PyYAML implements: no yes/no/on/off, no sexagesimals, no dates, and 3e-4 is a number.
_PLAIN: list[tuple[str, str, str]] = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", _INT, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("merge", r"<<", "<"),
]
_PATTERNS = {name: re.compile(pattern) for name, pattern, _ in _PLAIN}


def _add_scalars(target: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    for name, pattern, first in _PLAIN:
        firsts = ["" if character == "\0" else character for character in first]
        target.add_implicit_resolver(_TAG + name, re.compile(rf"^(?:{pattern})$"), firsts)


class _Loader(yaml.SafeLoader):
    """Knows none of the YAML 1.1 scalars, only ours."""


_Loader.yaml_implicit_resolvers = {}


class _Dumper(yaml.SafeDumper):
    """Keeps the YAML 1.1 scalars and adds ours, so that text is quoted when either kind of reader would mistake it."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value out."""
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        """Write lists of scalars on one line."""
        scalars = not any(isinstance(item, dict | list) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=scalars)

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Write rare line breaks as escapes; PyYAML would fold them into spaces."""
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
_add_scalars(_Loader)
_add_scalars(_Dumper)


def read_file(path: Path) -> Tree:
    """The plain data of a YAML or JSON file and the origin of every value."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SourceError(f"there is no spec file {path}") from error
    except IsADirectoryError as error:
        raise SourceError(f"{path} is a folder; a spec is a YAML or JSON file") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    # YAML allows no tabs between tokens; JSON does, and never inside a string.
    return read_text(text.replace("\t", " ") if path.suffix == ".json" else text, str(path))


def read_text(text: str, file: str) -> Tree:
    """The plain data of YAML text and the origin of every value; `file` names it in origins and errors."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        reason = "; ".join(part for part in (error.context, error.problem) if part)
        raise SourceError(f"{file}{line}: not valid YAML: {reason}") from error
    except yaml.YAMLError as error:
        raise SourceError(f"{file}: not valid YAML: {error}") from error
    if root is None:
        return Tree(None, {})
    reader = _Reader(file)
    return Tree(reader.value(root, ()), reader.origins)


def read_value(text: str, label: str) -> Any:
    """A value as YAML types it: "3e-4" is a number, "[1, 2]" a list, "" is null; `label` names it in errors."""
    return read_text(text, label).data


def write_text(data: Any) -> str:
    """YAML that `read_text` reads back to the same data, keys in the order given."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False)


class _Reader:
    """Turns nodes into plain data and notes where each was written."""

    def __init__(self, file: str):
        self.file = file
        self.origins: Origins = {}
        self.open: list[yaml.Node] = []

    def value(self, node: yaml.Node, path: DataPath) -> Any:
        self.origins.setdefault(path, Origin(self.file, _line(node)))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if node in self.open:
            raise self.error(node, "this anchor contains itself")
        self.open.append(node)
        if isinstance(node, yaml.MappingNode):
            value: Any = self.mapping(node, path)
        elif node.tag == _TAG + "seq":
            value = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            raise self.error(node, f"unknown tag {node.tag!r}; a spec is plain data without tags")
        self.open.pop()
        return value

    def mapping(self, node: yaml.MappingNode, path: DataPath) -> dict[str, Any]:
        if node.tag != _TAG + "map":
            raise self.error(node, f"unknown tag {node.tag!r}; a spec is plain data without tags")
        mapping = {}
        for key, value in self.entries(node):
            self.origins[(*path, key.value)] = Origin(self.file, _line(key))
            mapping[key.value] = self.value(value, (*path, key.value))
        return mapping

    def entries(self, node: yaml.MappingNode) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        """The keys and values of a mapping: its own first, then those that `<<` brings and it does not have."""
        own: dict[str, yaml.ScalarNode] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == _TAG + "merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
                text = f" {key.value}" if isinstance(key, yaml.ScalarNode) else ""
                raise self.error(key, f"the key{text} is not text; put quotes around it")
            if key.value in own:
                first = _line(own[key.value])
                raise self.error(key, f"the key '{key.value}' is given twice, first in line {first}; remove one")
            own[key.value] = key
            yield key, value
        for base in merged:
            if not isinstance(base, yaml.MappingNode):
                raise self.error(base, "'<<' takes a mapping or a list of mappings")
            if base in self.open:
                raise self.error(base, "this anchor contains itself")
            self.open.append(base)
            for key, value in self.entries(base):
                if key.value not in own:
                    own[key.value] = key
                    yield key, value
            self.open.pop()

    def scalar(self, node: yaml.ScalarNode) -> Any:
        text = node.value
        kind = node.tag.removeprefix(_TAG)
        if kind in ("str", "merge"):
            return text
        if kind in _PATTERNS and not _PATTERNS[kind].fullmatch(text):
            raise self.error(node, f"{text!r} is not of the type in its tag, {kind}")
        if kind == "bool":
            return text.lower() == "true"
        if kind == "null":
            return None
        if kind == "int":
            try:
                return int(text.replace("_", ""), 0 if text.startswith(("0x", "0o")) else 10)
            except ValueError as error:
                raise self.error(node, f"a number of {len(text)} digits is too large") from error
        if kind == "float":
            return _number(text.replace("_", ""))
        raise self.error(node, f"unknown tag {node.tag!r}; a spec is plain data without tags")

    def error(self, node: yaml.Node, reason: str) -> SourceError:
        return SourceError(f"{self.file}:{_line(node)}: {reason}")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _number(text: str) -> int | float:
    if text.lower().lstrip("+-") in (".inf", ".nan"):
        return float(text.lower().replace(".", ""))
    number = float(text)
    # `frames: 2e5` is meant as a whole number; beyond 2**53 a float no longer tells neighboring ones apart.
    if "e" in text.lower() and number.is_integer() and abs(number) < 2**53:
        return int(number)
    return number
