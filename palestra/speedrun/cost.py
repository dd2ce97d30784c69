"""What a run costs, before it is made: size, tokens and FLOPs exactly, hardware FLOPs and hours within bounds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import MissingExtra, UsageError
from palestra.spec.kinds.pretrain import PretrainSpec
from palestra.spec.load import Source
from palestra.spec.load import load as load_spec
from palestra.spec.shape import Shape

MFU = (0.5, 0.2)
"""The shares of a device's peak that well and badly tuned training reaches: between them an estimate lies."""


@dataclass(frozen=True)
class Cost:
    """What follows from a spec whose vocabulary is known."""

    parameters: int
    active: int
    tokens: int
    flops_per_token: float
    """Forward floating-point operations a token; training is three times as much."""

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole training."""
        return 3 * self.flops_per_token * self.tokens


def cost(spec: PretrainSpec, shape: Shape) -> Cost:
    """The cost of a spec whose model has that shape, its vocabulary included."""
    return Cost(
        parameters=shape.parameters(),
        active=shape.parameters(active=True),
        tokens=spec.train.steps * spec.train.batch * spec.data.context,
        flops_per_token=shape.flops_per_token(spec.data.context),
    )


def pretraining(
    spec: Source, variables: Mapping[str, Any] | None, overrides: Iterable[str] | Mapping[str, Any]
) -> PretrainSpec:
    """The spec of a speedrun: kind `pretrain`, which measures bits per byte."""
    loaded = load_spec(spec, variables=variables, overrides=overrides).spec
    if not isinstance(loaded, PretrainSpec):
        raise UsageError(f"{loaded.name}: a speedrun is of kind 'pretrain', which measures bits per byte")
    if not loaded.data.eval and loaded.data.holdout == 0:
        raise UsageError(f"{loaded.name}: bits per byte of what? Set data.eval or data.holdout")
    return loaded


def shape_of(spec: PretrainSpec, root: Path = Path("runs")) -> Shape:
    """The shape of a spec's model; a vocabulary that is not given comes from the tokenizer, made where it must be."""
    shape = spec.model.shape
    if shape is not None and shape.vocab is not None:
        return shape
    try:
        from palestra.kinds.start import start_of
    except ModuleNotFoundError as error:
        raise MissingExtra("counting a model whose vocabulary the tokenizer says", "train") from error
    return start_of(spec, root).shape


def about(
    spec: Source, *, variables: Mapping[str, Any] | None = None, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> dict[str, str]:
    """What `palestra speedrun info` prints."""
    loaded = pretraining(spec, variables, overrides)
    found = cost(loaded, shape_of(loaded))
    low, high = (found.flops / mfu for mfu in MFU)
    at_peak = 989.5e12  # of an H100 or H200, for a feeling of hours
    return {
        "parameters": f"{found.parameters:,}",
        "active parameters": f"{found.active:,}",
        "steps": f"{loaded.train.steps:,}",
        "tokens": f"{found.tokens:,}",
        "tokens per parameter": f"{found.tokens / found.active:.1f} (active)",
        "FLOPs a token, forward": f"{found.flops_per_token:.4e}",
        "model FLOPs": f"{found.flops:.5e}",
        "hardware FLOPs, estimated": f"{low:.2e} to {high:.2e} ({MFU[0]:.0%} to {MFU[1]:.0%} of the peak used)",
        "hours on one H100 or H200": f"{low / at_peak / 3600:.3g} to {high / at_peak / 3600:.3g}",
    }
