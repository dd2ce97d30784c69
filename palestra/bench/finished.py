"""What the run folders hold of a shipped spec: its sessions by seed, only where the spec is still the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError, UsageError
from palestra.runs.folder import Trial, trials
from palestra.runs.run import Run
from palestra.runs.status import state_of
from palestra.runs.store import read_json
from palestra.spec.base import ExperimentSpec
from palestra.spec.difference import spec_hash
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.load import load, resolved

NEUTRAL = {"seed": 0, "max_session": 1, "search": None}
"""What tells runs of one spec apart, and what a search would vary."""


@dataclass(frozen=True)
class Shipped:
    """A spec of the folder of specs as it is now."""

    spec: ControlSpec
    hash: str

    @classmethod
    def read(cls, folder: Path, name: str) -> "Shipped | None":
        """The spec of that name; None where there is no such file."""
        path = folder / f"{name}.yaml"
        if not path.is_file():
            return None
        spec = load(path).spec
        if not isinstance(spec, ControlSpec):
            raise UsageError(f"{path} is of kind {spec.kind}: the suites are of kind control")
        return cls(spec, identity(spec))


@dataclass(frozen=True)
class Found:
    """The sessions of one spec, by seed, and how many others are there that another version of it made."""

    done: dict[int, Path]
    open: dict[int, Trial]
    """Begun, not done, and not being worked on: to be resumed."""
    running: set[int]
    stale: int


def identity(spec: ExperimentSpec) -> str:
    """The hash of all that a spec says of a run: without its seeds, and without what a search would vary."""
    return spec_hash(spec.model_copy(update=NEUTRAL))


def find(root: Path, name: str, wanted: str) -> Found:
    """What there is under `root/<name>` of the spec with that identity; of several runs of a seed the newest."""
    done: dict[int, Path] = {}
    begun: dict[int, Trial] = {}
    running: set[int] = set()
    stale = 0
    for trial in [one for one in trials(root) if one.path.parent.name == name]:  # newest first
        for session in trial.sessions():
            if identity_today(read_json(session.path / "manifest.json")["spec"]) != wanted:
                stale += 1
                continue
            state = state_of(session.path)
            if state == "done":
                done.setdefault(session.seed, session.path)
            elif state == "running":
                running.add(session.seed)
            else:
                begun.setdefault(session.seed, trial)
    # A run that another run of the same seed has overtaken needs no end.
    return Found(done, {s: t for s, t in begun.items() if s not in done and s not in running}, running, stale)


def log_points(session: Path) -> Iterator[dict[str, float]]:
    """The rows of a session that have a return."""
    return (row for row in Run(session).metrics() if "return" in row)


def identity_today(spec: dict[str, Any]) -> str | None:
    """Of a spec's plain data as it reads today, with the defaults of new fields; None where it is no spec any more."""
    try:
        return identity(resolved(spec))
    except PalestraError:
        return None
