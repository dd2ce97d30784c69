"""Low-rank adapters: which matrices get one, and how large."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from palestra.spec.model import Model

Matrix = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Target = Literal["all"] | Matrix


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class LoraSpec(Model):
    """Low-rank adapters beside frozen weights (Hu et al. 2021): W + alpha / rank · B · A."""

    rank: int = Field(default=16, ge=1)
    """The rank of an adapter (r)."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's output is multiplied with alpha / rank."""
    targets: Annotated[
        list[Target],
        Field(min_length=1),
        BeforeValidator(_listed, json_schema_input_type=Target | list[Target]),
    ] = Field(default=["all"])
    """The matrices that get an adapter in every layer, or `all` of them; routed experts and routers never do."""
