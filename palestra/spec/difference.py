"""What tells two specs apart: the fields that differ, and one hash over all that is said."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.spec.base import ExperimentSpec
from palestra.spec.plain import plain


class _Absent:
    """The value of a field that one side does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True)
class Difference:
    """A field whose value differs; `ABSENT` on the side that does not have it."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.before!r} → {self.after!r}"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """The fields that differ between two trees of plain data, by dotted path; 1 and 1.0 are the same number."""
    return list(_compare("", a, b))


def spec_hash(spec: ExperimentSpec) -> str:
    """The sha256 of all values of a spec, defaults included; it depends on neither key order nor 1 versus 1.0."""
    return hashlib.sha256(_canonical(plain(spec)).encode()).hexdigest()


def _compare(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in (*a, *(key for key in b if key not in a)):
            yield from _compare(f"{path}.{key}" if path else str(key), a.get(key, ABSENT), b.get(key, ABSENT))
    elif _lists_of_mappings(a, b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _compare(f"{path}.{index}", left, right)
    elif a is ABSENT or b is ABSENT or _canonical(a) != _canonical(b):
        yield Difference(path, a, b)


def _lists_of_mappings(a: Any, b: Any) -> bool:
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
        return False
    return all(isinstance(item, Mapping) for item in (*a, *b))


def _canonical(value: Any) -> str:
    return json.dumps(_numbers(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _numbers(value: Any) -> Any:
    """The value with whole floats as integers, so that 1 and 1.0 are written alike."""
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
