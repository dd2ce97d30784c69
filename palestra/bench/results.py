"""Scores of shipped specs: finished runs by seed, the append-only file of results, interquartile means."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from palestra.bench.suites import SEEDS, Entry
from palestra.control.trial_metrics import score
from palestra.errors import PalestraError, UsageError
from palestra.runs.run import Run, list_runs
from palestra.runs.session import state_of
from palestra.runs.store import read_json, write_bytes
from palestra.spec.base import ExperimentSpec
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.load import load, resolved, spec_hash
from palestra.spec.model import plain
from palestra.spec.renames import translated

NEUTRAL = {"seed": 0, "max_session": 1, "search": None, "device": "auto"}
"""The fields in which runs of one spec differ, and its search."""


@dataclass
class SpecSessions:
    """The sessions of one spec by seed, and the number of sessions of other versions of it."""

    done: dict[int, Path]
    open: dict[int, Path]
    """The runs of those that are begun, not done and not running: to be resumed."""
    running: set[int]
    stale: int


def shipped(folder: Path, entry: Entry) -> ControlSpec | None:
    """The spec of a row in the folder of specs as it is now; None where there is no such file."""
    if not (folder / f"{entry.file or entry.spec}.yaml").is_file():
        return None
    source = entry.source(folder)
    spec = load(source).spec
    if not isinstance(spec, ControlSpec):
        raise UsageError(f"{source} is of kind {spec.kind}: the suites are of kind control")
    return spec


def identity(spec: ExperimentSpec) -> str:
    """The hash of a spec without its seeds and its search."""
    return spec_hash(spec.model_copy(update=NEUTRAL))


def find(root: Path, spec: ExperimentSpec) -> SpecSessions:
    """The sessions of a spec under `root/<name>`; of several runs of a seed the newest."""
    wanted, sessions = identity(spec), SpecSessions({}, {}, set(), 0)
    for trial in [run for run in list_runs(root) if run.path.parent.name == spec.name]:  # newest first
        for session in trial.sessions:
            if identity_today(read_json(session.path / "manifest.json")["spec"]) != wanted:
                sessions.stale += 1
                continue
            state = state_of(session.path)
            if state == "done":
                sessions.done.setdefault(session.seed, session.path)
            elif state == "running":
                sessions.running.add(session.seed)
            else:
                sessions.open.setdefault(session.seed, trial.path)
    for seed in (*sessions.done, *sessions.running):  # another run has finished it, or is running it
        sessions.open.pop(seed, None)
    return sessions


def log_points(session: Path) -> Iterator[dict[str, float]]:
    """The rows of a session that have a return."""
    return (row for row in Run(session).metrics() if "return" in row)


def identity_today(spec: dict[str, Any]) -> str | None:
    """The identity of a stored spec with today's defaults of new fields; None if it is no longer valid."""
    try:
        return identity(resolved(translated(spec)))
    except PalestraError:
        return None


RESAMPLES = 10_000


def interquartile_mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """The mean without the lowest and the highest quarter (rounded down), over the last dimension."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def bootstrap_interval(values: Sequence[float], level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The percentile bootstrap interval of the interquartile mean; seeded."""
    known = np.asarray(values, dtype=np.float64)
    indices = np.random.default_rng(seed).integers(len(known), size=(RESAMPLES, len(known)))
    tail = (1 - level) / 2
    low, high = np.quantile(interquartile_mean(known[indices]), [tail, 1 - tail])
    return float(low), float(high)


PAGE = ("docs/benchmarks.", "docs/plots/")  # what this package itself writes into a checkout


@dataclass(frozen=True)
class BenchRecord:
    """Finished seeds of one version of a spec, by one commit on one machine: a line of the file."""

    spec: str
    hash: str
    env: str
    frames: int
    window: float
    scores: dict[int, float]
    commit: str | None
    """None: unknown, or with uncommitted changes; such a record never enters the file."""
    machine: str
    date: str
    settings: dict[str, Any]
    """The whole spec."""


