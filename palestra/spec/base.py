"""Shared fields of all kinds: name, seeds, cadences, tracking, hooks, device."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from palestra.spec.blocks import Name, SearchSpec, SweepSpec
from palestra.spec.model import Cadence, Conflict, CountCadence, Execution, Model
from palestra.spec.words import Words

Module = Annotated[
    str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"), Words("an import path such as 'package.module'")
]
Function = Annotated[
    str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"), Words("a function as 'module:function'")
]


def listed(value: Any) -> Any:
    """A single value as a list of it."""
    return value if isinstance(value, list) else [value]


Cadences = Annotated[
    list[Cadence],
    BeforeValidator(listed, json_schema_input_type=Cadence | list[Cadence]),
    Words("a cadence such as '5 minutes' or '1e4 frames', or a list of them"),
]


class Every(Model):
    """Cadences of a run."""

    checkpoint: Cadences = Field(default=[Cadence(5, "minutes")])
    """When to checkpoint: by time (keeps the newest), by steps or frames (keeps all; `2 steps until 10` ends)."""
    eval: CountCadence | None = None
    """When to evaluate besides at the end; null: only at the end."""
    log: Execution[CountCadence] = Cadence(1, "steps")
    """When to write a row of metrics."""


class TrackSpec(Model):
    """Trackers besides the run folder."""

    sinks: list[Literal["tensorboard", "wandb", "swanlab", "trackio"]] = Field(default=[])
    """Trackers that receive every row of metrics."""
    project: str | None = Field(default=None, min_length=1)
    """Project name there; null: the spec's name."""
    trace: bool = True
    """Write a timeline for Perfetto."""


class NamedSpec(Model):
    """A spec: a kind, a name and its conflicts."""

    kind: str
    """The kind of spec."""
    name: Name
    """Name; default: the key in a file of several specs, else the file's stem."""

    def derived(self) -> dict[str, int | float | str]:
        """Derived quantities by name, shown by `palestra check`."""
        return {}

    def default_origin(self, path: tuple[str | int, ...]) -> str:
        """Origin of a value that was not given."""
        return "default"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        conflicts = self.all_conflicts()
        if conflicts:
            reasons = "; ".join(f"{'.'.join(map(str, c.path))}: {c.reason}" for c in conflicts)
            raise PydanticCustomError("conflicts", "{reasons}", {"reasons": reasons, "conflicts": conflicts})
        return self


class ExperimentSpec(NamedSpec):
    """Shared fields of all experiments."""

    counts: ClassVar[tuple[str, ...]] = ("steps", "frames")
    """Units of this kind's cadences besides time."""

    kind: str
    """Kind of experiment."""
    name: Name
    """Folder under runs/; default: the key in a file of several specs, else the file's stem."""
    seed: int = Field(default=0, ge=0)
    """First seed."""
    max_session: int = Field(default=1, ge=1)
    """Number of sessions: seeds `seed` to `seed + max_session - 1` form one trial, run in parallel."""
    every: Every = Every()
    """How often to checkpoint, evaluate and log."""
    track: Execution[TrackSpec] = TrackSpec()
    """Trackers and trace."""
    hooks: list[Function] = Field(default=[])
    """Functions called at every row of metrics, each as module:function."""
    device: Execution[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device; auto: what suits the kind (the CPU for control, whose networks are small)."""
    threads: Execution[int | None] = Field(default=None, ge=1)
    """Torch threads per session; null: what suits the kind (one for control, whose networks are small)."""
    search: Execution[SearchSpec | None] = None
    """Search space of `palestra search SPEC`; other commands ignore it."""
    sweep: Execution[SweepSpec | None] = None
    """Grid of `palestra sweep SPEC`; other commands ignore it."""

    @property
    def seeds(self) -> list[int]:
        """The seeds of the trial's sessions."""
        return list(range(self.seed, self.seed + self.max_session))

    def all_conflicts(self) -> list[Conflict]:
        """Conflicts of the kind, its cadences, its search and its sweep."""
        # Here, because both validate specs, and so build on this module.
        from palestra.spec.grid import search_conflicts, sweep_conflicts

        conflicts = [*super().all_conflicts(), *_uncounted(self.every, self.counts), *search_conflicts(self)]
        return conflicts or sweep_conflicts(self)  # a conflict of the spec would repeat for every run of the sweep


def _uncounted(every: Every, counts: tuple[str, ...]) -> Iterator[Conflict]:
    """Cadences in units that this kind does not count."""
    for name in type(every).model_fields:
        value = getattr(every, name)
        for cadence in value if isinstance(value, list) else [value]:
            if isinstance(cadence, Cadence) and not cadence.is_time and cadence.unit not in counts:
                known = " or ".join(counts)
                yield Conflict(("every", name), f"expected {known}, which this kind counts; got '{cadence}'")
