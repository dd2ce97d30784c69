"""What the commands print: specs, results, runs and their differences, data sets, evaluations, rollouts."""

import difflib
import fnmatch
import json
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from palestra.api import check
from palestra.cli import lab
from palestra.data.inspect import PERCENTILES, Column, Inspection, StoreInspection, inspect
from palestra.errors import PalestraError, UsageError
from palestra.rollout.records import FILE, RolloutRecord, newest
from palestra.runs.recorder import in_words
from palestra.runs.run import Run, diff, list_runs, open_run
from palestra.runs.store import read_json
from palestra.search.results import Experiment
from palestra.spec.compose import parse
from palestra.spec.model import plain
from palestra.spec.source import write_text
from palestra.tasks.task import Problem, Status

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
    for name in (*lab.STARTERS, *lab.examples()):
        starter = lab.STARTERS.get(name)
        table.add_row(name, lab.summary(name) if starter is None else f"the same as {starter}")
    console().print(table)


def show_new(name: str, to: Path, schema: bool) -> None:
    """Write an example, then say what was written and how its comments say to begin."""
    written = lab.write_example(name, to, schema=schema)
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
    _table("results", names, [(metric, _number(a), _number(b)) for metric, (a, b) in difference.results.items()])


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


LONGEST = 240
"""Characters of a value in a sample."""


def show_inspection(where: str, *, rows: int, samples: int, split: str | None) -> None:
    """Look into a data set and say what is there."""
    found = inspect(where, rows=rows, samples=samples, split=split)
    screen = console()
    if isinstance(found, StoreInspection):
        _show_store(screen, where, found)
    else:
        _show_rows(screen, where, found)


def _show_rows(screen: Console, where: str, found: Inspection) -> None:
    rows = f"{found.rows:,} rows" if found.complete else f"more than {found.rows:,} rows (--rows 0 reads all)"
    files = f"{found.files:,} file{'s' if found.files > 1 else ''} ({', '.join(found.formats)})"
    screen.print(escape(f"{where}: {files}, {size(found.bytes)}, {rows}"))
    if found.files > 1:
        screen.print(escape(f"the largest file: {found.largest[0]}, {size(found.largest[1])}"))
    table = Table("column", "type", "of", *_heads(), box=None, pad_edge=False)
    for name, column in found.columns.items():
        table.add_row(escape(name), escape(_types(column)), _of(column), *_values(column.percentiles()))
    screen.print()
    screen.print(table)
    for number, row in enumerate(found.samples, 1):
        screen.print(f"\nsample {number}")
        for name, value in row.items():
            screen.print(escape(f"  {name}: {_short(value)}"))
    if found.counts is not None:
        screen.print("\nmade by a data step")
        for key, value in found.counts.items():
            screen.print(escape(f"  {key}: {json.dumps(value, ensure_ascii=False)}"))


