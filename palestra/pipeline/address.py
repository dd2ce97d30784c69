"""The address of a step: its name and a hash over its config, the files that it reads, and its inputs' addresses."""

import dataclasses
import datetime
import enum
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from palestra.errors import UsageError
from palestra.pipeline.files import content_hash
from palestra.pipeline.step import Output, Step, children, execution_fields, outputs
from palestra.runs.redact import redacted

DIGITS = 10
"""Hexadecimal digits of the hash in an address: among a thousand steps of a name two collide once in 2 million."""
INPUT = "$step"
FILE = "$file"
"""A path and what is there: the same file with other content is another input."""
TYPE = "$type"
"""The class of a config inside a config: `Adam(lr=1)` is not `Sgd(lr=1)`."""


def identity(step: Step, address_of: Callable[[Step], str]) -> dict[str, Any]:
    """All that a step's result depends on, as plain data: what the address is a hash of."""
    config = _plain(step.config, step.name, address_of, execution_fields(step.config, step.function))
    if isinstance(config, dict):
        config.pop(TYPE, None)  # of the whole config: that is what the function takes
    return {"name": step.name, "config": config}


def address(identified: Mapping[str, Any]) -> str:
    """`name-hash`, the same on every machine and under every prefix."""
    text = json.dumps(identified, sort_keys=True, separators=(",", ":"))
    return f"{identified['name']}-{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


def lines(identified: Mapping[str, Any]) -> dict[str, str]:
    """What an address is made of, one line a value: dotted path to what it is; for people, so without secrets."""
    return {"name": identified["name"]} | dict(_lines(redacted(identified["config"]), ""))


def _lines(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and INPUT in value:
        waits = "" if value.get("awaited", True) else " (not waited for)"
        yield path, f"{value[INPUT]}{'/' if value['path'] else ''}{value['path']}{waits}"
    elif isinstance(value, dict) and FILE in value:
        yield path, f"{json.dumps(value[FILE], ensure_ascii=False)} (content {value['sha256'][:10]})"
    elif isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _lines(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _counted(value: Any, left_out: frozenset[str], where: str) -> Iterator[tuple[str, Any]]:
    """The parts of a value that count; what is left out cannot be what the result depends on."""
    for key, item in children(value):
        if key not in left_out:
            yield key, item
        elif found := next(outputs(item), None):
            raise UsageError(
                f"{where}.{key} is marked Execution, which does not count, but is the output of {found.step.name}, "
                "which a result depends on: leave the mark out"
            )


def _key(where: str) -> str:
    """The key that a value stands under, or the list that it stands in."""
    return next((part for part in reversed(where.split(".")) if not part.isdigit()), "")


def _plain(value: Any, where: str, address_of: Callable[[Step], str], left_out: frozenset[str] = frozenset()) -> Any:
    again = functools.partial(_plain, address_of=address_of)
    match value:
        case Step() | Output():
            output = value if isinstance(value, Output) else Output(value)
            about = {INPUT: address_of(output.step), "path": output.path}
            return about if output.awaited else about | {"awaited": False}
        case None | bool() | int():
            return value.value if isinstance(value, enum.Enum) else value
        case str() | PurePath():
            text = str(value.value if isinstance(value, enum.Enum) else value)
            content = content_hash(value, _key(where))
            return text if content is None else {FILE: text, "sha256": content}
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes():
            return {"$bytes": hashlib.sha256(value).hexdigest()}
        case enum.Enum():
            return again(value.value, where)
        case datetime.date() | datetime.time() | datetime.timedelta():
            return str(value)
        case set() | frozenset():
            list(children(value))  # refuses outputs in a set
            return sorted((again(item, where) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
        case type() | FunctionType():
            if "<" in value.__qualname__:
                raise UsageError(
                    f"{where}: {value.__qualname__} cannot be part of a step's address, because nothing outside of "
                    "where it is made tells it from another: define it at the top of a module"
                )
            return f"{value.__module__}:{value.__qualname__}"
        case functools.partial():
            return again([value.func, list(value.args), value.keywords], where)
        case Mapping():
            if bad := [key for key in value if not isinstance(key, str | int) or str(key).startswith("$")]:
                raise UsageError(f"{where}: {bad[0]!r} cannot be a key in a step's config: use text without '$'")
            if len({str(key) for key in value}) < len(value):
                raise UsageError(f"{where}: two keys are the same as text, such as 1 and '1': use text alone")
            return {key: again(item, f"{where}.{key}") for key, item in _counted(value, left_out, where)}
        case list() | tuple():
            return [again(item, f"{where}.{index}") for index, item in enumerate(value)]
        case _ if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
            inner = execution_fields(value, type(value))
            fields = {key: again(item, f"{where}.{key}") for key, item in _counted(value, inner, where)}
            return {TYPE: type(value).__qualname__} | fields
        case _ if hasattr(value, "tolist") and hasattr(value, "dtype"):  # NumPy's scalars and arrays
            return again(value.tolist(), where)
    raise UsageError(
        f"{where}: a {type(value).__name__} cannot be part of a step's address, because it has no form that is the "
        "same everywhere: pass what it is made from (numbers, text, lists, dicts, dataclasses), or mark the field "
        "Execution[…] if the result does not depend on it"
    )
