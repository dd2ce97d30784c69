"""What enters the table of benchmarks: one line for each spec, commit and machine in a file that only grows."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from palestra.bench.finished import NEUTRAL, Shipped, find, identity_today, log_points
from palestra.bench.statistics import Interval, bootstrap_interval, interquartile_mean
from palestra.bench.suites import SEEDS, Entry
from palestra.control.trial_metrics import score
from palestra.errors import UsageError
from palestra.runs.store import read_json, write_bytes
from palestra.spec.plain import plain

PAGE = ("docs/benchmarks.", "docs/plots/")  # what this package itself writes into a checkout


@dataclass(frozen=True)
class Record:
    """Finished seeds of one version of a spec, by one commit on one machine: a line of the file."""

    spec: str
    hash: str
    env: str
    frames: int
    window: float
    scores: dict[int, float]
    commit: str | None
    """None: unknown, or with changes; such a record never reaches the file."""
    machine: str
    date: str
    settings: dict[str, Any]
    """The whole spec."""


@dataclass(frozen=True)
class Result:
    """What all recorded seeds of one version of a spec came to."""

    records: tuple[Record, ...]

    @property
    def scores(self) -> dict[int, float]:
        """By seed; what was recorded first stays."""
        return {seed: value for record in reversed(self.records) for seed, value in record.scores.items()}

    @property
    def values(self) -> list[float]:
        """The scores in the order of the seeds."""
        return [value for _, value in sorted(self.scores.items())]

    @property
    def mean(self) -> float:
        """SLM-Lab's number for a trial."""
        return fmean(self.values)

    @property
    def standard_error(self) -> float:
        """Of the mean."""
        return stdev(self.values) / sqrt(len(self.values)) if len(self.values) > 1 else float("inf")

    @property
    def iqm(self) -> float:
        """The interquartile mean over seeds."""
        return float(interquartile_mean(self.values))

    @property
    def interval(self) -> Interval:
        """Of the interquartile mean."""
        return bootstrap_interval(self.values)

    def verdict(self, published: float) -> str:
        """Above (mean and IQM reach the figure), below, or tied: less than two standard errors away."""
        if abs(self.mean - published) < 2 * self.standard_error:
            return "tied"
        return "above" if min(self.mean, self.iqm) >= published else "below"


def measure(entry: Entry, specs: Path, root: Path, seeds: Sequence[int]) -> list[Record]:
    """The finished runs of the spec as it is shipped, those from dirty commits too."""
    shipped = Shipped.read(specs, entry.spec)
    if shipped is None:
        return []
    window, grouped, settings = entry.window(shipped.spec.train.frames), {}, plain(shipped.spec) | NEUTRAL
    for seed, path in find(root, shipped.spec.name, shipped.hash).done.items():
        points = list(log_points(path))
        if seed not in seeds or not points:  # no episode ended: no score
            continue
        manifest = read_json(path / "manifest.json")
        value = score([row["return"] for row in points], [row["frame"] for row in points], window)
        frames, date = int(points[-1]["frame"]), manifest["created"][:10]
        key = (_clean_commit(path, manifest["git"]), _machine(manifest))
        new = Record(entry.spec, shipped.hash, shipped.spec.env.id, frames, window, {seed: value}, *key, date, settings)
        old = grouped.get(key, new)
        grouped[key] = replace(new, scores=old.scores | new.scores, date=max(old.date, date))
    return list(grouped.values())


def append(path: Path, records: Iterable[Record], tell: Callable[[str], None]) -> None:
    """Add what is new to the file; a run that may not enter the table is refused with a sentence."""
    known = read(path)
    lines = []
    for record in records:
        taken = {seed for old in known if old.hash == record.hash for seed in old.scores}
        new = {seed: record.scores[seed] for seed in sorted(record.scores) if seed in SEEDS and seed not in taken}
        if not new:
            continue
        if record.commit is None:
            what = f"{record.spec} seed {', '.join(map(str, new))}: not entered in the table"
            tell(f"{what}, because it is not from a commit without changes; commit, then run it again")
            continue
        lines.append(json.dumps(asdict(replace(record, scores=new)), sort_keys=True) + "\n")
    if lines:
        before = path.read_bytes() if path.exists() else b""
        write_bytes(path, before + "".join(lines).encode())


def read(path: Path) -> list[Record]:
    """The lines of the file; none where there is none yet."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            data: dict[str, Any] = json.loads(line)
            scores = {int(seed): float(value) for seed, value in data.pop("scores").items()}
            data["hash"] = identity_today(data["settings"]) or data["hash"]  # a field that was added since changes none
            records.append(Record(**data, scores=scores))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{path}:{number} is not a line of benchmark results ({error}): restore it") from error
    return records


def results(records: Iterable[Record]) -> dict[tuple[str, str], Result]:
    """By name and hash of the spec."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        found.setdefault((record.spec, record.hash), []).append(record)
    return {key: Result(tuple(of)) for key, of in found.items()}


def _clean_commit(session: Path, git: dict[str, Any] | None) -> str | None:
    """The commit, if nothing was changed but the page of benchmarks, which an earlier suite may have written."""
    if git is None:
        return None
    if not git["dirty"]:
        return git["commit"]
    diff = session / "git.diff"
    text = diff.read_text(errors="replace") if diff.exists() else ""
    changed = re.findall(r"^diff --git a/(\S+)", text, re.MULTILINE) + git["untracked"]
    return git["commit"] if changed and all(path.startswith(PAGE) for path in changed) else None


def _machine(manifest: dict[str, Any]) -> str:
    architecture = re.search(r"x86_64|aarch64|arm64|AMD64", manifest["os"])
    return f"{manifest['cpu']} ({architecture[0] if architecture else manifest['os']}, {manifest['cores']} cores)"
