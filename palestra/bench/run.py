"""Runs the missing seeds of a suite in parallel, one run for each spec and seed; finished seeds are kept."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from palestra.bench.results import BenchRecord, BenchResult, append, find, identity, measure, read, results, shipped
from palestra.bench.speed import Missing, cheapest_first, missing, write_speeds
from palestra.bench.suites import CHECKOUT, SHIPPED, Entry, entries, parse_seeds
from palestra.bench.table import verdict, write_page
from palestra.cluster.where import open_backend, refuse_more
from palestra.errors import Interrupted, PalestraError, RunBusy, UsageError
from palestra.runs.lease import Lease, kept
from palestra.runs.session import stop_signals
from palestra.runs.store import LocalStore
from palestra.spec.kinds.control import ControlSpec
from palestra.work import fanout
from palestra.work.fanout import STOP_SECONDS, Resources, Stop, WorkItem

Tell = Callable[[str], None]
START_SECONDS = 90.0
"""Of a row of unknown speed; its run continues later, for twice as long where it has logged nothing yet."""


def bench(
    suite: str | None,
    *,
    seeds: str | None,
    only: str | None,
    parallel: int | None,
    hours: float | None,
    on: str | None,
    device: str | None,
    out: Path | None,
    table_only: bool,
    specs: Path | None,
    root: Path,
    tell: Tell,
) -> None:
    """Run the missing seeds of a suite, unless `table_only`; print its scores, and enter them in the table of `out`.

    With `hours`, of one suite or of all: the rows that take the least first, and only for so long.
    """
    if suite is None and not table_only and hours is None:
        suites = "give a suite to run (classic, box2d, mujoco, atari)"
        raise UsageError(f"{suites}, --hours to run the cheapest rows of all, or --table to write the page only")
    folder, wanted = specs or SHIPPED, None if seeds is None else parse_seeds(seeds)
    chosen = entries(suite, only)
    if out is None and SHIPPED.is_dir() and Path.cwd().is_relative_to(CHECKOUT):
        out = CHECKOUT / "docs" / "benchmarks.md"
    try:
        if hours is not None and not table_only:
            run_for(hours, unrecorded(chosen, wanted, folder, out), folder, root, parallel, tell, on, device)
        elif not table_only:
            run(plan(chosen, wanted, folder, root, tell, device), root, parallel, tell, on)
    finally:  # finished runs enter the table, also if other runs failed or were stopped
        measured = {entry: measure(entry, folder, root, wanted or entry.seeds) for entry in chosen}
        for entry, records in measured.items():
            tell(_described(entry, records))
        if out is not None:
            append(out.with_suffix(".jsonl"), [record for of in measured.values() for record in of], tell)
            write_speeds(out, chosen, folder, root)
            write_page(out, folder, root)
            tell(str(out))


def _described(entry: Entry, records: list[BenchRecord]) -> str:
    """A row of the table, for the terminal."""
    if not records:
        return f"{entry.spec:<26} not run"
    result = BenchResult(records)
    numbers = f"mean {result.mean:.2f} ± {result.spread}, IQM {result.iqm:.2f}, {len(result.scores)} seeds"
    return f"{entry.spec:<26} {numbers}; {verdict(entry, result)} (SLM-Lab {entry.published:g})"


def plan(
    entries: Sequence[Entry],
    wanted: Sequence[int] | None,
    specs: Path,
    root: Path,
    tell: Tell,
    device: str | None = None,
) -> list[WorkItem]:
    """The missing runs; tells which seeds are done or running, and how many runs of other versions are ignored."""
    items, elsewhere = [], {} if device is None else {"device": device}
    for entry in entries:
        seeds, source = wanted or entry.seeds, entry.source(specs)
        spec = shipped(specs, entry)
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
            new = {"spec": source, "overrides": {"seed": of[0], "max_session": 1} | elsewhere}
            settings = {"root": root, **(new if isinstance(trial, int) else {"resume": trial})}
            log = root / "logs" / f"{entry.spec}_{of[0]}.txt"
            name = f"{entry.spec} seed {', '.join(map(str, of))}"
            items.append(WorkItem(name, run_one, (spec, tuple(of), settings), log=log))
    return items


def unrecorded(
    entries: Sequence[Entry], wanted: Sequence[int] | None, specs: Path, out: Path | None
) -> dict[Entry, tuple[int, ...]]:
    """The seeds by row that the table of `out` lacks."""
    known = {} if out is None else results(read(out.with_suffix(".jsonl")))

    def lacking(entry: Entry) -> tuple[int, ...]:
        spec = shipped(specs, entry)
        result = None if spec is None else known.get((entry.spec, identity(spec)))
        return tuple(seed for seed in wanted or entry.seeds if result is None or seed not in result.scores)

    return {entry: lacking(entry) for entry in entries}


def run_for(
    hours: float,
    seeds: Mapping[Entry, Sequence[int]],
    specs: Path,
    root: Path,
    parallel: int | None,
    tell: Tell,
    on: str | None,
    device: str | None = None,
) -> None:
    """Run missing seeds for so many hours, cheapest rows first; rows of unknown speed are begun before, to measure."""
    begin = time.monotonic()
    if parallel is None:
        backend, available = open_backend(on, "bench")
        backend.close()
        parallel = available.cores

    def left() -> float:
        return hours * 3600 - (time.monotonic() - begin)

    failed: dict[Entry, str] = {}
    rounds: Counter[Entry] = Counter()
    unknown = [missing(entry, of, specs, root) for entry, of in seeds.items()]
    while left() > hours * 1800:  # the rest of the time is for whole rows
        unknown = [row for row in unknown if row.seeds and row.frames_per_s is None and row.entry not in failed]
        if not unknown:
            break
        wave = unknown[:parallel]
        tell(f"measuring {', '.join(row.entry.spec for row in wave)}")
        items = [plan([row.entry], row.seeds, specs, root, lambda line: None, device)[0] for row in wave]
        seconds = START_SECONDS * 2 ** max(rounds[row.entry] for row in wave)
        failures = _run(items, root, parallel, tell, on, min(seconds, left()))
        failed |= {
            row.entry: failures[item.name] for row, item in zip(wave, items, strict=True) if item.name in failures
        }
        rounds.update(row.entry for row in wave)
        unknown = unknown[parallel:] + [missing(row.entry, row.seeds, specs, root) for row in wave]
    ordered = cheapest_first(missing(entry, of, specs, root) for entry, of in seeds.items() if entry not in failed)
    for row in ordered:
        tell(_cost(row))
    items = [item for row in ordered for item in plan([row.entry], row.seeds, specs, root, tell, device)]
    failures = _run(items, root, parallel, tell, on, left())
    if failures := [*failed.values(), *failures.values()]:
        raise PalestraError(f"{len(failures)} runs failed, logs in {root / 'logs'}:\n" + "\n".join(failures))


def _cost(row: Missing) -> str:
    """A row that is to be run, for the terminal."""
    cost = f"{row.hours:.2g} hours at {row.frames_per_s:,.0f} frames/s" if row.frames_per_s else "speed unknown"
    return f"{row.entry.spec:<26} {len(row.seeds)} seeds missing, {cost}"


def run(items: Sequence[WorkItem], root: Path, parallel: int | None, tell: Tell, on: str | None = None) -> None:
    """Run the items, `parallel` at a time, else one per core; those that fail do not stop the others."""
    if failed := _run(items, root, parallel, tell, on, None):
        lines = "\n".join(failed.values())
        raise PalestraError(f"{len(failed)} of {len(items)} runs failed, logs in {root / 'logs'}:\n{lines}")


def _run(
    items: Sequence[WorkItem], root: Path, parallel: int | None, tell: Tell, on: str | None, seconds: float | None
) -> dict[str, str]:
    """As `run`, for so many seconds at most; a line for each run that failed, by name."""
    if not items:
        return {}
    # What runs then has time to save: runs are killed `STOP_SECONDS` after they were asked to end.
    deadline = None if seconds is None else time.monotonic() + seconds - min(STOP_SECONDS, seconds / 10)
    backend, available = open_backend(on, "bench")
    parallel = parallel or available.cores
    refuse_more(on, available, parallel, 1)
    stop, over, failed, ended = Stop(), Stop(), {}, 0
    message = iter(["stopping: runs save their state"])

    def watch(states: Mapping[str, str]) -> None:
        if deadline is not None and time.monotonic() >= deadline and not stop.requested:
            over()
            stop()
        if stop.requested and (line := next(message, None)):
            tell(line)

    (root / "logs").mkdir(parents=True, exist_ok=True)
    running = fanout.run(items, Resources(parallel), backend, stop=stop, progress=watch)
    with stop_signals(stop), closing(running) as outcomes:
        for outcome in outcomes:
            ended += 1
            error, state = outcome.error, "done"
            if error is not None:
                stopped = getattr(error, "exit_code", 1) == Interrupted.exit_code
                state = "stopped" if stopped else f"failed: {getattr(error, 'message', error)}".splitlines()[0]
                state = "killed" if isinstance(error, CancelledError) else state
                if not over.requested:
                    failed[outcome.item.name] = f"  {outcome.item.name}: {error}"
            tell(f"{outcome.item.name}: {state} ({ended} of {len(items)})")
    if stop.requested and not over.requested:
        raise Interrupted("stopped with everything saved; the same command resumes")
    return failed


def run_one(spec: ControlSpec, seeds: Sequence[int], settings: Mapping[str, Any]) -> None:
    """Run or continue one run, in the process that calls, unless another bench has taken its seeds since the plan."""
    from palestra.api import run as start  # here, because only the process that trains needs it

    root = settings["root"]
    lease = Lease(LocalStore(root / "logs"), f"{spec.name}_{seeds[0]}.lease.json")
    with suppress(RunBusy), kept(lease):
        sessions = find(root, spec)
        if not {*seeds} <= {*sessions.done, *sessions.running}:
            start(**settings, quiet=True)
