"""Low-rank adapters: which matrices get one, and how large."""

from typing import Annotated, Literal

from pydantic import Field

from palestra.spec.model import Model
from palestra.spec.words import Words

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraSpec(Model):
    """Low-rank adapters beside frozen weights (Hu et al. 2021): W + alpha / rank · B · A."""

    rank: int = Field(default=16, ge=1)
    """The rank of an adapter (r)."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's output is multiplied with alpha / rank."""
    targets: Annotated[
        Literal["all"] | Annotated[list[Target], Field(min_length=1)],
        Words("'all', or a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj"),
    ] = "all"
    """The matrices that get an adapter in every layer; routed experts and their routers never do."""
