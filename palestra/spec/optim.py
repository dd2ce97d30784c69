"""The optimizers of language models: AdamW for everything, or Muon for the matrices and AdamW for the rest."""

from typing import Annotated, Literal

from pydantic import Field

from palestra.spec.model import Model
from palestra.spec.schedule import Bounds, Schedule, ScheduleSpec

Rate = Annotated[ScheduleSpec, Bounds(at_least=0)]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class AdamWSpec(Model):
    """AdamW (Loshchilov & Hutter 2019)."""

    name: Literal["adamw"]
    """The optimizer."""
    lr: Rate = Schedule(shape="constant", start=3e-4)
    """The learning rate. This default is of pretraining; kinds that fine-tune `model.init` have lower ones."""
    betas: Betas = Field(default=[0.9, 0.95])
    """The decay of the means of gradients and of their squares (β₁, β₂)."""
    eps: float = Field(default=1e-8, gt=0)
    """ε, added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices and embeddings, times the learning rate; norms and biases never decay. Default as of `lr`."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The norm of all gradients together to which they are clipped; null does not clip."""


class MuonSpec(Model):
    """Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for embeddings, head, norms and biases."""

    name: Literal["muon"]
    """The optimizer."""
    lr: Rate = Schedule(shape="constant", start=0.02)
    """The learning rate of the matrices; an update has singular values around lr · √max(1, rows / columns)."""
    adam_lr: Rate = Schedule(shape="constant", start=3e-4)
    """The learning rate of AdamW, for everything else; kinds that fine-tune `model.init` have lower defaults."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """The decay of the mean of gradients that is orthogonalised (μ)."""
    nesterov: bool = True
    """Look one gradient ahead of that mean."""
    ns_steps: int = Field(default=5, ge=1, le=20)
    """Newton–Schulz iterations of the orthogonalisation."""
    betas: Betas = Field(default=[0.9, 0.95])
    """AdamW's decay of the means of gradients and of their squares (β₁, β₂)."""
    eps: float = Field(default=1e-8, gt=0)
    """ε of AdamW, added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices and embeddings, times their learning rate; norms and biases never decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """The norm of all gradients together to which they are clipped; null does not clip."""


OptimSpec = AdamWSpec | MuonSpec
"""The optimizers, told apart by `name`: `Annotated[OptimSpec, Field(discriminator="name")]`."""
