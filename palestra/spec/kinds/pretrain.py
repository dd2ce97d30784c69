"""The spec of kind `pretrain`: a language model trained on plain text."""

from typing import Annotated, Literal

from pydantic import Field

from palestra.spec.base import Conflict
from palestra.spec.lm import LmData, TextSource, TrainSource, WritingSpec
from palestra.spec.model import Model


class Stage(Model):
    """Other weights of the sources from some step on."""

    step: int = Field(ge=0)
    """The step from which they hold."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """The share of each source, by name."""


class TrainTextSource(TextSource, TrainSource):
    """Plain texts to train on."""


class PretrainData(LmData):
    """Texts to train and evaluate on."""

    train: dict[str, TrainTextSource] = Field(min_length=1)
    """What to train on, by name; a weight of 0 only evaluates on it."""
    eval: dict[str, TextSource] = Field(default={})
    """What to evaluate on, by name."""
    documents: bool = True
    """Keep the documents inside an example apart: no attention from one to another."""
    stages: list[Stage] = Field(default=[])
    """Weights that change during the run; until the first of them those of the sources hold."""

    @property
    def trained(self) -> list[str]:
        """The names of the sources that are trained on at some time."""
        staged = {name for stage in self.stages for name, weight in stage.weights.items() if weight > 0}
        return [name for name, weight in self.weights.items() if weight > 0 or name in staged]


class PretrainSpec(WritingSpec):
    """Pretraining: predict every next token of plain text."""

    kind: Literal["pretrain"]
    """The kind of experiment."""
    data: PretrainData
    """The texts."""

    def conflicts(self) -> list[Conflict]:
        """Stages that name no source or give none a weight, that are not in order, or that never begin."""
        found = super().conflicts()
        before = -1
        for index, stage in enumerate(self.data.stages):
            place = ("data", "stages", index)
            unknown = sorted(set(stage.weights) - set(self.data.train))
            if unknown:
                known = ", ".join(self.data.train)
                found.append(Conflict((*place, "weights"), f"expected names of data.train ({known}): {unknown}"))
            if not any(stage.weights.values()):
                found.append(Conflict((*place, "weights"), "expected at least one weight above 0"))
            if stage.step <= before:
                found.append(Conflict((*place, "step"), f"expected more than {before}, where the stage before begins"))
            if stage.step >= self.train.steps:
                found.append(Conflict((*place, "step"), f"expected less than train.steps = {self.train.steps}"))
            before = stage.step
        return found

    def derived(self) -> dict[str, int | float | str]:
        """Tokens a step and in all, and the floating-point operations of the run where the vocabulary is given."""
        tokens = self.train.batch * self.data.context
        found = super().derived() | {"tokens per step": tokens, "tokens": tokens * self.train.steps}
        shape = self.model.shape
        if shape is not None and shape.vocab is not None:
            found["training FLOPs"] = 3 * shape.flops_per_token(self.data.context) * tokens * self.train.steps
        return found
