"""What the commands print: specs, results, lists and differences of runs."""

import difflib
import fnmatch
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from palestra.api import check
from palestra.cli import new
from palestra.errors import PalestraError, UsageError
from palestra.runs.compare import diff
from palestra.runs.run import Run, list_runs, open_run
from palestra.search.folder import Experiment
from palestra.spec.plain import plain
from palestra.spec.source import write_text
from palestra.track.recorder import in_words

NEXT = {
    "control": ("watch it", "palestra enjoy"),
    "sft": ("talk to it", "palestra chat"),
    "dpo": ("talk to it", "palestra chat"),
    "posttrain": ("read answers", "palestra rollouts"),
    "distill": ("read answers", "palestra rollouts"),
}
"""What people do next with a run of a kind."""
ORIGINS = 52
"""The column at which `check` puts origins: with a path of 50 characters they end within 110."""


@dataclass(frozen=True)
class Wanted:
    """Which runs to list: a name or pattern, states, the order, how many at most."""

    name: str | None = None
    states: Sequence[str] = ()
    sort: str = "age"
    limit: int = 30


def console() -> Console:
    """Standard output; wide enough never to cut a value where it is not a terminal."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def show_examples() -> None:
    """The starter of each kind, then all examples with a line about each."""
    table = Table(box=None, header_style="bold")
    table.add_column("palestra new …")
    table.add_column("what it is")
    for name in (*new.STARTERS, *new.examples()):
        starter = new.STARTERS.get(name)
        table.add_row(name, new.summary(name) if starter is None else f"the same as {starter}")
    console().print(table)


def show_new(name: str, to: Path, schema: bool) -> None:
    """Write an example, then say what was written and how its comments say to begin."""
    written = new.write_example(name, to, schema=schema)
    for path in written:
        print(f"wrote {path}")
    commands = [line[1:].strip() for line in written[0].read_text().splitlines() if line.startswith("#   ")]
    for command in commands or [f"palestra train {written[0]}"]:
        print(f"  {command}")


def show_check(spec: str, variables: Mapping[str, str], overrides: list[str]) -> None:
    """The resolved spec with the origin of every value, then the derived quantities."""
    loaded = check(spec, variables=variables, overrides=overrides)
    for path, text in _leaves(plain(loaded.spec), (), ""):
        print(f"{text.ljust(ORIGINS)}  # {loaded.origin(path)}" if path else text)
    derived = loaded.spec.derived()
    if derived:
        print("\n# derived")
        for name, value in derived.items():
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


def _leaves(data: dict, path: tuple, indent: str) -> Iterator[tuple[tuple, str]]:
    """Lines of YAML, each with the path of its value; lines that only open a mapping or a list have no path."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield (), f"{indent}{key}:"
            yield from _leaves(value, (*path, key), f"{indent}  ")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield (), f"{indent}{key}:"
            for place, item in enumerate(value):
                at = (*path, key, place)
                lines = list(_leaves(item, at, f"{indent}    ")) if item and isinstance(item, dict) else []
                (first, text), *rest = lines or [(at, _inline(item))]
                yield first, f"{indent}  - {text.strip()}"
                yield from rest
        else:
            yield (*path, key), f"{indent}{key}: {_inline(value)}"


def _inline(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str):
        text = write_text({"v": value}).removeprefix("v:").strip()
        return json.dumps(value, ensure_ascii=False) if "\n" in text or set(",[]{}") & set(value) else text
    return json.dumps(value)


def show_result(run: Run) -> None:
    """What came of a run, where it is and what to do with it next."""
    if run.spec["kind"] == "evaluate":
        from palestra.cli.evaluation import show_evaluation  # which builds on this module

        show_evaluation(run)
        return
    summary = run.summary()
    lines = []
    for metric in ("eval/return", "eval/loss", "eval/bits_per_byte", "eval/accuracy"):
        if metric in summary:
            name, digits = metric.removeprefix("eval/").replace("_", " "), 1 if metric == "eval/return" else 3
            by_seed = _by_seed(summary[f"{metric}_by_seed"], digits)
            lines.append(("" if lines else "evaluation", f"{name} {summary[metric]:.{digits}f}{by_seed}"))
    scores = ("total_reward_ma", "strength", "stability", "consistency", "sample_efficiency")
    known = [f"{name} {summary[name]:.4g}" for name in scores if summary.get(name) is not None]
    if known:
        lines.append(("trial metrics", ", ".join(known)))
    lines.append(("run folder", str(run.path)))
    lines += [("plot", str(path)) for path in run.plots() if path.suffix == ".png"]
    here = run.path.parent.parent.resolve() == Path("runs").resolve()
    label, command = NEXT.get(run.spec["kind"], ("draw it", "palestra plot"))
    lines.append((label, f"{command} {f'{run.name}/{run.id}' if here else run.path}"))
    for label, text in lines:
        print(f"{label:<15}{text}")


