"""Types in plain words ("a number above 0"), for error messages and for the reference page."""

import types
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types as limits
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Words:
    """Put into `Annotated[...]`: says what a value must be where the bare type would not."""

    text: str


def field_words(field: FieldInfo) -> str:
    """What a field of a model takes, in plain words."""
    return words(field.annotation, field.metadata)


def words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a value of this type must be, in plain words: "a whole number of at least 1, or null"."""
    metadata = list(_flat(metadata))
    for mark in reversed(metadata):
        if isinstance(mark, Words):
            return mark.text
    if annotation is JsonValue:
        return "any value that JSON can hold"
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *inner = get_args(annotation)
        return words(base, [*inner, *metadata])
    if origin in (Union, types.UnionType):
        members = [m for m in get_args(annotation) if m is not type(None)]
        texts = list(dict.fromkeys(words(m, metadata) for m in members))
        return ", or ".join([*texts, "null"] if type(None) in get_args(annotation) else texts)
    if origin is Literal:
        options = [f"'{option}'" for option in get_args(annotation)]
        return options[0] if len(options) == 1 else "one of " + ", ".join(options)
    if origin is list or annotation is list:
        text = "a list" + "".join(f" (each {words(item)})" for item in get_args(annotation))
        least = next((m.min_length for m in metadata if isinstance(m, limits.MinLen)), 0)
        return f"{text} with at least {least} item{'s' if least > 1 else ''}" if least else text
    if origin is dict or annotation is dict:
        return "a mapping"
    return _plain_words(annotation) + _limit_words(metadata)


def literals(annotation: Any) -> tuple[Any, ...]:
    """The values that a type lists, if it is such a type."""
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin in (Annotated, Union, types.UnionType, list):
        return tuple(option for inner in get_args(annotation) for option in literals(inner))
    return ()


def _plain_words(annotation: Any) -> str:
    named = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "any value"}
    if annotation in named:
        return named[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(f"'{member.value}'" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, PurePath):
        return "a path"
    return str(getattr(annotation, "words", None) or getattr(annotation, "__name__", annotation))


def _limit_words(metadata: list[Any]) -> str:
    low = next((f"at least {m.ge:g}" for m in metadata if isinstance(m, limits.Ge)), None)
    above = next((f"above {m.gt:g}" for m in metadata if isinstance(m, limits.Gt)), None)
    high = next((f"at most {m.le:g}" for m in metadata if isinstance(m, limits.Le)), None)
    below = next((f"below {m.lt:g}" for m in metadata if isinstance(m, limits.Lt)), None)
    if any(isinstance(m, limits.MinLen) for m in metadata):
        return " that is not empty"
    ends = [end for end in (low or above, high or below) if end]
    if not ends:
        return ""
    return (" of " if low else " ") + " and ".join(ends)


def _flat(metadata: Iterable[Any]) -> Iterable[Any]:
    """Metadata with the constraints that `Field(...)` inside `Annotated` holds taken out of it."""
    for mark in metadata:
        if isinstance(mark, FieldInfo):
            yield from mark.metadata
        elif isinstance(mark, limits.GroupedMetadata):
            yield from mark
        else:
            yield mark
