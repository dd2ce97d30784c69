"""The block `search:` of any spec: which fields to vary, over what, how many trials, and when to give one up."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from palestra.spec.model import Model
from palestra.spec.words import Words

Direction = Literal["maximise", "minimise"]
METRICS: dict[str, tuple[str, Direction]] = {
    "control": ("eval/return", "maximise"),
    "pretrain": ("eval/loss", "minimise"),
    "sft": ("eval/loss", "minimise"),
    "dpo": ("eval/loss", "minimise"),
    "reward_model": ("eval/loss", "minimise"),
    "posttrain": ("eval/accuracy", "maximise"),
    "distill": ("eval/accuracy", "maximise"),
}
"""What the checkpoints of a kind are compared by; a kind that is not here must say its metric."""

Ends = Annotated[list[float], Field(min_length=2, max_length=2), Words("two numbers, the smaller first")]
WholeEnds = Annotated[list[int], Field(min_length=2, max_length=2), Words("two whole numbers, the smaller first")]
Options = Annotated[list[JsonValue], Field(min_length=2), Words("a list with at least 2 values")]
FORMS = ("uniform", "loguniform", "int", "choice")


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
        return next(form for form in FORMS if getattr(self, form) is not None)

    @property
    def values(self) -> list[Any]:
        """Its ends, or all of its choices: what is tried before anything runs."""
        return list(getattr(self, self.form))

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            raise _problem(f"expected exactly one of {', '.join(FORMS)}; got {' and '.join(given) or 'none'}")
        values = self.values
        if given[0] == "choice":
            if any(value in values[:index] for index, value in enumerate(values)):
                raise _problem("expected choices that differ from each other")
        elif values[0] >= values[1]:
            raise _problem(f"expected the smaller end first, got {values[0]:g} and {values[1]:g}")
        elif given[0] == "loguniform" and values[0] <= 0:
            raise _problem(f"expected ends above 0, which have logarithms; got {values[0]:g}")
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


def _problem(reason: str) -> PydanticCustomError:
    return PydanticCustomError("search", "{reason}", {"reason": reason})
