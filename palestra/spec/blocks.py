"""The blocks `search:` and `sweep:` of a spec."""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_serializer, model_validator

from palestra.spec.model import Model
from palestra.spec.words import Words

Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100),
    Words("a name of letters, digits, '_', '-' and '.' that begins with a letter or digit"),
]
Direction = Literal["maximize", "minimize"]
METRICS: dict[str, tuple[str, Direction]] = {
    "control": ("eval/return", "maximize"),
    "pretrain": ("eval/loss", "minimize"),
    "sft": ("eval/loss", "minimize"),
    "dpo": ("eval/loss", "minimize"),
    "reward_model": ("eval/loss", "minimize"),
    "posttrain": ("eval/accuracy", "maximize"),
    "distill": ("eval/accuracy", "maximize"),
}
"""Default metric of a kind, also used to choose the best checkpoint; other kinds must name one."""

Ends = Annotated[list[float], Field(min_length=2, max_length=2), Words("two numbers, the smaller first")]
WholeEnds = Annotated[list[int], Field(min_length=2, max_length=2), Words("two whole numbers, the smaller first")]
Options = Annotated[list[JsonValue], Field(min_length=2), Words("a list with at least 2 values")]


class OneForm(Model):
    """A block of which exactly one form is given."""

    forms: ClassVar[tuple[str, ...]] = ()

    @property
    def form(self) -> str:
        """Which of the forms it is."""
        return next(form for form in self.forms if getattr(self, form) is not None)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [form for form in self.forms if getattr(self, form) is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of {', '.join(self.forms)}; got {' and '.join(given) or 'none'}")
        return self


class Axis(OneForm):
    """Range of one field: exactly one of these."""

    forms: ClassVar[tuple[str, ...]] = ("uniform", "loguniform", "int", "choice")

    uniform: Ends | None = None
    """Uniform over [a, b]."""
    loguniform: Ends | None = None
    """Log-uniform over [a, b]."""
    choice: Options | None = None
    """One of these values."""
    int: WholeEnds | None = None
    """Integers from a to b, inclusive."""

    @property
    def values(self) -> list[Any]:
        """Its ends or choices, which are validated before anything runs."""
        return list(getattr(self, self.form))

    @model_validator(mode="after")
    def _is_range(self) -> Self:
        values = self.values
        if self.form == "choice":
            if any(value in values[:index] for index, value in enumerate(values)):
                raise ValueError("expected choices that differ from each other")
        elif values[0] >= values[1]:
            raise ValueError(f"expected the smaller end first, got {values[0]:g} and {values[1]:g}")
        elif self.form == "loguniform" and values[0] <= 0:
            raise ValueError(f"expected ends above 0, which have logarithms; got {values[0]:g}")
        return self

    @model_serializer(mode="plain")
    def _short(self) -> dict[str, Any]:
        return {self.form: self.values}


class AshaSpec(Model):
    """Asynchronous successive halving (ASHA, Li et al. 2020)."""

    grace: Annotated[int, Field(ge=1)]
    """First rung: how far every trial runs, in units of `by`."""
    reduction: Annotated[int, Field(ge=2)] = 4
    """Reduction factor η: the best 1/η of a rung continue to the next, η times as far."""
    by: Literal["steps", "frames", "tokens"] = "steps"
    """Unit of rungs; a trial pauses at its first evaluation at or after a rung."""


class PrunerSpec(Model):
    """Early stopping of trials."""

    asha: AshaSpec
    """Asynchronous successive halving."""


class SearchSpec(Model):
    """Hyperparameter search over fields of the spec (`palestra search SPEC`)."""

    space: Annotated[dict[str, Axis], Field(min_length=1), Words("a mapping of key.path to what it is varied over")]
    """Search space, for example `algorithm.lr: {loguniform: [1e-4, 1e-2]}`."""
    trials: int = Field(default=16, ge=1)
    """Number of trials."""
    sampler: Literal["tpe", "random", "cmaes"] = "tpe"
    """Sampler: tree-structured Parzen estimator, random, or CMA-ES (numbers only, after the first trial)."""
    metric: str | None = Field(default=None, min_length=1)
    """Objective, a name in metrics.jsonl; null: the kind's default."""
    direction: Direction | None = None
    """Direction; required with a metric other than the kind's default."""
    pruner: PrunerSpec | None = None
    """Early stopping of trials; null: all run to the end."""
    parallel: int | None = Field(default=None, ge=1)
    """Parallel trials; null: as many as the cores allow."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads per session of a trial; null: the spec's, else one."""
    seed: int = Field(default=0, ge=0)
    """Seed of the sampler; trials use the spec's seeds."""
    keep: int | None = Field(default=None, ge=1)
    """Keep only the checkpoints of this many best trials at the end; null: all."""

    def goal(self, kind: str) -> tuple[str, Direction]:
        """Metric and direction for a spec of this kind."""
        own, way = METRICS.get(kind, (None, None))
        metric = self.metric or own
        direction = self.direction or (way if metric == own else None)
        if metric is None or direction is None:
            raise ValueError(f"kind {kind} has no default metric or direction for {metric or 'its trials'}")
        return metric, direction


Values = Annotated[list[JsonValue], Field(min_length=1), Words("a list of values")]
Factors = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1), Words("a list of factors above 0")]
Points = Annotated[
    dict[str, dict[str, JsonValue]], Field(min_length=1), Words("a mapping of names to parts of the spec")
]
Paths = Annotated[list[str], Field(min_length=1), Words("a list of key.path")]
Suffix = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=24), Words("at most 24 letters, digits, '_', '-' and '.'")
]


