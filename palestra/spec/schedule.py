"""A number that may change over the run: a constant or a shape with a start and an end."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError, core_schema

from palestra.spec.model import Model
from palestra.spec.words import Words

Shape = Literal["constant", "linear", "cosine", "rate", "periodic"]

_SPAN = ("shape", "start", "end", "begin", "finish")
_READS: dict[str, tuple[str, ...]] = {
    "constant": ("shape", "start"),
    "linear": _SPAN,
    "cosine": _SPAN,
    "rate": (*_SPAN, "rate"),
    "periodic": (*_SPAN, "period"),
}


class Schedule(Model):
    """A value over the progress of a run, from `start` to `end`; a bare number means a constant."""

    shape: Shape
    """How the value moves from `start` to `end`."""
    start: float
    """The value until `begin`."""
    end: float = 0.0
    """The value it moves towards and, but for rate, has at `finish` (not for constant)."""
    begin: float = Field(default=0.0, ge=0, lt=1)
    """The fraction of the run at which the change begins."""
    finish: float = Field(default=1.0, gt=0, le=1)
    """The fraction of the run at which the change is over."""
    rate: float = Field(default=0.9, gt=0, lt=1)
    """The factor applied at each twentieth of the span (only for rate)."""
    period: float = Field(default=0.1, gt=0, le=1)
    """The length of one oscillation as a fraction of the span (only for periodic)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        unread = sorted(self.model_fields_set - set(_READS[self.shape]))
        if unread:
            raise _problem(f"a {self.shape} schedule does not use {', '.join(map(repr, unread))}; remove it")
        if self.begin >= self.finish:
            raise _problem(f"'begin' ({self.begin:g}) must come before 'finish' ({self.finish:g})")
        return self

    @model_serializer(mode="plain")
    def _short(self) -> Any:
        if self.shape == "constant":
            return self.start
        return {key: getattr(self, key) for key in _READS[self.shape]}


def _problem(reason: str) -> PydanticCustomError:
    return PydanticCustomError("schedule", "{reason}", {"reason": reason})


def _from_number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"shape": "constant", "start": value}
    if isinstance(value, dict | Schedule):
        return value
    raise _problem("expected a number, or a mapping such as {shape: linear, start: 3e-4, end: 0}")


ScheduleSpec = Annotated[
    Schedule,
    BeforeValidator(_from_number, json_schema_input_type=float | Schedule),
    Words("a number or a schedule"),
]
"""What a spec may say where a number can change over the run."""


@dataclass(frozen=True)
class Bounds:
    """Put into `Annotated[ScheduleSpec, Bounds(...)]`: the least a schedule may start and end with.

    With `above` the start must be larger than that; the end may reach it (a clip range that decays to 0).
    """

    at_least: float | None = None
    above: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """The schedule's own validation, then the limits."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, schedule: Schedule) -> Schedule:
        constant = schedule.shape == "constant"
        least = self.at_least if self.above is None else self.above
        for key in ("start",) if constant else ("start", "end"):
            value, what = getattr(schedule, key), "a number" if constant else f"a schedule with '{key}'"
            if key == "start" and self.above is not None and value <= self.above:
                raise _problem(f"expected {what} above {self.above:g}")
            if least is not None and value < least:
                raise _problem(f"expected {what} of at least {least:g}")
        return schedule
