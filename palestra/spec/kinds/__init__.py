"""The table of kinds: which type a spec of a kind has and which function runs it, loaded on use."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

from palestra.errors import UsageError, did_you_mean
from palestra.spec.base import ExperimentSpec


@dataclass(frozen=True)
class Kind:
    """Where a kind lives, each as "module:name": its spec type, its runner and what loads a trained policy or model."""

    spec: str
    run: str
    load: str


def _kind(module: str, spec: str, load: str | None = None) -> Kind:
    return Kind(
        f"palestra.spec.kinds.{module}:{spec}", f"palestra.kinds.{module}:run", f"palestra.kinds.{load or module}:load"
    )


KINDS: dict[str, Kind] = {
    "control": _kind("control", "ControlSpec"),
    "pretrain": _kind("lm", "PretrainSpec"),
    "sft": _kind("lm", "SftSpec"),
    "dpo": _kind("lm", "DpoSpec"),
    "reward_model": _kind("lm", "RewardModelSpec"),
    "posttrain": _kind("posttrain", "PosttrainSpec", load="lm"),
    "distill": _kind("distill", "DistillSpec", load="lm"),
    "evaluate": _kind("evaluate", "EvaluateSpec"),
    "pipeline": Kind(
        "palestra.spec.kinds.pipeline:PipelineSpec", "palestra.pipeline.form:run", "palestra.pipeline.form:load"
    ),
}


def kinds() -> dict[str, Kind]:
    """All kinds by name: those of the entry points `palestra.kinds`, and Palestra's own, which none replaces."""
    return _installed_kinds() | KINDS


def is_kind(name: object) -> bool:
    """Whether there is a kind of this name."""
    return isinstance(name, str) and (name in KINDS or name in _installed_kinds())


def spec_type(kind: str) -> type[ExperimentSpec]:
    """The type of the specs of a kind."""
    return resolve_name(_find(kind).spec)


def runner(kind: str) -> Callable[..., Any]:
    """The function that runs specs of a kind."""
    return resolve_name(_find(kind).run)


def loader(kind: str) -> Callable[..., Any]:
    """The function that loads what a run of a kind has trained."""
    return resolve_name(_find(kind).load)


def unknown_kind(kind: object) -> str:
    """What to tell someone who asked for a kind that does not exist."""
    names = sorted(kinds())
    return f"unknown kind {kind!r}. {did_you_mean(kind, names)} The kinds are: {', '.join(names)}.".replace("  ", " ")


def _find(kind: str) -> Kind:
    if not is_kind(kind):
        raise UsageError(unknown_kind(kind))
    return KINDS.get(kind) or _installed_kinds()[kind]


@cache
def _installed_kinds() -> dict[str, Kind]:
    from importlib.metadata import entry_points  # here, because our own kinds need not wait for a walk of all packages

    return {point.name: point.load() for point in entry_points(group="palestra.kinds")}
