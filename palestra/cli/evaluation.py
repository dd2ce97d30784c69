"""What `palestra eval` prints: tables of an evaluation, from its run folder alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from palestra.cli.show import console
from palestra.errors import UsageError
from palestra.runs.run import Run
from palestra.runs.store import read_json
from palestra.spec.overrides import parse

REPORT = "evaluation.json"
COUNTED = ("truncated", "unparsable", "timeout", "error", "no_room")
"""Shares that are shown where they are not 0; the first one always."""


def show_evaluation(run: Run) -> None:
    """Every score of an evaluation with what it was measured on, and where the answers are."""
    found = [session.path for session in run.sessions if (session.path / REPORT).exists()]
    if not found:
        kind = run.spec["kind"]
        why = f"it is {run.state}" if kind == "evaluate" else f"it is a run of kind {kind}"
        raise UsageError(f"{run.path} has no evaluation to show: {why}")
    for place, session in enumerate(found):
        report = read_json(session / REPORT)
        if place == 0:
            model = report["model"]
            print(f"{'model':<12}{model['init']} ({model['dtype']}, weights {model['sha256'][:12]})")
        if len(found) > 1:
            print(f"\nseed {report['seed']}")
        for table in tables(report):
            console().print(table)
        for name, text in (("mean", _mean(report["metrics"])), ("answers", _answers(session))):
            if text:
                print(f"{name:<12}{text}")
    print(f"{'run folder':<12}{run.path}")


def tables(report: Mapping[str, Any]) -> list[Table]:
    """One of the tasks that were answered, one of the answers that were scored, one of texts; those that have rows."""
    return [table for table in (_tasks(report), _likelihood(report), _texts(report)) if table.rows]


def _tasks(report: Mapping[str, Any]) -> Table:
    tasks, decoding = report["tasks"], report["decoding"]
    rows = {label: _shares(task) for label, task in tasks.items()}
    shown = [name for name in COUNTED if name == "truncated" or any(shares[name] for shares in rows.values())]
    ks = decoding["k"] if decoding["samples"] else []
    greedy = ["accuracy", "95 %"] if decoding["greedy"] else []
    table = _table("task", "split", "problems", *greedy, *(f"pass@{k}" for k in ks), *shown, "tokens")
    for label, task in tasks.items():
        cells = [label, task["split"], f"{task['problems']:,} of {task['of']:,}"]
        if decoding["greedy"]:
            cells += [_percent(task["greedy"]["accuracy"]["mean"]), _interval(task["greedy"]["accuracy"])]
        cells += [_with_error(task["samples"][f"pass@{k}"]) for k in ks]
        cells += [_percent(rows[label][name]) for name in shown]
        table.add_row(*cells, f"{_first(task)['tokens']:.0f}")
    return table


def _likelihood(report: Mapping[str, Any]) -> Table:
    table = _table("likelihood", "rows", "shots", "by", "accuracy", "95 %", "guessing", "centred", "bits/byte", "cut")
    for label, suite in report["likelihood"].items():
        table.add_row(
            label,
            f"{suite['items']:,} of {suite['of']:,}",
            str(suite["shots"]),
            suite["by"],
            _percent(suite["accuracy"]["mean"]),
            _interval(suite["accuracy"]),
            _percent(suite["baseline"]),
            f"{suite['centred']:.3f}",
            f"{suite['bits_per_byte']:.3f}",
            str(suite["cut"]),
        )
    return table


def _texts(report: Mapping[str, Any]) -> Table:
    table = _table("texts", "documents", "tokens", "bytes", "loss", "bits/byte")
    for label, found in report.get("texts", {}).items():  # evaluations of before have none
        counts = (f"{found['items']:,} of {found['of']:,}", f"{found['tokens']:,}", f"{found['bytes']:,}")
        table.add_row(label, *counts, f"{found['loss']:.3f}", f"{found['bits_per_byte']:.3f}")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    return table


def _first(task: Mapping[str, Any]) -> Mapping[str, Any]:
    """Greedy answers, or the drawn ones where there are no others."""
    return task["greedy"] if "greedy" in task else task["samples"]


def _shares(task: Mapping[str, Any]) -> dict[str, float]:
    """The worse of both modes: nothing is hidden behind the better one."""
    found = dict.fromkeys(COUNTED, 0.0)
    for outcome in (task[mode] for mode in ("greedy", "samples") if mode in task):
        counts = {name: outcome["statuses"].get(name, 0) / max(1, outcome["answers"]) for name in COUNTED}
        counts |= {"truncated": outcome["truncated"]}
        counts |= {"no_room": outcome["statuses"].get("no_room", 0) / outcome["problems"]}
        found = {name: max(found[name], counts[name]) for name in COUNTED}
    return found


def _mean(metrics: Mapping[str, float]) -> str:
    named = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.count("/") == 1}
    plain = ("centred", "bits_per_byte")
    shown = {name: f"{value:.3f}" if name in plain else _percent(value) for name, value in named.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _answers(session: Path) -> str:
    return ", ".join(
        str(path) for name in ("answers.jsonl", "likelihood.jsonl", "texts.jsonl") if (path := session / name).exists()
    )


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _with_error(estimate: Mapping[str, Any]) -> str:
    mean = f"{100 * estimate['mean']:.1f}"
    return f"{mean} %" if estimate["error"] is None else f"{mean} ± {100 * estimate['error']:.1f} %"


def _interval(estimate: Mapping[str, Any]) -> str:
    if estimate["interval"] is None:
        return "–"
    low, high = estimate["interval"]
    return f"{100 * low:.1f} – {100 * high:.1f} %"


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between, such as 1,8."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--k {text}: expected whole numbers with commas between, such as 1,8") from error


def pairs(texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as a mapping, with YAML typing."""
    for text in texts:
        if "=" not in text:
            raise UsageError(f"--arg {text}: expected KEY=VALUE, such as digits=3")
    return dict(parse(texts))
