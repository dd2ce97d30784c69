"""Frames per second of the suites' specs, measured in their runs, and the hours that missing seeds would take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from palestra.bench.results import SpecSessions, find, identity, machine_of, shipped
from palestra.bench.suites import Entry
from palestra.errors import UsageError
from palestra.runs.run import Run
from palestra.runs.session import read_status
from palestra.runs.store import read_json, write_json
from palestra.spec.kinds.control import ControlSpec


@dataclass(frozen=True)
class Missing:
    """The seeds of a row that are not done, and how fast its spec trains here."""

    entry: Entry
    seeds: tuple[int, ...]
    frames: int
    """Left to train, over these seeds."""
    frames_per_s: float | None
    """None: nothing of it has been measured."""

    @property
    def hours(self) -> float:
        """Of one process; infinite where the speed is unknown."""
        return self.frames / self.frames_per_s / 3600 if self.frames_per_s else float("inf")


def missing(entry: Entry, wanted: Sequence[int], specs: Path, root: Path) -> Missing:
    """What a row lacks of these seeds; of a seed that was begun only the frames that are left."""
    spec = shipped(specs, entry)
    if spec is None:
        raise UsageError(f"no spec {entry.source(specs)}: give the folder of the suite's specs with --specs")
    sessions = find(root, spec)
    seeds = tuple(seed for seed in wanted if seed not in sessions.done and seed not in sessions.running)
    begun = {seed: Run(sessions.open[seed]).session(seed) for seed in seeds if seed in sessions.open}
    reached = [(read_status(path) or {"progress": {}})["progress"].get("frame", 0) for path in begun.values()]
    frames = len(seeds) * spec.train.frames - sum(reached)
    return Missing(entry, seeds, max(0, frames), frames_per_s(spec, sessions))


def cheapest_first(rows: Iterable[Missing]) -> list[Missing]:
    """Rows with missing seeds by the hours to complete them; those of unknown speed last."""
    return sorted((row for row in rows if row.seeds), key=lambda row: row.hours)


def frames_per_s(spec: ControlSpec, sessions: SpecSessions) -> float | None:
    """The median over all rows that the spec's sessions have logged since they learn; None if there is none yet."""
    begun = [Run(trial).session(seed) for seed, trial in sessions.open.items()]
    learning = getattr(spec.algorithm, "start", 0) + spec.frames_per_step
    rows = (row for path in (*sessions.done.values(), *begun) for row in Run(path).metrics())
    rates = [row["time/fps"] for row in rows if row["frame"] > learning and "time/fps" in row]
    return median(rates) if rates else None


def speed_file(out: Path) -> Path:
    """Beside the page: what was measured, by hash of the spec."""
    return out.with_suffix(".speed.json")


def write_speeds(out: Path, entries: Iterable[Entry], specs: Path, root: Path) -> None:
    """Enter what the runs here say into the file; specs that have none here keep what is there."""
    path = speed_file(out)
    known: dict[str, Any] = read_json(path) if path.exists() else {}
    for entry in entries:
        if (spec := shipped(specs, entry)) is None:
            continue
        sessions = find(root, spec)
        if (rate := frames_per_s(spec, sessions)) is not None:
            folders = [*sessions.done.values(), *(Run(trial).session(seed) for seed, trial in sessions.open.items())]
            manifest = read_json(folders[0] / "manifest.json")
            about = {"machine": machine_of(manifest), "date": manifest["created"][:10]}
            known[identity(spec)] = {"spec": entry.spec, "frames_per_s": float(f"{rate:.4g}"), **about}
    if known:
        write_json(path, dict(sorted(known.items(), key=lambda item: (item[1]["spec"], item[0]))))


def hours_cell(entry: Entry, spec: ControlSpec, done: Iterable[int], speeds: dict[str, Any]) -> str:
    """The hours that a row still takes in one process, by measurement; a dash where nothing is missing."""
    seeds = len(set(entry.seeds) - set(done))
    if not seeds:
        return "–"
    speed = speeds.get(identity(spec))
    if speed is None:
        return "not measured"
    hours = seeds * spec.train.frames / speed["frames_per_s"] / 3600
    return f"{hours:.2g} ({seeds} seeds at {speed['frames_per_s']:,.0f} frames/s, {speed['machine']})"
