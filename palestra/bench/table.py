"""The page of benchmarks, made from the file of results: a row for each shipped spec, run or not."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.bench.results import BenchResult, Shipped, find, log_points, read, results
from palestra.bench.suites import SEEDS, SUITES, Entry, entries
from palestra.runs.run import Run
from palestra.runs.store import write_bytes

COLUMNS = (
    "spec", "environment", "seeds", "mean", "standard error", "IQM", "95 % interval", "SLM-Lab", "verdict", "frames",
    "SLM-Lab's frames", "window", "differs from SLM-Lab's in", "date", "commit", "machine", "spec hash", "curve",
)  # fmt: skip
HISTORY = ("spec", "spec hash", "seeds", "mean", "IQM", "SLM-Lab", "verdict", "date", "commit", "machine")

INTRODUCTION = f"""\
# Benchmarks

Generated from `benchmarks.jsonl` by `palestra bench --table`; do not edit. `palestra bench classic` runs a suite first.

- A seed's *score* is SLM-Lab's: the mean, over the log points of the *window*, of the return of the last 100 finished
  training episodes. The window is that of SLM-Lab's table, its last 100 log points, if our budget is at least its
  budget; else the last quarter of our frames.
- *mean* and *standard error* are over seeds. *IQM* is their interquartile mean, with a 95 % bootstrap interval
  (10,000 resamples, seeded).
- The *verdict* is **above** if mean and IQM reach SLM-Lab's score, else **below**; **tied** if the mean is less
  than two standard errors away from it, which does not count as reached. A row with too few seeds is *incomplete*.
- Seeds {SEEDS[0]} to {SEEDS[-1]} are for this table alone: specs are tuned on seeds from 1000 on. A row that takes less
  than ten minutes per seed needs all ten, another one the first four.
- A run enters the table once, from a clean commit, and stays: the file is append-only. The scores of a spec before
  it was changed are in the [history](#history).
- A run counts only if its spec is, except for the seed, the shipped one: the *spec hash* is over all fields.
"""


def write_page(out: Path, specs: Path, root: Path) -> None:
    """Write the page of all suites from the results next to it, with a plot for each row whose runs are here."""
    known = results(read(out.with_suffix(".jsonl")))
    parts = [INTRODUCTION]
    for name, suite in SUITES.items():
        rows = [_row(entry, known, specs, root, out.parent / "plots") for entry in suite.entries]
        parts.append(f"## {suite.title}\n\n```bash\npalestra bench {name}\n```\n\n{markdown_table(COLUMNS, rows)}")
    past = [_past(entry, result) for entry in entries(None) for key, result in known.items() if key[0] == entry.spec]
    history = markdown_table(HISTORY, past) if past else "Specs that were changed after they had been run: none.\n"
    parts.append(f"## History\n\nWhat earlier versions of the specs scored.\n\n{history}")
    write_bytes(out, "\n".join(parts).encode())


def _row(entry: Entry, known: dict[tuple[str, str], BenchResult], specs: Path, root: Path, plots: Path) -> list[str]:
    """The cells of a shipped spec; removes its result from `known`, which then holds only earlier versions."""
    shipped = Shipped.read(specs, entry.spec)
    result = None if shipped is None else known.pop((entry.spec, shipped.hash), None)
    cells = dict.fromkeys(COLUMNS, "–") | {
        "spec": f"`{entry.spec}`",
        "mean": "no spec" if shipped is None else "not run",
        "SLM-Lab": f"{entry.published:g}",
        "SLM-Lab's frames": f"{entry.published_frames:,}",
        "differs from SLM-Lab's in": entry.differs,
    }
    if shipped is not None:
        cells |= {"environment": shipped.spec.env.id, "spec hash": f"`{shipped.hash[:8]}`"}
    if shipped is not None and result is not None:
        low, high = result.interval
        cells |= dict(zip(("date", "commit", "machine"), _provenance(result), strict=True)) | {
            "seeds": _seeds(sorted(result.scores)),
            "mean": f"{result.mean:.2f}",
            "standard error": f"{result.standard_error:.2f}",
            "IQM": f"{result.iqm:.2f}",
            "95 % interval": f"{low:.2f} to {high:.2f}",
            "verdict": verdict(entry, result),
            "frames": f"{result.records[-1].frames:,}",
            "window": f"{result.records[-1].window:,.0f}",
            "curve": _curve(entry, shipped, sorted(result.scores), root, plots),
        }
    return list(cells.values())


def _past(entry: Entry, result: BenchResult) -> list[str]:
    numbers = [f"{result.mean:.2f}", f"{result.iqm:.2f}", f"{entry.published:g}", verdict(entry, result)]
    seeds, hash = _seeds(sorted(result.scores)), result.records[0].hash
    return [f"`{entry.spec}`", f"`{hash[:8]}`", seeds, *numbers, *_provenance(result)]


def verdict(entry: Entry, result: BenchResult) -> str:
    """The verdict of a row."""
    return result.verdict(entry.published) if len(result.scores) >= len(entry.seeds) else "incomplete"


def _provenance(result: BenchResult) -> list[str]:
    """Date, commit and machine of its runs."""
    commits = dict.fromkeys(f"`{str(record.commit)[:8]}`" for record in result.records)
    machines = dict.fromkeys(record.machine for record in result.records)
    return [max(record.date for record in result.records), ", ".join(commits), ", ".join(machines)]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns line up, as the repository's formatter leaves it."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(columns))]
    padded = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([padded[0], rule, *padded[1:]]) + "\n"


def _seeds(seeds: Sequence[int]) -> str:
    """0, 1, 2, 3 as 0–3."""
    if len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}–{seeds[-1]}"
    return ", ".join(map(str, seeds))


def _curve(entry: Entry, shipped: Shipped, seeds: Sequence[int], root: Path, plots: Path) -> str:
    """A link to the plot of that version of the spec, drawn if its runs are here."""
    plot = plots / f"{entry.spec}_{shipped.hash[:8]}.png"
    done = find(root, shipped.spec.name, shipped.hash).done
    sessions = {seed: done[seed] for seed in seeds if seed in done and any(log_points(done[seed]))}
    if len(sessions) == len(seeds):
        from palestra.runs.plot import curves  # here, because matplotlib takes a second

        for old in plots.glob(f"{entry.spec}_????????.png"):
            old.unlink()
        with tempfile.TemporaryDirectory() as scratch:
            drawn = curves([_Together(entry.spec, sessions)], metric="return", out=Path(scratch) / entry.spec)
            plots.mkdir(parents=True, exist_ok=True)
            shutil.copy(next(path for path in drawn if path.suffix == ".png"), plot)
    return f"[curve](plots/{plot.name})" if plot.exists() else "–"


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
