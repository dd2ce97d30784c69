"""The spec of kind `dpo`: a language model trained on preferences, without a reward model."""

from typing import ClassVar, Literal

from pydantic import Field

from palestra.spec.base import Conflict
from palestra.spec.kinds.sft import ChatData
from palestra.spec.lm import Tuning, WritingSpec
from palestra.spec.model import Model


class DpoLossSpec(Model):
    """Direct preference optimisation (Rafailov et al. 2023)."""

    beta: float = Field(default=0.1, gt=0)
    """How strongly the model is held to where it started (β)."""
    type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """The loss of the margin between the chosen and the rejected answer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """How often a label is taken to be wrong (conservative DPO); only for sigmoid."""
    average_logprobs: bool | None = None
    """Average log-probabilities over each completion's tokens in place of their sum; null does for ipo, as TRL."""

    @property
    def averages(self) -> bool:
        """Whether log-probabilities are averaged."""
        return self.type == "ipo" if self.average_logprobs is None else self.average_logprobs


class DpoSpec(WritingSpec):
    """Preference optimisation: make the chosen answer more likely than the rejected one."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-6, lora_lr=1e-5, weight_decay=0.0)  # as TRL

    kind: Literal["dpo"]
    """The kind of experiment."""
    data: ChatData
    """Pairs: rows with `prompt` or `messages`, `chosen` and `rejected`; or only the two, as whole conversations."""
    loss: DpoLossSpec = DpoLossSpec()
    """The loss."""

    def conflicts(self) -> list[Conflict]:
        """A new model has no preferences to be held to."""
        found = super().conflicts()
        if self.model.init is None:
            found.append(Conflict(("model", "init"), "expected a trained model: the reference is where it starts"))
        if self.loss.label_smoothing and self.loss.type != "sigmoid":
            found.append(Conflict(("loss", "label_smoothing"), "expected 0, because only `type: sigmoid` uses it"))
        return found
