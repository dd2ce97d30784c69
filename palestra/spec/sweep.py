"""The block `sweep:` of any spec: the axes whose cross product is run, what is left out, and how runs are named."""

import json
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, JsonValue, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from palestra.spec.model import Model
from palestra.spec.words import Words

FORMS = ("values", "multiply", "points")
Values = Annotated[list[JsonValue], Field(min_length=1), Words("a list of values")]
Factors = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1), Words("a list of factors above 0")]
Points = Annotated[
    dict[str, dict[str, JsonValue]], Field(min_length=1), Words("a mapping of names to parts of the spec")
]
Paths = Annotated[list[str], Field(min_length=1), Words("a list of key.path")]
FolderName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100),
    Words("a name of letters, digits, '_', '-' and '.' that begins with a letter or digit"),
]
Suffix = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=24),
    Words("at most 24 letters, digits, '_', '-' and '.'"),
]


class SweepAxis(Model):
    """One thing that is varied: exactly one of values, multiply and points. A bare list means values."""

    values: Values | None = None
    """What the fields of the axis are set to, one after the other."""
    multiply: Factors | None = None
    """What the fields of the axis are multiplied with, after the other axes have set theirs; a schedule as a whole."""
    points: Points | None = None
    """Parts of the spec by name, laid over it as `extends` does: a size sets the width, the layers and the rate."""
    of: Paths | None = None
    """The fields that `values` or `multiply` are about; null means the one that the axis is named after."""

    @property
    def form(self) -> str:
        """Which of the three it is."""
        return next(form for form in FORMS if getattr(self, form) is not None)

    @property
    def settings(self) -> list[Any]:
        """What is chosen from: the values, the factors, or the names of the points."""
        return list(getattr(self, self.form))

    @property
    def labels(self) -> list[str]:
        """The same as text, as `exclude` and --only name them."""
        return [label(setting) for setting in self.settings]

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            raise _problem(f"expected exactly one of {', '.join(FORMS)}; got {' and '.join(given) or 'none'}")
        if self.points is not None and self.of is not None:
            raise _problem("expected no 'of' beside 'points', which say themselves what they set")
        twice = sorted({text for text in self.labels if self.labels.count(text) > 1})
        if twice:
            raise _problem(f"expected {given[0]} that differ from each other; {', '.join(twice)} is there twice")
        return self

    @model_serializer(mode="plain")
    def _short(self) -> Any:
        if self.values is not None and self.of is None:
            return self.values
        return {self.form: getattr(self, self.form)} | ({} if self.of is None else {"of": self.of})


def _from_list(value: Any) -> Any:
    return {"values": value} if isinstance(value, list) else value


AxisSpec = Annotated[
    SweepAxis,
    BeforeValidator(_from_list, json_schema_input_type=list[JsonValue] | SweepAxis),
    Words("a list of values, or a mapping with values, multiply or points"),
]


class SweepSpec(Model):
    """Runs over the cross product of axes; `palestra sweep SPEC` reads it."""

    axes: Annotated[dict[str, AxisSpec], Field(min_length=1), Words("a mapping of axes")]
    """What is varied, by the name of the axis; the last one varies fastest."""
    exclude: list[dict[str, JsonValue]] = Field(default=[])
    """Combinations that are not run: `{size: l, lr: 4}`; what does not name an axis leaves out all of it."""
    tokens_per_parameter: float | None = Field(default=None, gt=0)
    """Set `train.steps` so that a run trains on so many tokens for each active parameter; null keeps the spec's."""
    group: FolderName | None = None
    """The folder under runs/ that all runs share; null means `<name of the spec>_<short commit>`."""
    suffix: Suffix | None = None
    """What the names of all runs end with, before their hash; null adds nothing."""

    def excludes(self, at: dict[str, str]) -> bool:
        """Whether the combination with these labels is left out."""
        return any(all(at[axis] == label(value) for axis, value in one.items()) for one in self.exclude)

    @model_validator(mode="after")
    def _excludes_what_is_there(self) -> Self:
        for one in self.exclude:
            if not one:
                raise _problem("exclude: expected at least one axis; an empty combination leaves out every run")
            for axis, value in one.items():
                if axis not in self.axes:
                    raise _problem(f"exclude: there is no axis '{axis}'; the axes are: {', '.join(self.axes)}")
                known = self.axes[axis].labels
                if label(value) not in known:
                    raise _problem(f"exclude: axis '{axis}' has no {label(value)}; it has: {', '.join(known)}")
        return self


def label(value: Any) -> str:
    """A setting as text: 0.5, swiglu, [64,64]; 1.0 is 1."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _problem(reason: str) -> PydanticCustomError:
    return PydanticCustomError("sweep", "{reason}", {"reason": reason})
