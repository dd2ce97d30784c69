"""The page of benchmarks, filled from run folders alone: a row for each shipped spec, run or not."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.bench.finished import Shipped, find, log_points
from palestra.bench.statistics import Interval, bootstrap_interval, interquartile_mean
from palestra.bench.suites import SUITES, Entry, Suite
from palestra.control.trial_metrics import score
from palestra.runs.run import Run
from palestra.runs.store import read_json, write_bytes

COLUMNS = (
    "spec", "environment", "seeds", "score", "IQM", "95 % interval", "target", "reached", "SLM-Lab", "frames", "window",
    "frames/s", "commit", "spec hash", "curve",
)  # fmt: skip

INTRODUCTION = """\
# Benchmarks

Generated from run folders by `palestra bench --table`; do not edit. `palestra bench classic` runs a suite first.

- A seed's *score* is SLM-Lab's: the mean, over the log points of the *window*, of the return of the last 100 finished
  training episodes. The window is the one of SLM-Lab's table, its last 100 log points, where our budget is not smaller
  than its; else the last quarter of our frames. The column has the mean over seeds.
- *IQM* is the interquartile mean over seeds, with a 95 % bootstrap interval (10,000 resamples, seeded).
- A row has *reached* its target where the interval does: where its upper end is at least the target.
- *frames/s* counts collecting and learning, without evaluation, as the mean over seeds that ran beside each other.
- *commit* is what the runs were made with; a + says that there were uncommitted changes.
- A run counts only where its spec is, but for the seed, the shipped one of today: the *spec hash* is over all fields.
"""


@dataclass(frozen=True)
class Result:
    """What the finished seeds of a spec came to."""

    scores: dict[int, float]
    frames: int
    window: float
    frames_per_second: float
    commits: list[str]
    machines: list[str]

    @property
    def mean(self) -> float:
        """SLM-Lab's number for a trial."""
        return fmean(self.scores.values())

    @property
    def iqm(self) -> float:
        """The interquartile mean over seeds."""
        return float(interquartile_mean(list(self.scores.values())))

    @property
    def interval(self) -> Interval:
        """Of the interquartile mean."""
        return bootstrap_interval([self.scores[seed] for seed in sorted(self.scores)])


@dataclass(frozen=True)
class Row:
    """A spec of a suite and what is known of it."""

    entry: Entry
    shipped: Shipped | None
    result: Result | None
    sessions: dict[int, Path]
    missing: list[int]
    stale: int

    @property
    def reached(self) -> bool | None:
        """Whether the interval reaches the target; None where nothing was run."""
        return None if self.result is None else self.result.interval.high >= self.entry.target

    @property
    def note(self) -> str:
        """What stands in the table where there is no score."""
        if self.shipped is None:
            return "no spec"
        return "not run" if not self.stale else "not run since the spec changed"


def collect(suite: Suite, specs: Path, root: Path, seeds: Sequence[int] | None = None) -> list[Row]:
    """The rows of a suite, over its own seeds or the given ones."""
    wanted = suite.seeds if seeds is None else seeds
    rows = []
    for entry in suite.entries:
        shipped = Shipped.read(specs, entry.spec)
        if shipped is None:
            rows.append(Row(entry, None, None, {}, list(wanted), 0))
            continue
        found = find(root, shipped.spec.name, shipped.hash)
        done = {seed: found.done[seed] for seed in wanted if seed in found.done}
        sessions = {seed: path for seed, path in done.items() if any(log_points(path))}  # no episode ended: no score
        missing = [seed for seed in wanted if seed not in sessions]
        result = _result(entry, shipped, sessions) if sessions else None
        rows.append(Row(entry, shipped, result, sessions, missing, found.stale))
    return rows


def write_page(out: Path, specs: Path, root: Path, seeds: Sequence[int] | None = None) -> dict[str, list[Row]]:
    """Write the page with all suites, and a picture beside it for each row that was run; the rows by suite."""
    suites = {name: collect(suite, specs, root, seeds) for name, suite in SUITES.items()}
    parts, machines = [INTRODUCTION], []
    for name, rows in suites.items():
        plots = {row.entry.spec: _plot(row, out.parent / "plots") for row in rows if row.result is not None}
        cells = [_cells(row, plots.get(row.entry.spec)) for row in rows]
        parts.append(
            f"## {SUITES[name].title}\n\n```bash\npalestra bench {name}\n```\n\n{markdown_table(COLUMNS, cells)}"
        )
        machines += [machine for row in rows if row.result is not None for machine in row.result.machines]
    if machines:
        parts.append("Run on " + ", ".join(sorted(set(machines))) + ".\n")
    write_bytes(out, "\n".join(parts).encode())
    return suites


