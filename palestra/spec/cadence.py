"""How often something happens: "20 steps", "1e4 frames", "5 minutes"."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from palestra.spec.words import Words

Unit = Literal["steps", "frames", "tokens", "seconds", "minutes", "hours"]

_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
_AMOUNT = r"[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_COUNT_PATTERN = rf"^{_AMOUNT} *(?:steps?|frames?|tokens?)$"
_PATTERN = rf"^{_AMOUNT} *(?:steps?|frames?|tokens?|seconds?|minutes?|hours?)$"


@dataclass(frozen=True)
class Cadence:
    """An amount of steps, of frames, of tokens or of time between two occurrences."""

    amount: int | float
    unit: Unit

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

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cadence that a text such as "5 minutes" or "1 step" means."""
        match = re.fullmatch(rf"({_AMOUNT}) *([a-z]+)", text.strip())
        if match is None:
            raise ValueError(f"expected {cls.words}")
        unit: Any = match[2] if match[2] + "s" not in get_args(Unit) else match[2] + "s"
        return cls(float(match[1].replace("_", "")), unit)

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
        """Whether a multiple of it lies in (before, after]; only for counts."""
        if self.is_time:
            raise ValueError(f"'{self}' is time, it cannot be counted")
        return after // self.amount > before // self.amount

    def __str__(self) -> str:
        return f"{self.amount} {self.unit[:-1] if self.amount == 1 else self.unit}"

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