def show_search(experiment: Experiment) -> None:
    """Every trial of a search with its values, score and state, then the best one and where all is."""
    summary = experiment.summary()
    keys = list(summary["trials"][0]["values"])
    table = Table(box=None, header_style="bold")
    for column in ("trial", *keys, summary["metric"], summary["by"], "state"):
        table.add_column(column, justify="left" if column == "state" else "right")
    for row in summary["trials"]:
        state = row["state"] if row["reason"] is None else f"{row['state']}: {row['reason'].strip().splitlines()[-1]}"
        mark = "*" if row["trial"] == summary["best"] else ""
        values = [f"{v:.4g}" if isinstance(v, float) else _inline(v) for v in (row["values"][key] for key in keys)]
        score = "–" if row["score"] is None else f"{row['score']:.6g}"
        table.add_row(f"{mark}{row['trial']}", *values, score, f"{row['counted']:,}", state)
    console().print(table)
    whole = summary["counted_if_all_ran"]
    cost = f"{summary['counted']:,} {summary['by']}"
    if whole:
        cost += f", {summary['counted'] / whole:.0%} of the {whole:,} of running every trial to its end"
    lines = [
        ("best", f"trial {summary['best']}, {summary['metric']} {summary['score']:.6g}"),
        ("cost", cost),
        ("folder", str(experiment.path)),
        *(("plot", str(path)) for path in sorted((experiment.path / "plots").glob("*.png"))),
        ("train it", f"palestra train {experiment.best} seed={max(summary['seeds']) + 1} max_session=4"),
    ]
    for label, text in lines:
        print(f"{label:<15}{text}")


def _by_seed(values: Mapping[str, float], digits: int) -> str:
    if len(values) < 2:
        return ""
    return " (" + ", ".join(f"seed {seed}: {value:.{digits}f}" for seed, value in values.items()) + ")"


def show_runs(root: Path, wanted: Wanted, *, as_json: bool, watch: float | None) -> None:
    """Runs as a table or as JSON; again every `watch` seconds until Ctrl-C."""
    if as_json:
        print(json.dumps(_run_rows(root, wanted), indent=1))
        return
    screen = console()
    screen.print(_runs_table(root, wanted))
    try:
        while watch is not None:
            time.sleep(watch)
            table = _runs_table(root, wanted)
            screen.clear()
            screen.print(table)
    except KeyboardInterrupt:
        return  # how watching ends


def _run_rows(root: Path, wanted: Wanted) -> list[dict[str, Any]]:
    runs = list_runs(root)
    names = sorted({run.name for run in runs})
    if wanted.name is not None and not fnmatch.filter(names, wanted.name):
        near = difflib.get_close_matches(wanted.name, names, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(f"no runs named {wanted.name} in {root}.{hint}")
    rows = [_run_row(run) for run in runs if wanted.name is None or fnmatch.fnmatch(run.name, wanted.name)]
    rows = [row for row in rows if not wanted.states or row["state"] in wanted.states]
    if wanted.sort in ("name", "state"):
        rows.sort(key=lambda row: row[wanted.sort])
    elif wanted.sort != "age":  # as list_runs has them
        rows.sort(key=lambda row: row["headline"].get(wanted.sort, row.get(wanted.sort, -math.inf)), reverse=True)
    return rows[: wanted.limit]


def _run_row(run: Run) -> dict[str, Any]:
    row: dict[str, Any] = {"name": run.name, "id": run.id, "path": str(run.path), "headline": {}}
    try:
        return row | {"state": run.state, "seeds": run.seeds, "created": run.created} | run.progress()
    except PalestraError as error:  # one damaged run must not hide the others
        return row | {"state": "unreadable", "seeds": [], "created": None, "error": str(error)}


def _runs_table(root: Path, wanted: Wanted) -> Table | str:
    rows = _run_rows(root, wanted)
    if not rows:
        return f"no runs in {root}" if not wanted.states else f"no runs in {root} that are {' or '.join(wanted.states)}"
    table = Table(box=None, header_style="bold")
    for column in ("run", "state", "seeds", "step", "seen", "headline", "age"):
        table.add_column(column, justify="right" if column in ("seeds", "step", "seen") else "left")
    for row in rows:
        step = f"{row['step']:,}" if "step" in row else "–"
        seen = [f"{row[key]:,} {unit}" for key, unit in (("frame", "frames"), ("tokens", "tokens")) if key in row]
        headline = row["error"] if "error" in row else in_words(row["headline"])
        age = "" if row["created"] is None else _age(row["created"])
        run = f"{row['name']}/{row['id']}"
        table.add_row(run, row["state"], str(len(row["seeds"])), step, *(seen or ["–"]), headline, age)
    return table


def show_diff(a: str, b: str, root: Path) -> None:
    """Spec fields that differ and the numbers of both runs, side by side."""
    left, right = open_run(a, root), open_run(b, root)
    difference = diff(left, right)
    names = (f"{left.name}/{left.id}", f"{right.name}/{right.id}")
    _table("spec", names, [(d.path, _inline(d.before), _inline(d.after)) for d in difference.spec])
    _table("results", names, [(r.metric, _number(r.a), _number(r.b)) for r in difference.results])


def _table(what: str, names: tuple[str, str], rows: list[tuple[str, str, str]]) -> None:
    if not rows:
        print(f"{what}: no difference")
        return
    table = Table(box=None, header_style="bold")
    for column in (what, *names):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.6g}"


def _age(created: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
