"""Whether a text follows an instruction: instructions out of a row, and the strict and the loose reading of a text."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from palestra.errors import PalestraError
from palestra.tasks.instruction_functions import FUNCTIONS
from palestra.tasks.instructions import INSTRUCTIONS

Check = Callable[..., bool]


class BadInstruction(PalestraError):
    """A row asks for something that no answer can be judged by."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a prompt."""

    name: str
    check: Callable[[str], bool]

    def strict(self, text: str) -> bool:
        """Whether the text as it is follows it."""
        return bool(text.strip()) and self.check(text)

    def loose(self, text: str) -> bool:
        """Whether the text follows it once its first line, its last line or its asterisks are left out."""
        return any(self.strict(variant) for variant in variants(text))


def variants(text: str) -> list[str]:
    """The eight texts of the loose reading, each once: with and without first line, last line and asterisks."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cut, *(one.replace("*", "") for one in cut)]))


def instructions_of(row: Mapping[str, Any]) -> list[Instruction]:
    """The instructions of a row: Google's `instruction_id_list` and `kwargs`, or AllenAI's `ground_truth`."""
    if "instruction_id_list" in row:
        names, arguments = row["instruction_id_list"], row.get("kwargs")
        if not _is_list(names) or not _is_list(arguments) or len(names) != len(arguments):
            raise BadInstruction("expected `instruction_id_list` and `kwargs` to be two lists of the same length")
        found = [_bound(INSTRUCTIONS, *pair) for pair in zip(names, arguments, strict=True)]
    elif "ground_truth" in row:
        found = [_of_function(one) for one in _ground_truths(row["ground_truth"])]
    else:
        raise BadInstruction(
            f"expected `instruction_id_list` and `kwargs`, or `ground_truth`; the row has {', '.join(row) or 'nothing'}"
        )
    if not found:
        raise BadInstruction("the row names no instruction, so every answer would follow it")
    return found


def _ground_truths(value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadInstruction(f"`ground_truth` is not valid JSON ({error}): {value!r:.80}") from error
    return value if _is_list(value) else [value]


def _of_function(value: Any) -> Instruction:
    if not isinstance(value, Mapping) or "func_name" not in value:
        raise BadInstruction(f"expected `ground_truth` to be a record with a `func_name`, got {value!r:.80}")
    return _bound(FUNCTIONS, value["func_name"], {name: one for name, one in value.items() if name != "func_name"})


def _bound(table: Mapping[str, Check], name: Any, arguments: Any) -> Instruction:
    """An instruction with its arguments; those that are null are as good as not there."""
    if not isinstance(name, str) or name not in table:
        near = get_close_matches(str(name), table, n=1)
        raise BadInstruction(f"unknown instruction {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    if not isinstance(arguments, Mapping | None):
        raise BadInstruction(f"{name}: expected its arguments as a record, got {arguments!r:.80}")
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    try:
        checked = _arguments_of(table[name]).model_validate(given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise BadInstruction(f"{name}: {'; '.join(problems)}") from error
    return Instruction(name, partial(table[name], **{key: getattr(checked, key) for key in given}))


@cache
def _arguments_of(check: Check) -> type[BaseModel]:
    """What a check takes besides the text, as a model that refuses all else."""
    fields = {
        name: (one.annotation, ...) for name, one in inspect.signature(check).parameters.items() if name != "text"
    }
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)  # pyrefly: ignore


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
