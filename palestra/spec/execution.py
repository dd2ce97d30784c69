"""Fields that say how something is carried out, not what comes of it: no part of a pipeline step's address."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin

from pydantic import BaseModel


class Execution:
    """`Execution[int]` as the type of a field: how a step is carried out, not what comes of it.

    Such a field (workers, memory, a log's level) is no part of the step's address.
    """

    def __class_getitem__(cls, item: Any) -> Any:
        return Annotated[item, cls]


def is_execution(hint: Any) -> bool:
    """Whether a type is `Execution[…]`."""
    return get_origin(hint) is Annotated and Execution in hint.__metadata__


@dataclass(frozen=True)
class Parts:
    """The plain data of a model, taken apart."""

    counted: dict[str, Any]
    """What comes of it depends on this; fields that are null are left out."""
    execution: list[tuple[list[str], Any]]
    """How it is carried out: the path of each such field, and its value."""
    unset: list[list[str]]
    """The paths of the fields that are null: a field that is new and null by default changes nothing."""

    def joined(self) -> dict[str, Any]:
        """The data as it was."""
        data = self.counted
        for path, value in (*self.execution, *((path, None) for path in self.unset)):
            data = _put(data, path, value)
        return data


def split(model: BaseModel, data: dict[str, Any]) -> Parts:
    """Take the plain data of a model apart; models in lists and mappings are gone through too."""
    parts = Parts({}, [], [])
    counted = _split(model, data, [], parts)
    return Parts(counted, parts.execution, parts.unset)


def _split(value: Any, data: Any, path: list[str], parts: Parts) -> Any:
    if isinstance(data, list):
        items = value if isinstance(value, list) and len(value) == len(data) else [None] * len(data)
        pairs = enumerate(zip(items, data, strict=True))
        return [_split(item, plain, [*path, str(index)], parts) for index, (item, plain) in pairs]
    if not isinstance(data, dict):
        return data
    fields = type(value).model_fields if isinstance(value, BaseModel) else {}
    kept: dict[str, Any] = {}
    for key, item in data.items():
        at = [*path, key]
        if key in fields and Execution in fields[key].metadata:
            parts.execution.append((at, item))
        elif key in fields and item is None:
            parts.unset.append(at)
        else:
            inner = getattr(value, key, None) if fields else value.get(key) if isinstance(value, dict) else None
            kept[key] = _split(inner, item, at, parts)
    return kept


def _put(here: Any, path: Sequence[str], value: Any) -> Any:
    """A copy with a value at a path."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(here, list):
        return [_put(item, rest, value) if str(index) == key else item for index, item in enumerate(here)]
    return {**here, key: _put(here.get(key), rest, value)}
