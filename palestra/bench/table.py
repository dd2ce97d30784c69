"""The page of benchmarks, made from the file of results: a row for each shipped spec, run or not."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.bench.results import BenchResult, find, identity, log_points, read, results, shipped
from palestra.bench.speed import hours_cell, speed_file
from palestra.bench.suites import SEEDS, SUITES, Entry, entries
from palestra.runs.run import make_trial
from palestra.runs.store import read_json, write_bytes
from palestra.spec.base import ExperimentSpec

COLUMNS = (
    "spec", "environment", "seeds", "mean", "standard error", "IQM", "95 % interval", "SLM-Lab", "verdict", "frames",
    "SLM-Lab's frames", "window", "differs from SLM-Lab's in", "date", "commit", "machine", "spec hash", "curve",
    "hours missing",
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
- *hours missing* is what the missing seeds of a row would take one after another, by the frames/s that its own runs
  measured. `palestra bench --hours 2` measures the other rows, runs the cheapest rows first and stops in time;
  the same command continues.
"""


def write_page(out: Path, specs: Path, root: Path) -> None:
    """Write the page of all suites from the results next to it, with a plot for each row whose runs are here."""
    known = results(read(out.with_suffix(".jsonl")))
    speeds: dict[str, Any] = read_json(speed_file(out)) if speed_file(out).exists() else {}
    parts = [INTRODUCTION]
    for name, suite in SUITES.items():
        rows = [_row(entry, known, speeds, specs, root, out.parent / "plots") for entry in suite.entries]
        parts.append(f"## {suite.title}\n\n```bash\npalestra bench {name}\n```\n\n{markdown_table(COLUMNS, rows)}")
    past = []
    for entry in entries(None):
        cells = [_cells(entry, result) for (name, _), result in known.items() if name == entry.spec]
        past += [[of[column] for column in HISTORY] for of in cells]
    history = markdown_table(HISTORY, past) if past else "Specs that were changed after they had been run: none.\n"
    parts.append(f"## History\n\nWhat earlier versions of the specs scored.\n\n{history}")
    write_bytes(out, "\n".join(parts).encode())


def _row(
    entry: Entry,
    known: dict[tuple[str, str], BenchResult],
    speeds: dict[str, Any],
    specs: Path,
    root: Path,
    plots: Path,
) -> list[str]:
    """The cells of a shipped spec; removes its result from `known`, which then holds only earlier versions."""
    spec = shipped(specs, entry)
    cells = dict.fromkeys(COLUMNS, "–") | {
        "spec": f"`{entry.spec}`",
        "mean": "no spec" if spec is None else "not run",
        "SLM-Lab": f"{entry.published:g}",
        "SLM-Lab's frames": f"{entry.published_frames:,}",
        "differs from SLM-Lab's in": entry.differs,
    }
    if spec is not None:
        hash = identity(spec)
        result = known.pop((entry.spec, hash), None)
        hours = hours_cell(entry, spec, () if result is None else result.scores, speeds)
        cells |= {"environment": spec.env.id, "spec hash": f"`{hash[:8]}`", "hours missing": hours}
        if result is not None:
            plot = plots / f"{entry.spec}_{hash[:8]}.png"
            cells |= _cells(entry, result) | {"curve": _curve(entry, spec, sorted(result.scores), root, plot)}
    return list(cells.values())


def _cells(entry: Entry, result: BenchResult) -> dict[str, str]:
    """The columns that a result fills, of the table and of the history."""
    records, (low, high) = result.records, result.interval
    return {
        "spec": f"`{entry.spec}`",
        "spec hash": f"`{records[0].hash[:8]}`",
        "seeds": _seeds(sorted(result.scores)),
        "mean": f"{result.mean:.2f}",
        "standard error": result.spread,
        "IQM": f"{result.iqm:.2f}",
        "95 % interval": f"{low:.2f} to {high:.2f}",
        "SLM-Lab": f"{entry.published:g}",
        "verdict": verdict(entry, result),
        "frames": f"{records[-1].frames:,}",
        "window": f"{records[-1].window:,.0f}",
        "date": max(record.date for record in records),
        "commit": ", ".join(dict.fromkeys(f"`{str(record.commit)[:8]}`" for record in records)),
        "machine": ", ".join(dict.fromkeys(record.machine for record in records)),
    }


def verdict(entry: Entry, result: BenchResult) -> str:
    """The verdict of a row."""
    return result.verdict(entry.published) if len(result.scores) >= len(entry.seeds) else "incomplete"


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


def _curve(entry: Entry, spec: ExperimentSpec, seeds: Sequence[int], root: Path, plot: Path) -> str:
    """A link to the plot of that version of the spec, drawn if its runs are here."""
    done = find(root, spec).done
    if all(seed in done and any(log_points(done[seed])) for seed in seeds):
        from palestra.runs.plot import curves  # here, because matplotlib takes a second

        for old in plot.parent.glob(f"{entry.spec}_????????.png"):
            old.unlink()
        with tempfile.TemporaryDirectory() as scratch:  # with the sessions of all seeds as those of one run
            run = make_trial(Path(scratch), name=entry.spec, id="", seeds=seeds, command=[], spec={})
            for seed in seeds:
                run.session(seed).parent.mkdir(exist_ok=True)
                run.session(seed).symlink_to(done[seed], target_is_directory=True)
            drawn = curves([run], metric="return", out=Path(scratch) / entry.spec)
            plot.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(next(path for path in drawn if path.suffix == ".png"), plot)
    return f"[curve](plots/{plot.name})" if plot.exists() else "–"
