"""Plain data to a typed spec, or all its problems at once in plain words, each at its line."""

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from palestra.errors import UsageError, did_you_mean
from palestra.spec.base import ExperimentSpec
from palestra.spec.kinds import is_kind, kinds, spec_type, unknown_kind
from palestra.spec.renames import renamed
from palestra.spec.source import DataPath, Origin, Origins, Tree, dotted
from palestra.spec.words import literals, words

Typed = TypeVar("Typed", bound=BaseModel)


class Place(NamedTuple):
    """A place in the data, the type that the value there has, and the model whose key it is."""

    path: DataPath
    annotation: Any
    owner: type[BaseModel] | None

    @property
    def words(self) -> str:
        """What belongs there, in plain words."""
        return words(self.annotation)


def locate(model: type[BaseModel], data: Any, loc: tuple[str | int, ...], *, absent: bool) -> Place:
    """The place in `data` that an error's `loc` means; with `absent` its last element is a key that is not there."""
    place = Place((), model, None)
    for index, part in enumerate(loc):
        members = _members(place.annotation)
        if len(members) > 1:  # a union: the part is the tag of one member, not a key of the data
            if index < len(loc) - 1:
                place = place._replace(annotation=next((m for m in members if _has_tag(m, part)), Any))
            continue
        child, owner = _child(members[0], part)
        if _holds(data, part):
            data = data[part]
            place = Place((*place.path, part), child, owner)
        elif absent and index == len(loc) - 1:
            place = Place((*place.path, part), child, owner)
        else:  # one value given where a list may stand, or a step inside a type that is no step in the data
            place = Place(place.path, place.annotation if child is Any else child, place.owner)
    return place


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field of this type may hold."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            yield member
        else:
            for inner in get_args(member) if get_origin(member) in (list, dict) else ():
                yield from models(inner)


def _members(annotation: Any) -> list[Any]:
    """The types in a union, without null; a type that is no union is its only member."""
    origin = get_origin(annotation)
    if origin is Annotated:
        base = get_args(annotation)[0]
        return _members(base) if get_origin(base) in (Union, types.UnionType, Annotated) else [base]
    if origin in (Union, types.UnionType):
        return [inner for member in get_args(annotation) if member is not type(None) for inner in _members(member)]
    return [annotation]


def _child(annotation: Any, part: str | int) -> tuple[Any, type[BaseModel] | None]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        if field is None:
            return Any, annotation
        inner: Any = field.annotation  # together with its constraints
        return Annotated[inner, *field.metadata] if field.metadata else inner, annotation
    inner = get_args(annotation)
    if get_origin(annotation) is list and inner:
        return inner[0], None
    if get_origin(annotation) is dict and len(inner) == 2:
        return inner[1], None
    return Any, None


def _has_tag(member: Any, tag: str | int) -> bool:
    if not isinstance(member, type):
        return False
    if not issubclass(member, BaseModel):
        return member.__name__ == tag
    literals = [field.annotation for field in member.model_fields.values() if get_origin(field.annotation) is Literal]
    return member.__name__ == tag or any(tag in get_args(literal) for literal in literals)


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, dict):
        return part in data
    return isinstance(data, list) and isinstance(part, int) and part < len(data)


@dataclass(frozen=True)
class SpecProblem:
    """One thing wrong with a spec: where, what was found and what to do."""

    at: DataPath
    origin: Origin
    reason: str
    hint: str = ""

    @property
    def path(self) -> str:
        """The key with dots: "algorithm.lr"."""
        return dotted(self.at)

    @property
    def advice(self) -> str:
        """The reason and the hint."""
        return f"{self.reason}. {self.hint}" if self.hint else self.reason

    def __str__(self) -> str:
        return f"{self.origin.where}  {self.path}: {self.advice}"


class SpecError(UsageError):
    """A spec that is not valid, with all its problems."""

    def __init__(self, problems: list[SpecProblem]):
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"the spec has {count}:\n" + "\n".join(f"  {problem}" for problem in problems))
        self.problems = problems


