"""An experiment's folder, `runs/<name>/<id>/`: what was searched, the study, the trials, and how it is found again."""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.runs.redact import redacted
from palestra.runs.store import clear_write_errors, read_json, write_json
from palestra.spec.base import ExperimentSpec
from palestra.spec.load import resolved

NAME = "search.json"


@dataclass(frozen=True)
class Experiment:
    """A search as its readers see it."""

    path: Path

    @property
    def info(self) -> dict[str, Any]:
        """What search.json says: name, id, created, command, and the spec as it was given."""
        return read_json(self.path / NAME)

    @property
    def root(self) -> Path:
        """The folder of all runs."""
        return self.path.parent.parent

    @property
    def spec(self) -> ExperimentSpec:
        """The spec with its search."""
        return resolved(self.info["spec"])

    @property
    def best(self) -> Path:
        """Where the best spec is written at the end."""
        return self.path / "best.yaml"

    def trial(self, number: int) -> Path:
        """The folder of a trial, made or not."""
        return self.path / "trials" / str(number)

    def summary(self) -> dict[str, Any]:
        """What the trials came to (summary.json); empty until the search has ended."""
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def amend(self, spec: ExperimentSpec) -> None:
        """Store a search that is continued with changes."""
        with clear_write_errors(self.path):
            write_json(self.path / NAME, self.info | {"spec": _given(spec)})


def new_experiment(root: Path, spec: ExperimentSpec, command: Sequence[str]) -> Experiment:
    """Make the folder of a new search."""
    now = datetime.now(UTC)
    path = Path(os.path.abspath(root)) / spec.name / f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:4]}"
    info = {
        "name": spec.name,
        "id": path.name,
        "created": now.isoformat(timespec="seconds"),
        "command": redacted(list(command)),
        "spec": _given(spec),
    }
    with clear_write_errors(path):
        (path / "trials").mkdir(parents=True)
        (path / "plots").mkdir()
        write_json(path / NAME, info)
    return Experiment(path)


def find_experiment(ref: str | Path, root: Path) -> Experiment:
    """The search meant by a path, name/id, or a name (its newest)."""
    for path in (Path(os.path.abspath(ref)), Path(os.path.abspath(root)) / ref):
        if (path / NAME).is_file():
            return Experiment(path)
        made = [file.parent for file in path.glob(f"*/{NAME}")]
        if made:
            return Experiment(max(made, key=_age))
    raise UsageError(f"no search {str(ref)!r}: give the folder of one, with a {NAME} in it, or its name in {root}")


def _age(path: Path) -> tuple[str, int]:
    return path.name.partition("-")[0], (path / NAME).stat().st_mtime_ns


def _given(spec: ExperimentSpec) -> dict[str, Any]:
    """Without defaults: a trial with another algorithm must not be given the defaults of this one."""
    return spec.model_dump(mode="json", exclude_unset=True)
