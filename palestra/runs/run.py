"""Runs as folders: how they are made, found by name and read (state, spec, metrics, checkpoints); two runs compared."""

import difflib
import os
import re
import uuid
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.errors import PalestraError, UsageError
from palestra.runs import checkpoint as checkpoints
from palestra.runs.session import read_status, state_of
from palestra.runs.store import clear_write_errors, read_json, read_lines, write_bytes, write_json
from palestra.spec.load import Difference, differences
from palestra.spec.renames import translated
from palestra.work.redact import hidden, redacted

ROOT = "runs"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# The state of a trial is the first of these that one of its sessions is in.
URGENCY = ("running", "failed", "killed", "interrupted")


class Run:
    """A read-only view of a trial, `runs/<name>/<id>`, or of one of its sessions, `…/sessions/<seed>`.

    Files are read on every access.
    """

    def __init__(self, path: Path | str):
        self.path = Path(os.path.abspath(path))
        if not _is_trial(self.path) and not _is_session(self.path):
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
    def trial(self) -> "Run":
        """The trial that a session belongs to; a trial itself."""
        return self if _is_trial(self.path) else Run(self.path.parent.parent)

    @property
    def info(self) -> dict[str, Any]:
        """The trial's trial.json: name, id, seeds, created, command, spec."""
        info = read_json(self.trial.path / "trial.json")
        return info | {"spec": translated(info.get("spec"))}

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.info["name"]

    @property
    def id(self) -> str:
        """UTC time of the start and four hexadecimal digits."""
        return self.info["id"]

    @property
    def created(self) -> str:
        """When it was started: ISO 8601, UTC."""
        return self.info["created"]

    @property
    def seeds(self) -> list[int]:
        """The seeds it was started with."""
        return read_json(self.path / "trial.json")["seeds"] if _is_trial(self.path) else [self.seed]

    @property
    def seed(self) -> int:
        """The seed of a session, which is its folder's name."""
        return int(self.path.name)

    def session(self, seed: int) -> Path:
        """The folder of a seed's session, whether it exists or not."""
        return self.trial.path / "sessions" / str(seed)

    @property
    def sessions(self) -> "list[Run]":
        """The sessions that have been made, by seed."""
        if not _is_trial(self.path):
            return [self]
        folder = self.path / "sessions"
        seeds = sorted(int(name) for name in os.listdir(folder) if name.isdecimal()) if folder.is_dir() else []
        return [Run(self.session(seed)) for seed in seeds if _is_session(self.session(seed))]

    @property
    def state(self) -> str:
        """new, running, done, failed, killed, interrupted, or unfinished: some seeds are done and others are not."""
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
        if (spec := self.info["spec"]) is None:
            raise PalestraError(f"{self.path} has no session yet: it was stopped before one began")
        return spec

    def metrics(self, seed: int | None = None) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl of all sessions or of one seed, each with its "seed"."""
        sessions = [session for session in self.sessions if seed in (None, session.seed)]
        return [{"seed": one.seed, **row} for one in sessions for row in read_lines(one.path / "metrics.jsonl")]

    def dataframe(self, seed: int | None = None) -> Any:
        """The same rows as a pandas DataFrame."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError as error:
            raise UsageError("Run.dataframe needs pandas: pip install pandas; Run.metrics has the same rows") from error
        return pandas.DataFrame(self.metrics(seed))

    def progress(self) -> dict[str, Any]:
        """The least step, frame and tokens over its sessions, and the mean of each headline metric."""
        rows = [status["progress"] for session in self.sessions if (status := read_status(session.path)) is not None]
        counts = [key for key in ("step", "frame", "tokens") if any(key in row for row in rows)]
        headlines = [row.get("headline", {}) for row in rows]
        metrics = {metric: None for headline in headlines for metric in headline}
        mean = {metric: fmean(row[metric] for row in headlines if metric in row) for metric in metrics}
        return {key: min(row.get(key, 0) for row in rows) for key in counts} | {"headline": mean}

    def summary(self) -> dict[str, Any]:
        """Results over the trial's sessions (summary.json); empty until they have ended."""
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
        """The plots made so far."""
        return sorted(path for path in (self.path / "plots").glob("*") if path.suffix in (".png", ".svg"))


def new_trial(
    root: Path | str,
    name: str,
    *,
    seeds: Sequence[int],
    command: Sequence[str],
    spec: Mapping[str, Any],
    id: str | None = None,
) -> Run:
    """Make `root/<name>/<id>` with its trial.json, and point `root/<name>/latest` to it.

    With the spec in it, a trial that is killed before its first session exists can be resumed.
    """
    for part in (name,) if id is None else (name, id):
        if not NAME.fullmatch(part):
            raise UsageError(
                f"{part!r} is not a valid run name: use letters, digits, '.', '_' and '-', starting with a letter or "
                "digit"
            )
    with clear_write_errors(Path(root) / name):
        while True:
            path = Path(root) / name / (id or new_id())
            try:
                path.mkdir(parents=True, exist_ok=id is not None)
                break
            except FileExistsError:
                if not (Path(root) / name).is_dir():  # a file is in the folder's place
                    raise
    trial = make_trial(path, name=name, id=path.name, seeds=seeds, command=command, spec=spec)
    with clear_write_errors(path):
        write_bytes(path.parent / "latest", f"{path.name}\n".encode())
    return trial