def _show_store(screen: Console, where: str, found: StoreInspection) -> None:
    screen.print(escape(f"{where}: a token store of {found.documents:,} documents, {found.tokens:,} tokens"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("tokenizer", escape(f"{found.tokenizer}, a vocabulary of {found.vocab_size:,}"))
    table.add_row("text", f"{size(found.bytes)}, {found.bytes / max(found.tokens, 1):.2f} bytes a token")
    table.add_row("trained on", f"{found.trained:,} tokens")
    table.add_row("largest token", f"{found.largest_token:,}")
    table.add_row("recipe", escape(json.dumps(found.recipe, ensure_ascii=False)[:LONGEST]))
    for path, documents, tokens in found.shards[:10]:
        table.add_row("from", escape(f"{path}: {documents:,} documents, {tokens:,} tokens"))
    if len(found.shards) > 10:
        table.add_row("", f"and {len(found.shards) - 10} more files")
    screen.print(table)
    lengths = Table("", *_heads(), box=None, pad_edge=False)
    lengths.add_row("tokens a document", *_values(found.lengths))
    screen.print()
    screen.print(lengths)
    for number, tokens in enumerate(found.samples, 1):
        screen.print(f"\nsample {number}: {' '.join(map(str, tokens))} …")


def size(number: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} bytes"


def _heads() -> list[str]:
    return [{0: "least", 50: "median", 100: "most"}.get(percent, f"{percent} %") for percent in PERCENTILES]


def _types(column: Column) -> str:
    total = column.types.total()
    if len(column.types) == 1:
        return next(iter(column.types))
    return ", ".join(f"{name} {count / total:.1%}" for name, count in column.types.most_common())


def _of(column: Column) -> str:
    if column.lengths:
        return "characters" if column.types["text"] >= column.types["list"] else "items"
    return "values" if column.numbers else ""


def _values(found: Mapping[int, float]) -> list[str]:
    return [f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" for value in found.values()] or [
        "" for _ in PERCENTILES
    ]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


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
    table = _score_table("task", "split", "problems", *greedy, *(f"pass@{k}" for k in ks), *shown, "tokens")
    for label, task in tasks.items():
        cells = [label, task["split"], f"{task['problems']:,} of {task['of']:,}"]
        if decoding["greedy"]:
            cells += [_percent(task["greedy"]["accuracy"]["mean"]), _interval(task["greedy"]["accuracy"])]
        cells += [_with_error(task["samples"][f"pass@{k}"]) for k in ks]
        cells += [_percent(rows[label][name]) for name in shown]
        table.add_row(*cells, f"{_first(task)['tokens']:.0f}")
    return table


def _likelihood(report: Mapping[str, Any]) -> Table:
    table = _score_table(
        "likelihood", "rows", "shots", "by", "accuracy", "95 %", "guessing", "centred", "bits/byte", "cut"
    )
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
    table = _score_table("texts", "documents", "tokens", "bytes", "loss", "bits/byte")
    for label, found in report.get("texts", {}).items():  # evaluations of before have none
        counts = (f"{found['items']:,} of {found['of']:,}", f"{found['tokens']:,}", f"{found['bytes']:,}")
        table.add_row(label, *counts, f"{found['loss']:.3f}", f"{found['bits_per_byte']:.3f}")
    return table


def _score_table(*columns: str) -> Table:
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


COLOURS = {
    Status.CORRECT: "green",
    Status.WRONG: "red",
    Status.UNPARSABLE: "yellow",
    Status.TIMEOUT: "magenta",
    Status.ERROR: "bold red",
}
LONGEST_PROMPT = 1000
"""Characters of a prompt; of a longer one the end is shown."""
# What a terminal would obey instead of show: controls, halves of characters, changes of the writing direction.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")

Shown = tuple[RolloutRecord, list[int]]
"""A record and which of its trajectories to show."""


def show_rollouts(run: str, root: Path, *, status: str | None, task: str | None, step: int | None, limit: int) -> None:
    """The newest `limit` answers of each seed that have a status, are of a task, were used in a step."""
    if status is not None and status not in list(Status):
        raise UsageError(f"no status {status!r}: choose one of {', '.join(Status)}")
    found = open_run(run, root)
    files = {session.seed: session.path / FILE for session in found.sessions}
    if not any(path.is_file() for path in files.values()):
        kind = found.spec["kind"]
        why = "none has been trained on yet" if kind == "posttrain" else f"a run of kind {kind} has none"
        raise UsageError(f"{found.path} has no {FILE}: {why}")
    target = console()
    for seed, path in files.items():
        if not path.is_file():
            continue
        if len(files) > 1:
            target.print(Text(f"seed {seed}", "bold"))
        records = (one for one in newest(path) if _asked(one, task, step))
        chosen, more = _chosen(records, status, limit)
        for record, places in reversed(chosen):
            _show(target, record, places)
        if not chosen:
            target.print("no rollouts match" if (status, task, step) != (None, None, None) else "no rollouts yet")
        elif more:
            target.print(Text(f"there are more: these are the newest {limit} (--limit)", "dim"))


def _asked(record: RolloutRecord, task: str | None, step: int | None) -> bool:
    return task in (None, record.group.problem.task) and step in (None, record.step)


def _chosen(records: Iterable[RolloutRecord], status: str | None, limit: int) -> tuple[list[Shown], bool]:
    """The first records with answers of the status, until there are `limit` answers; and whether there are more."""
    chosen: list[Shown] = []
    for record in records:
        matching = [
            place
            for place, one in enumerate(record.group.trajectories)
            if status is None or one.verdict.status == status
        ]
        if not matching:
            continue
        if limit == 0:
            return chosen, True
        chosen.append((record, matching[:limit]))
        if len(matching) > limit:
            return chosen, True
        limit -= len(matching)
    return chosen, False


def _show(target: Console, record: RolloutRecord, places: list[int]) -> None:
    group = record.group
    target.print(Text(f"── {group.problem.id}  number {group.number}  step {record.step}  {record.fate}", "bold"))
    for line in _prompt_lines(group.problem):
        target.print(Text(line, "dim"))
    for place in places:
        one = group.trajectories[place]
        verdict, color = one.verdict, COLOURS[one.verdict.status]
        drawn = sorted({v for v, used in zip(one.versions, one.loss_mask, strict=True) if used})
        facts = [f"reward {one.reward:g}", f"{one.drawn} tokens", one.stop_reason]
        if record.advantages:
            mean = sum(record.advantages[place]) / max(one.drawn, 1)
            facts.insert(1, f"advantage {mean:+.3g}")
        if drawn:
            facts.append(f"version {drawn[0]}" if len(drawn) == 1 else f"versions {drawn[0]} to {drawn[-1]}")
        facts += [f"{name} {value:g}" for name, value in verdict.parts.items()]
        head = Text(f"{verdict.status}", f"bold {color}")
        head.append(f"  answer {place + 1} of {len(group.trajectories)}: {', '.join(facts)}", "not bold")
        target.print(head)
        if verdict.note:
            target.print(Text(f"  note: {_seen(verdict.note)}", "italic"))
        target.print(Text("\n".join(f"  {line}" for line in _seen(one.completion).split("\n")), color))
    target.print()


def _prompt_lines(problem: Problem) -> Iterator[str]:
    if isinstance(problem.prompt, str):
        text = problem.prompt
    else:
        text = "\n".join(f"{message['role']}: {message.get('content')}" for message in problem.prompt)
    text = _seen(text if len(text) <= LONGEST_PROMPT else f"… {text[-LONGEST_PROMPT:]}")
    yield from (f"  {line}" for line in text.split("\n"))


def _seen(text: str) -> str:
    """The text with what a terminal would obey spelled out."""
    return UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