class BenchResult:
    """All recorded seeds of one version of a spec: `mean` is SLM-Lab's number, `interval` is of the `iqm`."""

    def __init__(self, records: Sequence[BenchRecord]):
        self.records = records
        # By seed; what was recorded first stays.
        self.scores = {seed: value for record in reversed(records) for seed, value in record.scores.items()}
        values = [value for _, value in sorted(self.scores.items())]
        self.mean = fmean(values)
        self.standard_error = stdev(values) / sqrt(len(values)) if len(values) > 1 else float("inf")
        self.iqm = float(interquartile_mean(values))
        self.interval = bootstrap_interval(values)

    @property
    def spread(self) -> str:
        """The standard error as text; one seed has none."""
        return f"{self.standard_error:.2f}" if len(self.scores) > 1 else "–"

    def verdict(self, published: float) -> str:
        """Above (mean and IQM reach the figure), below, or tied: less than two standard errors away."""
        if abs(self.mean - published) < 2 * self.standard_error:
            return "tied"
        return "above" if min(self.mean, self.iqm) >= published else "below"


def measure(entry: Entry, specs: Path, root: Path, seeds: Sequence[int]) -> list[BenchRecord]:
    """The finished runs of the shipped spec, including those from dirty commits."""
    spec = shipped(specs, entry)
    if spec is None:
        return []
    window, grouped, settings = entry.window(spec.train.frames), {}, plain(spec) | NEUTRAL
    for seed, path in find(root, spec).done.items():
        points = list(log_points(path))
        if seed not in seeds or not points:  # no episode ended: no score
            continue
        manifest = read_json(path / "manifest.json")
        value = score([row["return"] for row in points], [row["frame"] for row in points], window)
        frames, date = int(points[-1]["frame"]), manifest["created"][:10]
        key = (_clean_commit(path, manifest["git"]), machine_of(manifest))
        about = (entry.spec, identity(spec), spec.env.id, frames, window)
        new = BenchRecord(*about, {seed: value}, *key, date, settings)
        old = grouped.get(key, new)
        grouped[key] = replace(new, scores=old.scores | new.scores, date=max(old.date, date))
    return list(grouped.values())


def append(path: Path, records: Iterable[BenchRecord], tell: Callable[[str], None]) -> None:
    """Add new results to the file; tells why a run may not enter the table."""
    known = read(path)
    lines = []
    for record in records:
        taken = {seed for old in known if old.hash == record.hash for seed in old.scores}
        new = {seed: record.scores[seed] for seed in sorted(record.scores) if seed in SEEDS and seed not in taken}
        if not new:
            continue
        if record.commit is None:
            what = f"{record.spec} seed {', '.join(map(str, new))}"
            tell(f"{what}: not entered in the table, because it is not from a clean commit; commit, then run it again")
            continue
        lines.append(json.dumps(asdict(replace(record, scores=new)), sort_keys=True) + "\n")
    if lines:
        before = path.read_bytes() if path.exists() else b""
        write_bytes(path, before + "".join(lines).encode())


def read(path: Path) -> list[BenchRecord]:
    """The lines of the file; none if it does not exist yet."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            data: dict[str, Any] = json.loads(line)
            scores = {int(seed): float(value) for seed, value in data.pop("scores").items()}
            data["hash"] = identity_today(data["settings"]) or data["hash"]  # a field added since does not change it
            records.append(BenchRecord(**data, scores=scores))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{path}:{number} is not a line of benchmark results ({error}): restore it") from error
    return records


def results(records: Iterable[BenchRecord]) -> dict[tuple[str, str], BenchResult]:
    """By name and hash of the spec."""
    versions: dict[tuple[str, str], list[BenchRecord]] = {}
    for record in records:
        versions.setdefault((record.spec, record.hash), []).append(record)
    return {key: BenchResult(of) for key, of in versions.items()}


def _clean_commit(session: Path, git: dict[str, Any] | None) -> str | None:
    """The commit, if nothing was changed except the page of benchmarks, which an earlier suite may have written."""
    if git is None:
        return None
    if not git["dirty"]:
        return git["commit"]
    diff = session / "git.diff"
    text = diff.read_text(errors="replace") if diff.exists() else ""
    changed = re.findall(r"^diff --git a/(\S+)", text, re.MULTILINE) + git["untracked"]
    return git["commit"] if changed and all(path.startswith(PAGE) for path in changed) else None


def machine_of(manifest: dict[str, Any]) -> str:
    """Its processor, architecture and number of cores; the GPU where that computed."""
    architecture = re.search(r"x86_64|aarch64|arm64|AMD64", manifest["os"])
    host = f"{manifest['cpu']} ({architecture[0] if architecture else manifest['os']}, {manifest['cores']} cores)"
    return f"{manifest['gpu']}, {host}" if manifest["spec"].get("device") == "cuda" else host