def validate(data: Any, origins: Origins) -> ExperimentSpec:
    """The typed spec that plain data describes; raises SpecError with every problem."""
    tree = Tree(data, origins)
    if "kind" not in data:
        reason = f"missing. The kinds are: {', '.join(sorted(kinds()))}"
        raise SpecError([SpecProblem(("kind",), tree.origin(()), reason)])
    if not is_kind(data["kind"]):
        raise SpecError([SpecProblem(("kind",), tree.origin(("kind",)), unknown_kind(data["kind"]).rstrip("."))])
    return checked(spec_type(data["kind"]), tree)


def checked(model: type[Typed], tree: Tree) -> Typed:
    """Data as a model, or all its problems in plain words, each at its line."""
    try:
        return model.model_validate(tree.data)
    except ValidationError as error:
        problems = {(problem.path, problem.reason): problem for problem in _problems(error, model, tree)}
        in_file = sorted(problems.values(), key=lambda problem: (problem.origin.file or "", problem.origin.line or 0))
        raise SpecError(in_file) from None


def _problems(error: ValidationError, model: type[BaseModel], tree: Tree) -> Iterator[SpecProblem]:
    for details in error.errors():
        if details["type"] == "conflicts":
            for path, reason in details["ctx"]["conflicts"]:
                yield SpecProblem(path, tree.origin(path), reason)
            continue
        place = locate(model, tree.data, details["loc"], absent=details["type"] == "missing")
        yield _problem(details, place, model, tree)


def _problem(details: Any, place: Place, model: type[BaseModel], tree: Tree) -> SpecProblem:
    kind, value, path = details["type"], details["input"], place.path
    reason, hint = "", ""
    if kind == "extra_forbidden":
        reason, hint = "unknown key", _nearest_key(path, place, model)
        if new := renamed(*path):
            reason, hint = f"renamed to '{new}'", ""
    elif kind == "missing":
        value, reason = None, f"missing; expected {place.words}"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        key = details["ctx"]["discriminator"].strip("'")
        path = (*path, key)
        tags = [member.model_fields[key].annotation for member in models(place.annotation)]
        options = [str(option) for tag in tags for option in get_args(tag)]
        expected = "one of " + ", ".join(f"'{option}'" for option in options)
        value = value.get(key) if isinstance(value, dict) else value
        reason = f"missing; expected {expected}" if kind == "union_tag_not_found" else _expected(expected, value)
        hint = _nearest_option(value, options)
    elif "url" not in details:  # a message of our own types
        reason = _with_value(details["msg"], value)
    elif kind in ("value_error", "assertion_error"):
        reason = _with_value(str(details["ctx"]["error"]), value)
    else:
        reason = _expected(place.words, value)
        hint = _nearest_option(value, literals(place.annotation))
    if isinstance(value, str) and (new := renamed(*path, value)):
        reason, hint = f"'{value}' was renamed to '{new}'", ""
    return SpecProblem(path, tree.origin(path), reason, hint)


def _expected(words: str, value: Any) -> str:
    return f"expected {words}, got {_shown(value)}"


def _with_value(reason: str, value: Any) -> str:
    if isinstance(value, dict | list):
        return reason
    return f"{reason}{',' if reason.startswith('expected') else ';'} got {_shown(value)}"


def _shown(value: Any) -> str:
    """A value as a spec would write it, shortened."""
    if isinstance(value, dict):
        return "a mapping"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest_option(value: Any, options: Any) -> str:
    return did_you_mean(value, [o for o in options if isinstance(o, str)]) if isinstance(value, str) else ""


def _nearest_key(path: DataPath, place: Place, model: type[BaseModel]) -> str:
    """The nearest valid key; else where a key of that name does exist; else all valid keys."""
    key = str(path[-1])
    valid = list(place.owner.model_fields) if place.owner else []
    if near := did_you_mean(key, valid):
        return near
    elsewhere = [f"'{where}'" for where in dict.fromkeys(_paths_of(key, model))]
    known = f"Valid keys: {', '.join(valid)}"
    return f"Did you mean {' or '.join(elsewhere)}? {known}" if elsewhere else known


def _paths_of(key: str, model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name == key:
            yield prefix + name
        for inner in models(field.annotation):
            yield from _paths_of(key, inner, f"{prefix}{name}.")
