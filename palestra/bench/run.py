"""Runs the missing seeds of a suite in parallel, one run for each spec and seed; finished seeds are kept."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path
from typing import Any

from palestra.bench.results import BenchRecord, BenchResult, append, find, measure, shipped
from palestra.bench.suites import CHECKOUT, SHIPPED, Entry, entries, parse_seeds
from palestra.bench.table import verdict, write_page
from palestra.cluster.where import open_backend, refuse_more
from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs.session import stop_signals
from palestra.work import fanout
from palestra.work.fanout import Resources, Stop, WorkItem

Tell = Callable[[str], None]


def bench(
    suite: str | None,
    *,
    seeds: str | None,
    only: str | None,
    parallel: int | None,
    on: str | None,
    out: Path | None,
    table_only: bool,
    specs: Path | None,
    root: Path,
    tell: Tell,
) -> None:
    """Run the missing seeds of a suite, unless `table_only`; print its scores, and enter them in the table of `out`."""
    if suite is None and not table_only:
        raise UsageError("give a suite to run (classic, box2d, mujoco, atari), or --table to write the page only")
    folder, wanted = specs or SHIPPED, None if seeds is None else parse_seeds(seeds)
    chosen = entries(suite, only)
    if out is None and SHIPPED.is_dir() and Path.cwd().is_relative_to(CHECKOUT):
        out = CHECKOUT / "docs" / "benchmarks.md"
    try:
        if not table_only:
            run(plan(chosen, wanted, folder, root, tell), root, parallel, tell, on)
    finally:  # finished runs enter the table, also if other runs failed or were stopped
        measured = {entry: measure(entry, folder, root, wanted or entry.seeds) for entry in chosen}
        for entry, records in measured.items():
            tell(_described(entry, records))
        if out is not None:
            append(out.with_suffix(".jsonl"), [record for of in measured.values() for record in of], tell)
            write_page(out, folder, root)
            tell(str(out))


def _described(entry: Entry, records: list[BenchRecord]) -> str:
    """A row of the table, for the terminal."""
    if not records:
        return f"{entry.spec:<26} not run"
    result = BenchResult(records)
    numbers = f"mean {result.mean:.2f} ± {result.standard_error:.2f}, IQM {result.iqm:.2f}, {len(result.scores)} seeds"
    return f"{entry.spec:<26} {numbers}; {verdict(entry, result)} (SLM-Lab {entry.published:g})"


def plan(entries: Sequence[Entry], wanted: Sequence[int] | None, specs: Path, root: Path, tell: Tell) -> list[WorkItem]:
    """The missing runs; tells which seeds are done or running, and how many runs of other versions are ignored."""
    items = []
    for entry in entries:
        seeds, source = wanted or entry.seeds, specs / f"{entry.spec}.yaml"
        spec = shipped(specs, entry.spec)
        if spec is None:
            raise UsageError(f"no spec {source}: give the folder of the suite's specs with --specs")
        sessions = find(root, spec)
        if sessions.stale:
            tell(f"{entry.spec}: {sessions.stale} runs of another version of the spec are ignored")
        for what, those in (("done", sessions.done), ("running already", sessions.running)):
            if kept := [seed for seed in seeds if seed in those]:
                tell(f"{entry.spec}: seed {', '.join(map(str, kept))} {what}")
        runs: dict[Path | int, list[int]] = {}  # by the run to resume, else one for each seed
        for seed in seeds:
            if seed not in sessions.done and seed not in sessions.running:
                runs.setdefault(sessions.open.get(seed, seed), []).append(seed)
        for trial, of in runs.items():
            new = {"spec": source, "overrides": {"seed": of[0], "max_session": 1}}
            settings = {"root": root, **(new if isinstance(trial, int) else {"resume": trial})}
            log = root / "logs" / f"{entry.spec}_{of[0]}.txt"
            items.append(WorkItem(f"{entry.spec} seed {', '.join(map(str, of))}", run_one, (settings,), log=log))
    return items


def run(items: Sequence[WorkItem], root: Path, parallel: int | None, tell: Tell, on: str | None = None) -> None:
    """Run the items, `parallel` at a time, else one per core; those that fail do not stop the others."""
    if not items:
        return
    backend, available = open_backend(on, "bench")
    parallel = parallel or available.cores
    refuse_more(on, available, parallel, 1)
    stop, failed, ended = Stop(), [], 0
    message = iter(["stopping: runs save their state"])

    def watch(states: Mapping[str, str]) -> None:
        if stop.requested and (line := next(message, None)):
            tell(line)

    (logs := root / "logs").mkdir(parents=True, exist_ok=True)
    running = fanout.run(items, Resources(parallel), backend, stop=stop, progress=watch)
    with stop_signals(stop), closing(running) as outcomes:
        for outcome in outcomes:
            ended += 1
            error, state = outcome.error, "done"
            if error is not None:
                failed.append(f"  {outcome.item.name}: {error}")
                stopped = getattr(error, "exit_code", 1) == Interrupted.exit_code
                state = "stopped" if stopped else f"failed: {error}".splitlines()[0]
                state = "killed" if isinstance(error, CancelledError) else state
            tell(f"{outcome.item.name}: {state} ({ended} of {len(items)})")
    if stop.requested:
        raise Interrupted("stopped with everything saved; the same command resumes")
    if failed:
        raise PalestraError(f"{len(failed)} of {len(items)} runs failed, logs in {logs}:\n" + "\n".join(failed))


def run_one(settings: Mapping[str, Any]) -> None:
    """Run or continue one run, in the process that calls."""
    from palestra.api import run as start  # here, because only the process that trains needs it

    start(**settings, quiet=True)
