"""The optimizer of a control algorithm."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from palestra.spec.model import Conflict, Model, without_defaults


class OptimizerSpec(Model):
    """Shared fields of all control algorithms."""

    optimizer: Literal["adam", "adamw", "rmsprop"] = "adam"
    """Optimizer, with torch's formulas; RMSprop's α is 0.99."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of AdamW."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """The optimizer's ε."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(self, handler(self), "optimizer", "weight_decay")

    def conflicts(self) -> Iterator[Conflict]:
        if self.optimizer != "adamw" and self.weight_decay != type(self).model_fields["weight_decay"].default:
            yield Conflict(("weight_decay",), f"expected nothing, because `optimizer: {self.optimizer}` has none")
