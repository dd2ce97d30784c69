"""The spec of kind `reward_model`: a language model with a scalar head, trained on preferences."""

from typing import ClassVar, Literal

from pydantic import Field

from palestra.spec.base import Conflict
from palestra.spec.kinds.sft import ChatData
from palestra.spec.lm import LmSpec, Tuning
from palestra.spec.model import Model


class RewardLossSpec(Model):
    """The Bradley–Terry loss of pairs."""

    margin: float = Field(default=0.0, ge=0)
    """How much higher the chosen answer's score has to be."""
    centre: float = Field(default=0.0, ge=0)
    """The weight of a term that holds the scores around 0 (Eisenstein et al. 2023)."""


class RewardModelSpec(LmSpec):
    """Reward modelling: a score for each conversation, higher for the chosen answer than for the rejected one."""

    tuning: ClassVar[Tuning | None] = Tuning(lr=1e-5, lora_lr=1e-4, weight_decay=0.0)  # as OpenRLHF

    kind: Literal["reward_model"]
    """The kind of experiment."""
    data: ChatData
    """Pairs: rows with `prompt` or `messages`, `chosen` and `rejected`; or only the two, as whole conversations."""
    loss: RewardLossSpec = RewardLossSpec()
    """The loss."""

    def conflicts(self) -> list[Conflict]:
        """Adapters have no place for the scalar head; scores are of conversations."""
        found = super().conflicts()
        if self.model.lora is not None:
            found.append(Conflict(("model", "lora"), "expected null: a reward model's head and weights train together"))
        if self.data.format == "plain":
            reason = "expected chat, because a reward model scores conversations, written with the chat template"
            found.append(Conflict(("data", "format"), reason))
        return found