def new_id() -> str:
    """An id for a run: UTC time and four hexadecimal digits."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:4]}"


def make_trial(
    path: Path, *, name: str, id: str, seeds: Sequence[int], command: Sequence[str], spec: Mapping[str, Any]
) -> Run:
    """Make a trial's folder with its trial.json; one that exists is kept as it is."""
    if not _is_trial(path):
        created = datetime.now(UTC).isoformat(timespec="seconds")
        info = {"name": name, "id": id, "seeds": list(seeds), "created": created, "command": list(command)}
        with clear_write_errors(path):
            (path / "plots").mkdir(parents=True, exist_ok=True)
            write_json(path / "trial.json", redacted({**info, "spec": spec}))
    return Run(path)


def refuse_secrets(spec: Mapping[str, Any], what: str) -> None:
    """Refuse a spec with secrets in it where other processes must be able to read it from a folder."""
    if paths := hidden(spec):
        raise UsageError(
            f"{what} stores its spec for all workers to read, and {' and '.join(paths)} has a secret in "
            "it: download it first, and give the path"
        )


def list_runs(root: Path | str = ROOT) -> list[Run]:
    """All runs under a folder, newest first."""
    paths = [path for name in _folders(Path(root)) for path in _folders(name) if _is_trial(path)]
    return [Run(path) for path in sorted(paths, key=_age, reverse=True)]


def open_run(ref: Path | str, root: Path | str = ROOT) -> Run:
    """The run meant by a path, a name (its latest), name/id, or the beginning of an id if only one begins so."""
    return find_run(ref, root) or _by_prefix(str(ref), Path(os.path.abspath(root)))


def find_run(ref: Path | str, root: Path | str = ROOT) -> Run | None:
    """The run at a path, or of a name (its latest) or name/id; None where there is none."""
    root = Path(os.path.abspath(root))
    for path in (Path(os.path.abspath(ref)), root / ref):
        if _is_trial(path) or _is_session(path):
            return Run(path)
        if ((path / "latest").is_file() or path.parent == root) and (latest := _latest(path)) is not None:
            return Run(latest)
    return None


def _by_prefix(ref: str, root: Path) -> Run:
    known = {f"{run.path.parent.name}/{run.path.name}": run for run in list_runs(root)}
    if not known:
        raise UsageError(f"no run {ref!r}: there are no runs in {root}")
    matches = [key for key in known if key.startswith(ref) if "/" in ref] or [
        key for key, run in known.items() if ref and run.path.name.startswith(ref)
    ]
    if len(matches) == 1:
        return known[matches[0]]
    if matches:
        shown = ", ".join(matches[:5]) + (", …" if len(matches) > 5 else "")
        raise UsageError(f"{ref!r} could be any of {len(matches)} runs: {shown}. Give more of the id.")
    names = sorted({run.path.parent.name for run in known.values()})
    near = difflib.get_close_matches(ref, [*names, *known], n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"There are: {', '.join(names[:10])}."
    raise UsageError(f"no run {ref!r} in {root}. {hint}")


def _latest(folder: Path) -> Path | None:
    pointer = folder / "latest"
    if pointer.is_file() and _is_trial(trial := folder / pointer.read_text().strip()):
        return trial
    # The pointer is missing or names a run that was removed.
    return max(filter(_is_trial, _folders(folder)), key=_age, default=None)


def _age(trial: Path) -> tuple[str, int]:
    """The second in the id, then when trial.json was written: at the start, unless it was resumed with changes."""
    return trial.name.partition("-")[0], (trial / "trial.json").stat().st_mtime_ns


def _folders(path: Path) -> Iterator[Path]:
    if path.is_dir():
        with os.scandir(path) as entries:
            yield from (path / entry.name for entry in entries if entry.is_dir())


def _is_trial(path: Path) -> bool:
    return os.path.isfile(path / "trial.json")


def _is_session(path: Path) -> bool:
    return os.path.isfile(path / "manifest.json")


@dataclass(frozen=True)
class RunDifference:
    """How two runs differ."""

    spec: list[Difference]
    results: dict[str, tuple[float | None, float | None]]
    """By metric; None on the side that does not have it."""


def diff(a: Run, b: Run) -> RunDifference:
    """Spec fields that differ, and the last headline values (mean over seeds) and summaries of both runs."""
    left, right = (dict(_leaves({**run.progress(), "summary": run.summary()})) for run in (a, b))
    results = {metric: (left.get(metric), right.get(metric)) for metric in {**left, **right}}
    return RunDifference(differences(a.spec, b.spec), results)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, prefix if key == "headline" else f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", value


RESULTS = "results.json"
MEAN = "centred"
"""The name of a suite's mean centered accuracy, listed with its tasks."""


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
    """All suite results of a run, by seed, suite, step and task."""
    results = []
    for session in run.sessions:
        path = session.path / RESULTS
        for suite, content in (read_json(path)["suites"] if path.exists() else {}).items():
            for row in content["rows"]:
                at = (session.seed, suite, row["step"], row["tokens"])
                results += [Measured(*at, task, one["type"], one["value"]) for task, one in row["tasks"].items()]
                if MEAN in row:
                    results.append(Measured(*at, MEAN, "mean", row[MEAN]))
    return results
