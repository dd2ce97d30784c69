"""The blocks `search:` and `sweep:` of any spec: fields to vary, trials and rungs; axes and exclusions."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from palestra.spec.model import Model
from palestra.spec.words import Words

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
"""What the checkpoints of a kind are compared by; a kind that is not here must say its metric."""

Ends = Annotated[list[float], Field(min_length=2, max_length=2), Words("two numbers, the smaller first")]
WholeEnds = Annotated[list[int], Field(min_length=2, max_length=2), Words("two whole numbers, the smaller first")]
Options = Annotated[list[JsonValue], Field(min_length=2), Words("a list with at least 2 values")]
SEARCH_FORMS = ("uniform", "loguniform", "int", "choice")


class Axis(Model):
    """What one field is varied over: exactly one of these."""

    uniform: Ends | None = None
    """Numbers from a to b, each as likely as any other."""
    loguniform: Ends | None = None
    """Numbers from a to b whose logarithms are as likely as any other; for rates."""
    choice: Options | None = None
    """One of these values, whatever they are."""
    int: WholeEnds | None = None
    """Whole numbers from a to b, both included."""

    @property
    def form(self) -> str:
        """Which of the four it is."""
        return next(form for form in SEARCH_FORMS if getattr(self, form) is not None)

    @property
    def values(self) -> list[Any]:
        """Its ends, or all of its choices: what is tried before anything runs."""
        return list(getattr(self, self.form))

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [form for form in SEARCH_FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            raise _range_problem(
                f"expected exactly one of {', '.join(SEARCH_FORMS)}; got {' and '.join(given) or 'none'}"
            )
        values = self.values
        if given[0] == "choice":
            if any(value in values[:index] for index, value in enumerate(values)):
                raise _range_problem("expected choices that differ from each other")
        elif values[0] >= values[1]:
            raise _range_problem(f"expected the smaller end first, got {values[0]:g} and {values[1]:g}")
        elif given[0] == "loguniform" and values[0] <= 0:
            raise _range_problem(f"expected ends above 0, which have logarithms; got {values[0]:g}")
        return self

    @model_serializer(mode="plain")
    def _short(self) -> dict[str, Any]:
        return {self.form: self.values}


class AshaSpec(Model):
    """Asynchronous successive halving (Li et al. 2020): all trials run a little, the best of them go on."""

    grace: Annotated[int, Field(ge=1)]
    """Where the first rung is: how far every trial runs, in units of `by`."""
    reduction: Annotated[int, Field(ge=2)] = 4
    """η: the best 1/η of a rung go on to the next, which is η times as far."""
    by: Literal["steps", "frames", "tokens"] = "steps"
    """What rungs are counted in; a trial pauses at its first evaluation at or after one."""


class PrunerSpec(Model):
    """What gives up trials that do badly."""

    asha: AshaSpec
    """Asynchronous successive halving."""


class SearchSpec(Model):
    """A search over fields of the spec around it; `palestra search SPEC` reads it."""

    space: Annotated[dict[str, Axis], Field(min_length=1), Words("a mapping of key.path to what it is varied over")]
    """What is varied: `algorithm.lr: {loguniform: [1e-4, 1e-2]}`; what is not keeps the value of the spec."""
    trials: int = Field(default=16, ge=1)
    """How many specs are tried."""
    sampler: Literal["tpe", "random", "cmaes"] = "tpe"
    """What proposes values: the tree-structured Parzen estimator, chance, or CMA-ES (numbers only, after the first)."""
    metric: str | None = Field(default=None, min_length=1)
    """What trials are compared by, as it stands in metrics.jsonl; null takes what the kind's checkpoints go by."""
    direction: Direction | None = None
    """Which way is better; needed with a metric that is not the kind's own."""
    pruner: PrunerSpec | None = None
    """What gives up trials early; null runs all of them to their end."""
    parallel: int | None = Field(default=None, ge=1)
    """Trials side by side; null takes as many as the cores allow."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads of a trial's session; null takes the spec's own, else one."""
    seed: int = Field(default=0, ge=0)
    """The seed of what is proposed; the trials themselves run with the seeds of the spec."""
    keep: int | None = Field(default=None, ge=1)
    """At the end, keep the checkpoints of the best so many trials and delete the others'; null keeps all."""

    def goal(self, kind: str) -> tuple[str, Direction]:
        """The metric and its direction, for a spec of this kind."""
        own, way = METRICS.get(kind, (None, None))
        metric = self.metric or own
        direction = self.direction or (way if metric == own else None)
        if metric is None or direction is None:
            raise ValueError(f"kind {kind} does not say what {metric or 'its trials'} is compared by")
        return metric, direction


def _range_problem(reason: str) -> PydanticCustomError:
    return PydanticCustomError("search", "{reason}", {"reason": reason})


AXIS_FORMS = ("values", "multiply", "points")
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
        return next(form for form in AXIS_FORMS if getattr(self, form) is not None)

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
        given = [form for form in AXIS_FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            raise _axis_problem(f"expected exactly one of {', '.join(AXIS_FORMS)}; got {' and '.join(given) or 'none'}")
        if self.points is not None and self.of is not None:
            raise _axis_problem("expected no 'of' beside 'points', which say themselves what they set")
        twice = sorted({text for text in self.labels if self.labels.count(text) > 1})
        if twice:
            raise _axis_problem(f"expected {given[0]} that differ from each other; {', '.join(twice)} is there twice")
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
                raise _axis_problem("exclude: expected at least one axis; an empty combination leaves out every run")
            for axis, value in one.items():
                if axis not in self.axes:
                    raise _axis_problem(f"exclude: there is no axis '{axis}'; the axes are: {', '.join(self.axes)}")
                known = self.axes[axis].labels
                if label(value) not in known:
                    raise _axis_problem(f"exclude: axis '{axis}' has no {label(value)}; it has: {', '.join(known)}")
        return self


def label(value: Any) -> str:
    """A setting as text: 0.5, swiglu, [64,64]; 1.0 is 1."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _axis_problem(reason: str) -> PydanticCustomError:
    return PydanticCustomError("sweep", "{reason}", {"reason": reason})