class SweepAxis(OneForm):
    """An axis: exactly one of values, multiply and points. A bare list means values."""

    forms: ClassVar[tuple[str, ...]] = ("values", "multiply", "points")

    values: Values | None = None
    """Values of the axis's fields."""
    multiply: Factors | None = None
    """Factors on the axis's fields, applied after the other axes; a schedule is scaled as a whole."""
    points: Points | None = None
    """Named parts of a spec, merged over it as by `extends`: a size sets width, layers and learning rate."""
    of: Paths | None = None
    """Fields that `values` or `multiply` apply to; null: the one the axis is named after."""

    @property
    def settings(self) -> list[Any]:
        """The values, the factors, or the names of the points."""
        return list(getattr(self, self.form))

    @property
    def labels(self) -> list[str]:
        """The settings as text, as used by `exclude` and --only."""
        return [label(setting) for setting in self.settings]

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if self.points is not None and self.of is not None:
            raise ValueError("expected no 'of' with 'points', which name the fields they set")
        twice = sorted({text for text in self.labels if self.labels.count(text) > 1})
        if twice:
            raise ValueError(f"expected {self.form} that differ from each other; duplicate: {', '.join(twice)}")
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
    """A grid of runs, the cross product of axes (`palestra sweep SPEC`)."""

    axes: Annotated[dict[str, AxisSpec], Field(min_length=1), Words("a mapping of axes")]
    """Axes by name; the last varies fastest."""
    exclude: list[dict[str, JsonValue]] = Field(default=[])
    """Combinations to skip, such as `{size: l, lr: 4}`; an axis not named matches all of its settings."""
    tokens_per_parameter: float | None = Field(default=None, gt=0)
    """Set `train.steps` to train on this many tokens per active parameter; null: the spec's steps."""
    group: Name | None = None
    """Folder under runs/ of all runs; null: `<name of the spec>_<short commit>`."""
    suffix: Suffix | None = None
    """Suffix of all run names, before their hash; null: none."""

    def excludes(self, at: dict[str, str]) -> bool:
        """Whether the combination with these labels is excluded."""
        return any(all(at[axis] == label(value) for axis, value in combination.items()) for combination in self.exclude)

    @model_validator(mode="after")
    def _excludes_what_is_there(self) -> Self:
        for combination in self.exclude:
            if not combination:
                raise ValueError("exclude: expected at least one axis; an empty combination excludes every run")
            for axis, value in combination.items():
                if axis not in self.axes:
                    raise ValueError(f"exclude: there is no axis '{axis}'; the axes are: {', '.join(self.axes)}")
                known = self.axes[axis].labels
                if label(value) not in known:
                    raise ValueError(f"exclude: axis '{axis}' has no {label(value)}; it has: {', '.join(known)}")
        return self


def label(value: Any) -> str:
    """A setting as text: 0.5, swiglu, [64,64]; 1.0 is 1."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
