"""The networks of a control spec."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from palestra.spec.model import Model

Width = Annotated[int, Field(ge=1)]


class RecurrentSpec(Model):
    """A recurrent layer after the hidden ones; its state is carried through the rollout and cleared at episode ends."""

    cell: Literal["lstm", "gru"] = "lstm"
    """The kind of cell."""
    size: int = Field(default=64, ge=1)
    """The width of its state."""


class GraphSpec(Model):
    """A trunk of your own: layers of torch.nn by name, and how they are joined."""

    layers: dict[str, dict[str, dict[str, JsonValue]]]
    """Name of the layer: {class of torch.nn: its arguments}, for example {first: {LazyLinear: {out_features: 64}}}."""
    join: dict[str, list[str]] = Field(default={})
    """For a layer that does not take the one before it: those it takes, concatenated; `obs` is the observation."""


class NetSpec(Model):
    """The networks of policy and value."""

    trunk: Literal["auto", "mlp", "nature", "impala"] = "auto"
    """What reads observations: hidden layers, or convolutions before them; auto: nature for images from 36 × 36 on."""
    hidden: list[Width] = Field(default=[64, 64])
    """The widths of the hidden layers; after convolutions one of 512 is usual."""
    critic_hidden: list[Width] | None = None
    """The widths of the critic's hidden layers where they are not the policy's."""
    activation: Literal["tanh", "relu", "silu", "gelu"] = "tanh"
    """The nonlinearity between layers."""
    layer_norm: bool = False
    """Layer normalisation before the nonlinearity of each hidden layer."""
    shared: bool = False
    """Whether policy and value share the hidden layers."""
    orthogonal: bool = True
    """Orthogonal initial weights, with gain 0.01 at the policy's and 1 at the value's output."""
    log_std: float = 0.0
    """What the logarithm of the standard deviation of continuous actions begins with, in units of half their range."""
    recurrent: RecurrentSpec | None = None
    """A recurrent layer after the hidden ones."""
    graph: GraphSpec | None = None
    """A trunk of your own instead of `trunk` and `hidden`."""
