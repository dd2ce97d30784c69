"""From the place a validation error names, which has the tags of unions in it, to the place in the data."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from palestra.spec.source import DataPath
from palestra.spec.words import words


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
        return _annotated(field), annotation
    inner = get_args(annotation)
    if get_origin(annotation) is list and inner:
        return inner[0], None
    if get_origin(annotation) is dict and len(inner) == 2:
        return inner[1], None
    return Any, None


def _annotated(field: FieldInfo) -> Any:
    """The type of a field together with its constraints."""
    annotation: Any = field.annotation
    return Annotated[annotation, *field.metadata] if field.metadata else annotation


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
