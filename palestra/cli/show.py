"""What the commands print: specs, results, lists and differences of runs."""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from palestra.api import check
from palestra.errors import PalestraError
from palestra.runs.compare import diff
from palestra.runs.run import Run, list_runs, open_run
from palestra.search.folder import Experiment
from palestra.spec.plain import plain
from palestra.track.recorder import in_words

NEXT = {
    "control": ("watch it", "palestra enjoy"),
    "sft": ("talk to it", "palestra chat"),
    "dpo": ("talk to it", "palestra chat"),
    "posttrain": ("read answers", "palestra rollouts"),
    "distill": ("read answers", "palestra rollouts"),
}
"""What people do next with a run of a kind."""


def console() -> Console:
    """Standard output; wide enough never to cut a value where it is not a terminal."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def show_check(spec: str, variables: Mapping[str, str], overrides: list[str]) -> None:
    """The resolved spec with the origin of every value, then the derived quantities."""
    loaded = check(spec, variables=variables, overrides=overrides)
    lines = list(_leaves(plain(loaded.spec), ()))
    width = max(len(text) for _, text in lines) + 2
    for path, text in lines:
        print(f"{text.ljust(width)}# {loaded.origin(path)}" if path else text)
    derived = loaded.spec.derived()
    if derived:
        print("\n# derived")
        for name, value in derived.items():
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")


def _leaves(data: Any, path: tuple) -> Any:
    """Lines of YAML, each with the path of its value; a mapping's own line has no path."""
    indent = "  " * len(path)
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield (), f"{indent}{key}:"
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), f"{indent}{key}: {_inline(value)}"


def _inline(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str) and (value != value.strip() or not value.isprintable()):
        return json.dumps(value, ensure_ascii=False)
    return "{}" if value == {} else str(value)


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


def show_runs(root: Path, name: str | None, limit: int) -> None:
    """A table of runs, newest first."""
    found = [run for run in list_runs(root) if name in (None, run.name)][:limit]
    if not found:
        print(f"no runs in {root}" if name is None else f"no runs named {name} in {root}")
        return
    table = Table(box=None, header_style="bold")
    for column in ("run", "state", "seeds", "step", "seen", "headline", "age"):
        table.add_column(column, justify="right" if column in ("seeds", "step", "seen") else "left")
    for run in found:
        try:
            progress, state, created = run.progress(), run.state, run.created
        except PalestraError as error:  # one damaged run must not hide the others
            table.add_row(f"{run.name}/{run.id}", "unreadable", "", "", "", str(error), "")
            continue
        step = f"{progress['step']:,}" if "step" in progress else "–"
        seen = [
            f"{progress[key]:,} {unit}" for key, unit in (("frame", "frames"), ("tokens", "tokens")) if key in progress
        ]
        headline = in_words(progress["headline"])
        table.add_row(
            f"{run.name}/{run.id}", state, str(len(run.seeds)), step, *(seen or ["–"]), headline, _age(created)
        )
    console().print(table)


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
