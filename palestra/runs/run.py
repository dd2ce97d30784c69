"""A run as its readers see it: state, spec, metrics, results, checkpoints and plots; two runs compared."""

import json
import os
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.errors import PalestraError, UsageError
from palestra.runs import checkpoint as checkpoints
from palestra.runs.folder import ROOT, SessionDir, Trial, find, trials
from palestra.runs.session import read_status, state_of
from palestra.runs.store import read_json
from palestra.spec.load import Difference, differences
from palestra.spec.renames import translated

# The state of a trial is the first of these that one of its sessions is in.
URGENCY = ("running", "failed", "killed", "interrupted")


class Run:
    """A read-only view of a trial's folder, or of one session's; files are read when asked for."""

    def __init__(self, path: Path | str):
        self.path = Path(os.path.abspath(path))
        if not any((self.path / name).is_file() for name in ("trial.json", "manifest.json")):
            raise UsageError(f"{self.path} is not a run's folder: it has neither trial.json nor manifest.json")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows: a table, and the learning curve once there is one."""
        progress = self.progress()
        headline = {metric: f"{value:.4g}" for metric, value in progress.pop("headline").items()}
        shown = {"run": self.name, "state": self.state, "seeds": self.seeds, **progress, **headline, "path": self.path}
        rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>" for key, value in shown.items())
        curve = self.path / "plots" / "learning_curve.png"
        image = b64encode(curve.read_bytes()).decode() if curve.exists() else ""
        return f"<table>{rows}</table>" + (image and f'<img src="data:image/png;base64,{image}">')

    @property
    def trial(self) -> Trial:
        """The trial's folder, also where the run is one of its sessions."""
        return Trial(self.path) if self._is_trial else SessionDir(self.path).trial

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.trial.info["name"]

    @property
    def id(self) -> str:
        """UTC time of the start and four hexadecimal digits."""
        return self.trial.info["id"]

    @property
    def seeds(self) -> list[int]:
        """The seeds it was started with."""
        return self.trial.info["seeds"] if self._is_trial else [SessionDir(self.path).seed]

    @property
    def created(self) -> str:
        """When it was started: ISO 8601, UTC."""
        return self.trial.info["created"]

    @property
    def sessions(self) -> list[SessionDir]:
        """The sessions that have been made."""
        return self.trial.sessions() if self._is_trial else [SessionDir(self.path)]

    @property
    def state(self) -> str:
        """new, running, done, failed, killed, interrupted, or unfinished where some seeds are done and others not."""
        states = {state_of(session.path) for session in self.sessions}
        for state in URGENCY:
            if state in states:
                return state
        if len(self.sessions) < len(self.seeds):
            states.add("new")
        return "unfinished" if len(states) > 1 else states.pop()

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec as plain data."""
        if self.sessions:
            return translated(read_json(self.sessions[0].path / "manifest.json")["spec"])
        spec = self.trial.info["spec"]
        if spec is None:
            raise PalestraError(f"{self.path} has no session yet: it was stopped before one began")
        return spec

    def metrics(self, seed: int | None = None) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl of all sessions or of one seed, each with its "seed"."""
        return [row for session in self.sessions if seed in (None, session.seed) for row in _rows(session)]

    def dataframe(self, seed: int | None = None) -> Any:
        """The same rows as a pandas DataFrame."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise UsageError("Run.dataframe needs pandas: pip install pandas; Run.metrics has the same rows") from error
        return pandas.DataFrame(self.metrics(seed))

    def progress(self) -> dict[str, Any]:
        """How far it is: the least step, frame and tokens over its sessions, and the mean of each headline metric."""
        told = [status["progress"] for session in self.sessions if (status := read_status(session.path)) is not None]
        keys = [key for key in ("step", "frame", "tokens") if any(key in one for one in told)]
        least = {key: min(one.get(key, 0) for one in told) for key in keys}
        headlines = [one.get("headline", {}) for one in told]
        metrics = {metric: None for headline in headlines for metric in headline}
        return least | {"headline": {m: fmean(one[m] for one in headlines if m in one) for m in metrics}}

    def summary(self) -> dict[str, Any]:
        """What the trial's sessions came to (summary.json); empty until they have ended."""
        path = self.trial.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def checkpoint(self, which: str = "best") -> Path:
        """The best session's best checkpoint (where none was taken as best, the last), or the last of all."""
        if which not in ("best", "last"):
            raise UsageError(f"no checkpoint {which!r}: choose 'best' or 'last'")
        metas = [meta for session in self.sessions for meta in checkpoints.metas(session.path)]
        if not metas:
            raise UsageError(f"{self.path} has no complete checkpoint yet")
        best = checkpoints.best(metas) if which == "best" else None
        return (best or max(metas, key=lambda meta: meta.step)).path

    def plots(self) -> list[Path]:
        """The pictures made of it so far."""
        return sorted(path for path in (self.path / "plots").glob("*") if path.suffix in (".png", ".svg"))

    @property
    def _is_trial(self) -> bool:
        return (self.path / "trial.json").is_file()


def open_run(ref: Path | str, root: Path | str = ROOT) -> Run:
    """The run meant by a path, a name, name/id or the beginning of an id."""
    return Run(find(ref, root).path)


def list_runs(root: Path | str = ROOT) -> list[Run]:
    """All runs under a folder, newest first."""
    return [Run(trial.path) for trial in trials(root)]


def _rows(session: SessionDir) -> Iterator[dict[str, Any]]:
    path = session.path / "metrics.jsonl"
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # the last row, being written or torn by a kill
            try:
                row = json.loads(line)
            except ValueError as error:
                raise PalestraError(f"{path}:{number} is not a row of metrics ({error})") from error
            yield {"seed": session.seed, **row}


@dataclass(frozen=True)
class SuiteResult:
    """One number of both runs; None on the side that does not have it."""

    metric: str
    a: float | None
    b: float | None


@dataclass(frozen=True)
class RunDifference:
    """What tells two runs apart."""

    spec: list[Difference]
    results: list[SuiteResult]


def diff(a: Run, b: Run) -> RunDifference:
    """Spec fields that differ, and the last headline values (mean over seeds) and summaries of both runs."""
    left, right = _numbers(a), _numbers(b)
    results = [SuiteResult(metric, left.get(metric), right.get(metric)) for metric in {**left, **right}]
    return RunDifference(differences(a.spec, b.spec), results)


def _numbers(run: Run) -> dict[str, float]:
    return dict(_leaves({**run.progress(), "summary": run.summary()}))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            inner = prefix if key == "headline" else f"{prefix}{key}."
            yield from _leaves(value, inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


RESULTS = "results.json"
MEAN = "centred"
"""The name of a suite's mean centred accuracy beside its tasks."""


@dataclass(frozen=True)
class Measured:
    """One number of a suite."""

    seed: int
    suite: str
    step: int
    tokens: int
    task: str
    """`centred` for the mean over the suite."""
    type: str
    """likelihood, texts, task, or mean."""
    value: float


def measured(run: Run) -> list[Measured]:
    """All that suites have measured of a run, by seed, suite, step and task; empty where it has none."""
    return [one for session in run.sessions for one in _of_session(session.path / RESULTS, session.seed)]


def _of_session(path: Path, seed: int) -> Iterator[Measured]:
    if not path.exists():
        return
    for suite, found in read_json(path)["suites"].items():
        for row in found["rows"]:
            at = (seed, suite, row["step"], row["tokens"])
            for task, result in row["tasks"].items():
                yield Measured(*at, task, result["type"], result["value"])
            if MEAN in row:
                yield Measured(*at, MEAN, "mean", row[MEAN])
