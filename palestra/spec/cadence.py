"""How often something happens: "20 steps", "1e4 frames", "5 minutes", "2 steps until 10"."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from palestra.spec.words import Words

Unit = Literal["steps", "frames", "tokens", "seconds", "minutes", "hours"]

_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
_AMOUNT = r"[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_UNTIL = rf"(?: until ({_AMOUNT}))?"
_COUNT_PATTERN = rf"^{_AMOUNT} *(?:steps?|frames?|tokens?){_UNTIL}$"
_PATTERN = rf"^{_AMOUNT} *(?:(?:steps?|frames?|tokens?){_UNTIL}|seconds?|minutes?|hours?)$"


@dataclass(frozen=True)
class Cadence:
    """An amount of steps, of frames, of tokens or of time between two occurrences."""

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
        """Validated from text or from a Cadence; serialised to text in JSON and YAML."""
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        """A string of the right pattern."""
        return {"type": "string", "pattern": _PATTERN, "examples": ["20 steps", "1e4 frames", "5 minutes"]}

    @classmethod
    def _validate(cls, value: Any) -> Self:
        if isinstance(value, cls):
            return value
        try:
            if not isinstance(value, str):
                raise ValueError(f"expected {cls.words}")
            return cls.parse(value)
        except ValueError as error:
            raise PydanticCustomError("cadence", "{reason}", {"reason": str(error)}) from error


def _counted(cadence: Cadence) -> Cadence:
    if cadence.is_time:
        reason = (
            "expected a count such as steps: evaluation and logging are never timed in minutes, "
            "because a resumed run must repeat them exactly"
        )
        raise PydanticCustomError("cadence", "{reason}", {"reason": reason})
    return cadence


CountCadence = Annotated[
    Cadence,
    AfterValidator(_counted),
    WithJsonSchema({"type": "string", "pattern": _COUNT_PATTERN, "examples": ["20 steps", "1e4 frames"]}),
    Words("a cadence in steps or frames such as '20 steps' or '1e4 frames'"),
]
"""A cadence that repeats exactly after a resume, because it is counted."""
