"""Schedules: a constant, or a shape with a start and an end."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from palestra.spec.model import Cadence, Conflict, Model
from palestra.spec.words import Words

Shape = Literal["constant", "linear", "cosine", "rate", "periodic", "wsd", "inverse_sqrt"]

_SPAN: tuple[str, ...] = ("shape", "start", "end", "begin", "finish")
_READS: dict[str, tuple[str, ...]] = dict.fromkeys(get_args(Shape), _SPAN) | {
    "constant": ("shape", "start"),
    "rate": (*_SPAN, "rate"),
    "periodic": (*_SPAN, "period"),
}


def _fraction_or_steps(value: Any) -> float | Cadence:
    if isinstance(value, str):
        with suppress(ValueError):  # the message below says what belongs here
            value = Cadence.parse(value)
    if isinstance(value, Cadence) and value.unit == "steps" and value.until is None:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    raise ValueError("expected a fraction of the run of at least 0 and below 1, or a count such as '100 steps'")


Warmup = Annotated[
    float | Cadence,
    PlainValidator(_fraction_or_steps),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
                {"type": "string", "pattern": r"^[0-9][0-9_.eE+]* *steps?$", "examples": ["100 steps"]},
            ]
        }
    ),
    Words("a fraction of the run below 1, or a count such as '100 steps'"),
]
"""How long a schedule warms up."""


class Schedule(Model):
    """A value over the progress of a run, from `start` to `end`; a bare number means a constant."""

    shape: Shape
    """Shape of the schedule."""
    start: float
    """Value until `begin` and after the warm-up."""
    end: float = 0.0
    """Final value, reached at `finish` except for rate and inverse_sqrt (not for constant)."""
    warmup: Warmup = 0.0
    """Linear warm-up from 0 to `start`; the decay starts no earlier."""
    begin: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the run at which the decay starts."""
    finish: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the run at which the decay ends."""
    rate: float = Field(default=0.9, gt=0, lt=1)
    """Factor applied at each twentieth of the span (only for rate)."""
    period: float = Field(default=0.1, gt=0, le=1)
    """Period as a fraction of the span (only for periodic)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        unread = sorted(self.model_fields_set - {*_READS[self.shape], "warmup"})
        if unread:
            raise ValueError(f"a {self.shape} schedule does not use {', '.join(map(repr, unread))}; remove it")
        if self.begin >= self.finish:
            raise ValueError(f"'begin' ({self.begin:g}) must come before 'finish' ({self.finish:g})")
        if not isinstance(self.warmup, Cadence) and self.warmup >= self.finish:
            raise ValueError(f"'warmup' ({self.warmup:g}) must end before 'finish' ({self.finish:g})")
        if self.shape == "wsd" and self.begin == 0:
            raise ValueError("a wsd schedule needs 'begin', the fraction of the run at which it decays, such as 0.8")
        if self.shape == "inverse_sqrt" and self.begin == 0 and self.warmup == 0:
            raise ValueError("an inverse_sqrt schedule needs 'warmup' or 'begin': it falls with the root of their end")
        return self

    @model_serializer(mode="plain")
    def _short(self) -> Any:
        if self.shape == "constant" and self.warmup == 0:
            return self.start
        written = {key: getattr(self, key) for key in _READS[self.shape]}
        if self.warmup != 0:
            written["warmup"] = str(self.warmup) if isinstance(self.warmup, Cadence) else self.warmup
        return written

    def arguments(self) -> dict[str, Any]:
        """What `palestra.rl.schedules.value` takes besides the progress; `in_fractions` comes first."""
        if isinstance(self.warmup, Cadence):
            raise ValueError(f"how much of the run '{self.warmup}' are is not known here")
        return {key: getattr(self, key) for key in type(self).model_fields}


def _from_number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"shape": "constant", "start": value}
    if isinstance(value, dict | Schedule):
        return value
    raise ValueError("expected a number, or a mapping such as {shape: linear, start: 3e-4, end: 0}")


ScheduleSpec = Annotated[
    Schedule, BeforeValidator(_from_number, json_schema_input_type=float | Schedule), Words("a number or a schedule")
]
"""A schedule or a bare number."""


def constant(value: float) -> Schedule:
    """A constant schedule."""
    return Schedule(shape="constant", start=value)


def _not_negative(schedule: Schedule) -> Schedule:
    for key in ("start",) if schedule.shape == "constant" else ("start", "end"):
        if getattr(schedule, key) < 0:
            raise ValueError(f"expected {_what(schedule, key)} of at least 0")
    return schedule


def _positive(schedule: Schedule) -> Schedule:
    if schedule.start <= 0:
        raise ValueError(f"expected {_what(schedule, 'start')} above 0")
    return _not_negative(schedule)


def _what(schedule: Schedule, key: str) -> str:
    return "a number" if schedule.shape == "constant" else f"a schedule with '{key}'"


Rate = Annotated[ScheduleSpec, AfterValidator(_not_negative)]
"""A schedule of at least 0."""
PositiveRate = Annotated[ScheduleSpec, AfterValidator(_positive)]
"""A schedule that starts above 0; it may end at 0."""


M = TypeVar("M", bound=Model)


def in_fractions(model: M, steps: int) -> M:
    """The same model with its schedules' warm-ups as fractions of a run of that many steps."""
    counted = {name: s.model_copy(update={"warmup": w.amount / steps}) for name, s, w in _counted(model)}
    return model.model_copy(update=counted)


def warmup_conflicts(model: Model, steps: int, where: str) -> Iterator[Conflict]:
    """Warm-ups of the schedules of a block that do not end within a run of that many steps."""
    for name, schedule, warmup in _counted(model):
        if warmup.amount >= schedule.finish * steps:
            end = "the run" if schedule.finish == 1 else f"'finish' ({schedule.finish:g} of the run)"
            reason = f"expected a warm-up that ends before {end} of {steps} steps does, got '{warmup}'"
            yield Conflict((where, name, "warmup"), reason)


def _counted(model: Model) -> Iterator[tuple[str, Schedule, Cadence]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, Schedule) and isinstance(value.warmup, Cadence):
            yield name, value, value.warmup