def show_rows(rows: Sequence[Row], tell: Callable[[str], None]) -> None:
    """A line for each row, for the terminal."""
    for row in rows:
        if row.result is None:
            tell(f"{row.entry.spec:<26} {row.note}")
            continue
        low, high = row.result.interval
        told = f"IQM {row.result.iqm:.2f} ({low:.2f} to {high:.2f}), {len(row.result.scores)} seeds"
        tell(f"{row.entry.spec:<26} {told}; target {row.entry.target:g}{'' if row.reached else ' not'} reached")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up, as the repository's formatter leaves it."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(columns))]
    padded = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([padded[0], rule, *padded[1:]]) + "\n"


def _result(entry: Entry, shipped: Shipped, sessions: dict[int, Path]) -> Result:
    budget = shipped.spec.train.frames
    window = entry.window(budget)
    scores, frames, speeds, manifests = {}, [], [], []
    for seed, path in sessions.items():
        points = list(log_points(path))
        scores[seed] = score([row["return"] for row in points], [row["frame"] for row in points], window)
        frames.append(int(points[-1]["frame"]))
        speeds.append(_speed(path))
        manifests.append(read_json(path / "manifest.json"))
    commits = list(dict.fromkeys(map(_commit, manifests)))
    machines = list(dict.fromkeys(f"{m['cpu']} ({m['cores']} cores)" for m in manifests))
    return Result(scores, max(frames), window, fmean(speeds), commits, machines)


def _speed(session: Path) -> float:
    """Frames a second over all that was logged: each row tells its own speed, and they differ."""
    seconds, before, timed = 0.0, 0, 0
    for row in Run(session).metrics():
        if "time/fps" in row:
            seconds += (row["frame"] - before) / row["time/fps"]
            timed += row["frame"] - before
        before = row["frame"]
    return timed / seconds if seconds else 0.0


def _commit(manifest: dict[str, Any]) -> str:
    git = manifest["git"]
    if git is None or git["commit"] is None:
        return "unknown"
    return git["commit"][:8] + ("+" if git["dirty"] else "")


def _cells(row: Row, plot: Path | None) -> list[str]:
    entry = row.entry
    env = "–" if row.shipped is None else row.shipped.spec.env.id
    target, published = f"{entry.target:g}", f"{entry.published:g}"
    identity = "–" if row.shipped is None else f"`{row.shipped.hash[:8]}`"
    if row.result is None:
        empty = [row.note, "–", "–", target, "–", published, "–", "–", "–", "–", identity, "–"]
        return [f"`{entry.spec}`", env, "–", *empty]
    result, interval = row.result, row.result.interval
    return [
        f"`{entry.spec}`",
        env,
        _seeds(sorted(result.scores)) + (f", {_seeds(row.missing)} missing" if row.missing else ""),
        f"{result.mean:.2f}",
        f"{result.iqm:.2f}",
        f"{interval.low:.2f} to {interval.high:.2f}",
        target,
        "yes" if row.reached else "no",
        published,
        f"{result.frames:,}",
        f"{result.window:,.0f}",
        f"{result.frames_per_second:,.0f}",
        ", ".join(f"`{commit}`" for commit in result.commits),
        identity,
        "–" if plot is None else f"[curve](plots/{plot.name})",
    ]


def _seeds(seeds: Sequence[int]) -> str:
    """0, 1, 2, 3 as 0–3."""
    if len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}–{seeds[-1]}"
    return ", ".join(map(str, seeds))


class _Together(Run):
    """The sessions of one spec as if they were of one run."""

    def __init__(self, spec: str, sessions: dict[int, Path]):
        super().__init__(next(iter(sessions.values())))
        self.spec_name, self.of = spec, sessions

    @property
    def name(self) -> str:
        """What the legend says."""
        return self.spec_name

    def metrics(self, seed: int | None = None) -> list[dict[str, Any]]:
        """The rows of all sessions."""
        return [row for one, path in self.of.items() if seed in (None, one) for row in Run(path).metrics()]


def _plot(row: Row, folder: Path) -> Path:
    from palestra.runs.plot import curves  # here, because matplotlib takes a second

    with tempfile.TemporaryDirectory() as scratch:
        runs = [_Together(row.entry.spec, row.sessions)]
        png = next(p for p in curves(runs, metric="return", out=Path(scratch) / row.entry.spec) if p.suffix == ".png")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(png, folder / png.name))
