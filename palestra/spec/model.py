"""Base class of spec types, cadences, plain data, execution-only fields."""

import ast
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from os import PathLike
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import core_schema

from palestra.spec.words import Words


class Conflict(NamedTuple):
    """Valid fields that do not fit together: where to look and what is expected."""

    path: tuple[str | int, ...]
    reason: str


class Model(BaseModel):
    """A mapping in a spec. The docstring under each field is its documentation."""

    # Built when it is used: most kinds are not used by most processes.
    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """The docstring under each field. Pydantic can read them itself, but does so at every start: 0.25 s."""
        documented = {name: field.description for name, field in cls.model_fields.items() if field.description}
        for part in reversed(cls.__mro__):
            body = _classes(part.__module__).get(part.__name__, []) if issubclass(part, Model) else []
            for field, text in pairwise(body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        documented[name] = inspect.cleandoc(words)
        return documented

    def conflicts(self) -> Iterable[Conflict]:
        """Conflicts between the fields of this block, by paths inside it."""
        return ()

    def all_conflicts(self) -> list[Conflict]:
        """Conflicts of the blocks inside this one, then its own."""
        inner = {name: getattr(self, name) for name in type(self).model_fields}
        return [*_inner_conflicts(inner, ()), *self.conflicts()]


def _inner_conflicts(value: Any, path: tuple[str | int, ...]) -> Iterator[Conflict]:
    if isinstance(value, Model):
        for conflict in value.all_conflicts():
            yield Conflict((*path, *conflict.path), conflict.reason)
    elif isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _inner_conflicts(item, (*path, key))


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


class Execution:
    """`Execution[int]` as the type of a field: it affects how a step is executed, not its result.

    Such a field (workers, memory, log level) is not part of the step's address.
    """

    def __class_getitem__(cls, item: Any) -> Any:
        return Annotated[item, cls]


@dataclass(frozen=True)
class SpecParts:
    """The plain data of a model, split into what identifies it and what does not."""

    counted: dict[str, Any]
    """What the result depends on, without null fields."""
    execution: list[tuple[list[str], Any]]
    """Execution fields: path and value."""
    unset: list[list[str]]
    """Paths of null fields: a new field that is null by default changes no identity."""

    def joined(self) -> dict[str, Any]:
        """The original data."""
        data = self.counted
        for path, value in (*self.execution, *((path, None) for path in self.unset)):
            data = _put(data, path, value)
        return data


def split(model: BaseModel, data: dict[str, Any]) -> SpecParts:
    """Split the plain data of a model, including models in lists and mappings."""
    parts = SpecParts({}, [], [])
    return replace(parts, counted=_split(model, data, [], parts))


def _split(value: Any, data: Any, path: list[str], parts: SpecParts) -> Any:
    if isinstance(data, list):
        items = value if isinstance(value, list) and len(value) == len(data) else [None] * len(data)
        pairs = enumerate(zip(items, data, strict=True))
        return [_split(item, plain, [*path, str(index)], parts) for index, (item, plain) in pairs]
    if not isinstance(data, dict):
        return data
    fields = type(value).model_fields if isinstance(value, BaseModel) else {}
    counted: dict[str, Any] = {}
    for key, item in data.items():
        at = [*path, key]
        if key in fields and Execution in fields[key].metadata:
            parts.execution.append((at, item))
        elif key in fields and item is None:
            parts.unset.append(at)
        else:
            inner = getattr(value, key, None) if fields else value.get(key) if isinstance(value, dict) else None
            counted[key] = _split(inner, item, at, parts)
    return counted


def _put(here: Any, path: Sequence[str], value: Any) -> Any:
    """A copy with a value at a path."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(here, list):
        return [_put(item, rest, value) if str(index) == key else item for index, item in enumerate(here)]
    return {**here, key: _put(here.get(key), rest, value)}


Unit = Literal["steps", "frames", "tokens", "seconds", "minutes", "hours"]

_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
_AMOUNT = r"[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_UNTIL = rf"(?: until ({_AMOUNT}))?"
_COUNT_PATTERN = rf"^{_AMOUNT} *(?:steps?|frames?|tokens?){_UNTIL}$"
_PATTERN = rf"^{_AMOUNT} *(?:(?:steps?|frames?|tokens?){_UNTIL}|seconds?|minutes?|hours?)$"


@dataclass(frozen=True)
class Cadence:
    """An interval in steps, frames, tokens or time."""

    amount: int | float
    unit: Unit
    until: int | float | None = None
    """The count up to which it occurs; null: always."""

    words: ClassVar[str] = "a cadence such as '20 steps', '1e4 frames' or '5 minutes'"

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ValueError(f"expected an amount of {', '.join(get_args(Unit))}")
        if not 0 < self.amount < float("inf"):
            raise ValueError("expected an amount above 0")
        if float(self.amount).is_integer():
            object.__setattr__(self, "amount", int(self.amount))
        elif not self.is_time:
            raise ValueError(f"expected a whole number of {self.unit}")
        if self.until is not None:
            if self.is_time or not float(self.until).is_integer() or self.until < self.amount:
                raise ValueError("expected 'until' with a count that it reaches, as in '2 steps until 10'")
            object.__setattr__(self, "until", int(self.until))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cadence that a text such as "5 minutes" or "1 step" means."""
        match = re.fullmatch(rf"({_AMOUNT}) *([a-z]+){_UNTIL}", text.strip())
        if match is None:
            raise ValueError(f"expected {cls.words}")
        unit: Any = match[2] if match[2] + "s" not in get_args(Unit) else match[2] + "s"
        until = None if match[3] is None else float(match[3].replace("_", ""))
        return cls(float(match[1].replace("_", "")), unit, until)

    @property
    def is_time(self) -> bool:
        """Whether it is measured by the clock rather than counted."""
        return self.unit in _SECONDS

    @property
    def seconds(self) -> float:
        """Its length in seconds; only for time."""
        if not self.is_time:
            raise ValueError(f"'{self}' is counted, it has no length in seconds")
        return self.amount * _SECONDS[self.unit]

    def crossed(self, before: int, after: int) -> bool:
        """Whether a multiple of it lies in (before, after], and not behind its end; only for counts."""
        if self.is_time:
            raise ValueError(f"'{self}' is time, it cannot be counted")
        last = after if self.until is None else min(after, self.until)
        return last // self.amount > before // self.amount

    def __str__(self) -> str:
        end = "" if self.until is None else f" until {self.until}"
        return f"{self.amount} {self.unit[:-1] if self.amount == 1 else self.unit}{end}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Validated from text or from a Cadence; serialized to text in JSON and YAML."""
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json")
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        """A string of the right pattern."""
        return {"type": "string", "pattern": _PATTERN, "examples": ["20 steps", "1e4 frames", "5 minutes"]}

    @classmethod
    def _validate(cls, value: Any) -> Self:
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise ValueError(f"expected {cls.words}")
        return cls.parse(value)


def _counted(cadence: Cadence) -> Cadence:
    if cadence.is_time:
        raise ValueError(
            "expected a count such as steps: evaluation and logging are never timed in minutes, "
            "because a resumed run must repeat them exactly"
        )
    return cadence


CountCadence = Annotated[
    Cadence,
    AfterValidator(_counted),
    WithJsonSchema({"type": "string", "pattern": _COUNT_PATTERN, "examples": ["20 steps", "1e4 frames"]}),
    Words("a cadence in steps or frames such as '20 steps' or '1e4 frames'"),
]
"""A cadence that repeats exactly after a resume, because it is counted."""


def without_defaults(model: Model, data: dict[str, Any], *later: str) -> dict[str, Any]:
    """Plain data without those fields that came `later` and have their default: stored specs and hashes stay."""
    if not isinstance(model, BaseModel):  # of a copy that was never validated
        return data
    fields = type(model).model_fields
    return {name: v for name, v in data.items() if name not in later or getattr(model, name) != fields[name].default}


def plain(value: Any) -> Any:
    """A spec or a part of one as mappings, lists and scalars, defaults included; tuples become lists."""
    return mapped(value, _plain)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if hasattr(value, "tolist"):  # NumPy's scalars and arrays, without importing it
        return plain(value.tolist())
    return str(value) if isinstance(value, Cadence | PathLike) else value


def mapped(data: Any, leaf: Callable[[Any], Any]) -> Any:
    """The tree with `leaf(value)` in place of every value that is neither a mapping nor a list; tuples become lists."""
    if isinstance(data, Mapping):
        return {key: mapped(item, leaf) for key, item in data.items()}
    if isinstance(data, list | tuple):
        return [mapped(item, leaf) for item in data]
    return leaf(data)


def standard_json(data: Any, **options: Any) -> str:
    """JSON that every reader takes: what is not finite, which Python would write as NaN or Infinity, is null."""
    try:
        return json.dumps(data, allow_nan=False, default=str, **options)
    except ValueError:
        finite = mapped(data, lambda value: None if isinstance(value, float) and not math.isfinite(value) else value)
        return json.dumps(finite, default=str, **options)
