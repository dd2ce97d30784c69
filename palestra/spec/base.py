"""What the specs of all kinds share: identity, seeds, cadences, tracking, hooks and the machine."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from palestra.spec.blocks import SearchSpec, SweepSpec
from palestra.spec.model import Cadence, CountCadence, Execution, Model
from palestra.spec.words import Words

Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100),
    Words("a name of letters, digits, '_', '-' and '.' that begins with a letter or digit"),
]
Module = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"),
    Words("an import path such as 'package.module'"),
]
Function = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"),
    Words("a function as 'module:function'"),
]


class Conflict(NamedTuple):
    """Two fields that do not fit together: where to look and what to do."""

    path: tuple[str | int, ...]
    reason: str


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Cadences = Annotated[
    list[Cadence],
    BeforeValidator(_listed, json_schema_input_type=Cadence | list[Cadence]),
    Words("a cadence such as '5 minutes' or '1e4 frames', or a list of them"),
]


class Every(Model):
    """How often things happen during a run."""

    checkpoint: Cadences = Field(default=[Cadence(5, "minutes")])
    """When to save all state: by time (the newest stays), by steps or frames (all stay; `2 steps until 10` ends)."""
    eval: CountCadence | None = None
    """When to evaluate besides at the end; null evaluates only at the end."""
    log: Execution[CountCadence] = Cadence(1, "steps")
    """When to write a row of metrics."""


class TrackSpec(Model):
    """Where metrics go besides the run folder."""

    sinks: list[Literal["tensorboard", "wandb", "swanlab", "trackio"]] = Field(default=[])
    """Services that receive every row of metrics besides metrics.jsonl."""
    project: str | None = Field(default=None, min_length=1)
    """The project at those services; null means the name of the spec."""
    trace: bool = True
    """Write a timeline of what the run does, for Perfetto."""


class NamedSpec(Model):
    """What every spec has: a kind, a name, and a way to say what does not fit together in it."""

    kind: str
    """The kind of spec."""
    name: Name
    """Its name; by default the key in a file of several specs, else the file's stem."""

    def conflicts(self) -> list[Conflict]:
        """Fields that are fine by themselves and do not fit together; a kind adds its own."""
        return []

    def all_conflicts(self) -> list[Conflict]:
        """Those of the kind, and those that its base class knows of."""
        return self.conflicts()

    def derived(self) -> dict[str, int | float | str]:
        """What follows from the spec, by name, for people to check before a run."""
        return {}

    def default_origin(self, path: tuple[str | int, ...]) -> str:
        """Which default a value is that was not given; a kind may have defaults of its own."""
        return "default"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        conflicts = self.all_conflicts()
        if conflicts:
            reasons = "; ".join(f"{'.'.join(map(str, c.path))}: {c.reason}" for c in conflicts)
            raise PydanticCustomError("conflicts", "{reasons}", {"reasons": reasons, "conflicts": conflicts})
        return self


class ExperimentSpec(NamedSpec):
    """What every kind of experiment has."""

    counts: ClassVar[tuple[str, ...]] = ("steps", "frames")
    """What a run of this kind counts: the units of its cadences besides time."""

    kind: str
    """The kind of experiment."""
    name: Name
    """The folder under runs/; by default the key in a file of several specs, else the file's stem."""
    seed: int = Field(default=0, ge=0)
    """The first seed."""
    max_session: int = Field(default=1, ge=1)
    """How many sessions: the seeds `seed` to `seed + max_session - 1` make one trial, in parallel on the cores."""
    every: Every = Every()
    """How often to checkpoint, evaluate and log."""
    track: Execution[TrackSpec] = TrackSpec()
    """Where metrics go."""
    hooks: list[Function] = Field(default=[])
    """Functions called at every row of metrics, each as module:function."""
    device: Execution[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to compute; auto takes what suits the kind (the CPU for control, whose networks are small)."""
    threads: Execution[int | None] = Field(default=None, ge=1)
    """Torch threads a session; null takes what suits the kind (one for control, whose networks are small)."""
    search: Execution[SearchSpec | None] = None
    """Which fields `palestra search SPEC` varies, and how; all other commands take the spec as it stands."""
    sweep: Execution[SweepSpec | None] = None
    """Which runs `palestra sweep SPEC` makes of it; all other commands take the spec as it stands."""

    @property
    def seeds(self) -> list[int]:
        """The seeds of the trial's sessions."""
        return list(range(self.seed, self.seed + self.max_session))

    def all_conflicts(self) -> list[Conflict]:
        """Those of the kind, cadences in units that it does not count, and what is wrong with its search or sweep."""
        from palestra.spec.grid import (
            search_conflicts,
            sweep_conflicts,  # both validate specs, and so build on this module
        )

        found = self.conflicts() + _uncounted(self.every, self.counts) + search_conflicts(self)
        return found or sweep_conflicts(self)  # what is wrong with the spec would be wrong with each of its runs


def _uncounted(every: Every, counts: tuple[str, ...]) -> list[Conflict]:
    """Cadences in units that the kind does not count."""
    found = []
    for name in type(every).model_fields:
        value = getattr(every, name)
        for cadence in value if isinstance(value, list) else [value]:
            if isinstance(cadence, Cadence) and not cadence.is_time and cadence.unit not in counts:
                known = " or ".join(counts)
                found.append(Conflict(("every", name), f"expected {known}, which this kind counts; got '{cadence}'"))
    return found
