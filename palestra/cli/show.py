"""What the commands print: specs, results, runs and their differences, datasets, evaluations."""

import csv
import fnmatch
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal as size
from rich.table import Table
from rich.text import Text

from palestra.api import check
from palestra.cli.memory import show_memory
from palestra.data.inspect import PERCENTILES, Column, Inspection, inspect, percentiles
from palestra.data.store import TokenStore
from palestra.errors import PalestraError, UsageError, did_you_mean
from palestra.runs import baselines
from palestra.runs.recorder import in_words
from palestra.runs.run import Run, diff, list_runs, open_run
from palestra.runs.store import read_json
from palestra.spec.lm import LanguageModelSpec
from palestra.spec.model import plain, standard_json
from palestra.spec.source import write_text
from palestra.view.advice import RULES, advise
from palestra.view.query import query

NEXT = {
    "control": ("watch it", "palestra enjoy"),
    "sft": ("chat with it", "palestra chat"),
    "dpo": ("chat with it", "palestra chat"),
    "posttrain": ("completions", "palestra rollouts"),
    "distill": ("completions", "palestra rollouts"),
}
"""The usual next command after a run of a kind."""
ORIGINS = 52
"""The column of origins in `check`: with a path of 50 characters they end within 110."""


def console() -> Console:
    """Standard output; wide enough not to truncate a value where it is not a terminal."""
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> Table:
    """A table without borders; cells are printed as they are, without Rich's markup."""
    made = Table(box=None, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Labels and values, one pair a line."""
    for label, value in pairs:
        print(f"{label:<15}{value}")


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
    if isinstance(loaded.spec, LanguageModelSpec):
        show_memory(loaded.spec)


def _leaves(data: dict, path: tuple, indent: str) -> Iterator[tuple[tuple, str]]:
    """Lines of YAML, each with the path of its value; lines that only open a mapping or a list have no path."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield (), f"{indent}{key}:"
            yield from _leaves(value, (*path, key), f"{indent}  ")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield (), f"{indent}{key}:"
            for index, item in enumerate(value):
                at = (*path, key, index)
                lines = list(_leaves(item, at, f"{indent}    ")) if item and isinstance(item, dict) else []
                (first, text), *rest = lines or [(at, inline(item))]
                yield first, f"{indent}  - {text.strip()}"
                yield from rest
        else:
            yield (*path, key), f"{indent}{key}: {inline(value)}"


def inline(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, str):
        text = write_text({"v": value}).removeprefix("v:").strip()
        return json.dumps(value, ensure_ascii=False) if "\n" in text or set(",[]{}") & set(value) else text
    return json.dumps(value)


def show_result(run: Run) -> None:
    """The scores of a run, its folder and plots, and the usual next command."""
    if run.spec["kind"] == "evaluate":
        show_evaluation(run)
        return
    summary, lines = run.summary(), []
    for metric in ("eval/return", "eval/loss", "eval/bits_per_byte", "eval/accuracy"):
        if metric in summary:
            value = math.nan if summary[metric] is None else summary[metric]  # as JSON has it
            digits, seeds = 1 if metric == "eval/return" else 3, summary[f"{metric}_by_seed"]
            text = f"{metric.removeprefix('eval/').replace('_', ' ')} {value:.{digits}f}"
            if len(seeds) > 1:
                text += f" ({', '.join(f'seed {seed}: {value:.{digits}f}' for seed, value in seeds.items())})"
            lines.append(("" if lines else "evaluation", text))
    scores = ("total_reward_ma", "strength", "stability", "consistency", "sample_efficiency")
    known = [f"{name} {summary[name]:.4g}" for name in scores if summary.get(name) is not None]
    if known:
        lines.append(("trial metrics", ", ".join(known)))
    lines.append(("run folder", str(run.path)))
    lines += [("plot", str(path)) for path in run.plots() if path.suffix == ".png"]
    in_default_root = run.path.parent.parent.resolve() == Path("runs").resolve()
    label, command = NEXT.get(run.spec["kind"], ("plot it", "palestra plot"))
    print_pairs([*lines, (label, f"{command} {f'{run.name}/{run.id}' if in_default_root else run.path}")])


def show_runs(root: Path, *, as_json: bool, watch: float | None, **wanted: Any) -> None:
    """The runs that are `wanted`, as a table or as JSON; again every `watch` seconds until Ctrl-C."""
    if as_json:
        print(standard_json(_run_rows(root, **wanted), indent=1))
        return
    screen = console()
    screen.print(_runs_table(root, **wanted))
    try:
        while watch is not None:
            time.sleep(watch)
            shown = _runs_table(root, **wanted)
            screen.clear()
            screen.print(shown)
    except KeyboardInterrupt:
        return  # the way to end --watch


def _run_rows(root: Path, *, name: str | None, states: Sequence[str], sort: str, limit: int) -> list[dict[str, Any]]:
    """At most `limit` runs of a name or pattern in these states, if any are given, in the order `sort`."""
    runs = list_runs(root)
    names = sorted({run.path.parent.name for run in runs})
    if name is not None and not fnmatch.filter(names, name):
        raise UsageError(f"no runs named {name} in {root}. {did_you_mean(name, names)}".rstrip())
    rows = [_run_row(run) for run in runs if name is None or fnmatch.fnmatch(run.path.parent.name, name)]
    rows = [row for row in rows if not states or row["state"] in states]
    if sort in ("name", "state"):
        rows.sort(key=lambda row: row[sort])
    elif sort != "age":  # list_runs sorts by age
        rows.sort(key=lambda row: _rank(row["headline"].get(sort, row.get(sort))), reverse=True)
    return rows[:limit]


def _rank(value: Any) -> float:
    """A value to sort by: what is missing or NaN, which has no place in an order, is the least."""
    return value if isinstance(value, int | float) and not math.isnan(value) else -math.inf


def _run_row(run: Run) -> dict[str, Any]:
    # By its folder, as `open_run` finds it: what trial.json says may be unreadable, or from before a rename.
    row: dict[str, Any] = {"name": run.path.parent.name, "id": run.path.name, "path": str(run.path), "headline": {}}
    try:
        return row | {"state": run.state, "seeds": run.seeds, "created": run.created} | run.progress()
    except PalestraError as error:  # one damaged run must not hide the others
        return row | {"state": "unreadable", "seeds": [], "created": None, "error": str(error)}


def _runs_table(root: Path, *, states: Sequence[str], **wanted: Any) -> Table | str:
    shown = []
    for row in _run_rows(root, states=states, **wanted):
        seen = [f"{row[key]:,} {unit}" for key, unit in (("frame", "frames"), ("tokens", "tokens")) if key in row]
        step = f"{row['step']:,}" if "step" in row else "–"
        headline = row["error"] if "error" in row else in_words(row["headline"])
        cells = (f"{row['name']}/{row['id']}", row["state"], str(len(row["seeds"])), step, *(seen or ["–"]), headline)
        shown.append((*cells, "" if row["created"] is None else _age(row["created"])))
    if not shown:
        return f"no runs in {root}" + (f" that are {' or '.join(states)}" if states else "")
    columns = ("run", "state", "seeds", "step", "seen", "headline", "age")
    return table(columns, shown, right=("seeds", "step", "seen"))


def show_diff(a: str, b: str, root: Path) -> None:
    """The spec fields and the results in which two runs differ, side by side."""
    left, right = open_run(a, root), open_run(b, root)
    difference = diff(left, right)
    spec = [(field.path, inline(field.before), inline(field.after)) for field in difference.spec]
    results = [(metric, number(a), number(b)) for metric, (a, b) in difference.results.items()]
    for what, rows in (("spec", spec), ("results", results)):
        columns = (what, f"{left.name}/{left.id}", f"{right.name}/{right.id}")
        console().print(table(columns, rows) if rows else f"{what}: no difference")


def show_advice(run: str, root: Path, *, as_json: bool) -> None:
    """The advice on a run, alarms before tuning."""
    opened = open_run(run, root)
    advice = advise(opened)
    if as_json:
        print(standard_json([asdict(one) for one in advice], indent=1))
        return
    seen = ", ".join(f"{counter} {count:,}" for counter, count in opened.progress().items() if counter != "headline")
    screen = console()
    screen.print(Text(f"{opened.name}/{opened.id}: {opened.state}" + (f", {seen}" if seen else "")))
    for one in advice:
        color = "bold red" if one.level == "alarm" else "bold yellow"
        screen.print(Text(f"\n{one.level}: {one.title} ({one.rule})", color))
        screen.print(Text(indented(one.text)))
    if not advice:
        screen.print(f"no advice: none of {len(RULES)} rules applies")


MOST_ROWS = 1000
"""Rows of a query in a table; the other forms have all."""


def show_query(sql: str, names: Sequence[str], root: Path, *, form: str) -> None:
    """The rows of a query over some runs, or over all."""
    with query(sql, [open_run(name, root) for name in names] or list_runs(root)) as result:
        if form == "csv":
            csv.writer(sys.stdout, lineterminator="\n").writerows(itertools.chain([result.columns], result.rows))
        elif form == "json":
            rows = (standard_json(dict(zip(result.columns, row, strict=True))) for row in result.rows)
            print("[" + next(rows, ""), *(f",\n{row}" for row in rows), "]", sep="")
        else:
            shown = list(itertools.islice(result.rows, MOST_ROWS + 1))
            cells = [["" if value is None else printable(str(value)) for value in row] for row in shown[:MOST_ROWS]]
            console().print(table(result.columns, cells))
            if len(shown) > MOST_ROWS:
                print(f"there are more: these are {MOST_ROWS} (--csv and --json print all)")


def number(value: float | None) -> str:
    """A score, or a dash."""
    return "–" if value is None else f"{value:,.6g}"


def _age(created: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


LONGEST = 240
"""Characters of a value in a sample."""
LENGTHS = [{0: "min", 50: "median", 100: "max"}.get(percent, f"{percent} %") for percent in PERCENTILES]


def show_inspection(where: str, *, rows: int, samples: int, split: str | None) -> None:
    """Inspect a dataset or a token store and describe it."""
    data = inspect(where, rows=rows, samples=samples, split=split)
    if isinstance(data, TokenStore):
        _show_store(console(), where, data, samples)
    else:
        _show_rows(console(), where, data)


def _show_rows(screen: Console, where: str, data: Inspection) -> None:
    rows = f"{data.rows:,} rows" if data.complete else f"more than {data.rows:,} rows (--rows 0 reads all)"
    formats = ", ".join(sorted({file.format for file in data.files}))
    files = f"{len(data.files):,} file{'s' if len(data.files) > 1 else ''} ({formats})"
    screen.print(Text(f"{where}: {files}, {size(sum(file.size for file in data.files))}, {rows}"))
    if len(data.files) > 1:
        largest = max(data.files, key=lambda file: file.size)
        screen.print(Text(f"largest file: {largest.path}, {size(largest.size)}"))
    screen.print()
    columns = [(name, *_column_cells(column)) for name, column in data.columns.items()]
    screen.print(table(("column", "type", "of", *LENGTHS), columns))
    for number, row in enumerate(data.samples, 1):
        screen.print(f"\nsample {number}")
        for name, value in row.items():
            screen.print(Text(f"  {name}: {_short(value)}"))
    if data.counts is not None:
        screen.print("\nmade by a data step")
        for key, value in data.counts.items():
            screen.print(Text(f"  {key}: {json.dumps(value, ensure_ascii=False)}"))


def _show_store(screen: Console, where: str, store: TokenStore, samples: int) -> None:
    tokens, ledger = store.num_tokens, store.ledger
    screen.print(Text(f"{where}: a token store of {len(store):,} documents, {tokens:,} tokens"))
    rows = [
        ("tokenizer", f"{ledger.tokenizer}, vocabulary of {ledger.vocab_size:,}"),
        ("text", f"{size(store.num_bytes)}, {store.num_bytes / max(tokens, 1):.2f} bytes per token"),
        ("trained on", f"{tokens if store.loss is None else int(store.loss.sum()):,} tokens"),
        ("largest token", f"{store.tokens.max():,}"),
        ("recipe", json.dumps(ledger.recipe, ensure_ascii=False)[:LONGEST]),
    ]
    rows += [("from", f"{r.shard.path}: {r.documents:,} documents, {r.tokens:,} tokens") for r in ledger.shards[:10]]
    if len(ledger.shards) > 10:
        rows.append(("", f"and {len(ledger.shards) - 10} more files"))
    print_pairs(rows)
    screen.print()
    screen.print(table(("", *LENGTHS), [("tokens per document", *_percentiles(percentiles(store.lengths)))]))
    for number in range(min(samples, len(store))):
        first = store[len(store) * number // samples][:16]
        screen.print(f"\nsample {number + 1}: {' '.join(map(str, first))} …")


def _column_cells(column: Column) -> list[str]:
    """The types of a column, what its percentiles are of, and the percentiles."""
    counts = column.types.most_common()
    types = ", ".join(name if len(counts) == 1 else f"{name} {n / column.types.total():.1%}" for name, n in counts)
    of = "values" if column.numbers else ""
    if column.lengths:
        of = "characters" if column.types["text"] >= column.types["list"] else "items"
    return [types, of, *_percentiles(column.percentiles())]


def _percentiles(values: Mapping[int, float]) -> list[str]:
    return [f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" for value in values.values()]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


REPORT = "evaluation.json"
SHARES = ("truncated", "unparsable", "timeout", "error", "no_room")
"""Shares of completions that are shown where they are not 0; the first one always."""


def show_evaluation(run: Run) -> None:
    """Every score of an evaluation with what it was measured on, and where the completions are."""
    sessions = [session.path for session in run.sessions if (session.path / REPORT).exists()]
    if not sessions:
        kind = run.spec["kind"]
        why = f"it is {run.state}" if kind == "evaluate" else f"it is a run of kind {kind}"
        raise UsageError(f"{run.path} has no evaluation to show: {why}")
    for index, session in enumerate(sessions):
        report = read_json(session / REPORT)
        if index == 0:
            model = report["model"]
            print_pairs([("model", f"{model['init']} ({model['dtype']}, weights {model['sha256'][:12]})")])
        if len(sessions) > 1:
            print(f"\nseed {report['seed']}")
        tables = _tasks(report), _likelihood(report), _texts(report), _lm_eval(report)
        for columns, rows in (*tables, _references(report, run.path.parent.parent)):
            if rows:
                console().print(table(columns, rows, right=columns[1:]))
        files = [session / name for name in ("answers.jsonl", "likelihood.jsonl", "texts.jsonl", "lm_eval.jsonl")]
        lines = [("mean", _mean(report["metrics"])), ("tokens", _usage(report["metrics"]))]
        pairs = (*lines, ("answers", ", ".join(str(f) for f in files if f.exists())))
        print_pairs(pair for pair in pairs if pair[1])
    print_pairs([("run folder", run.path)])


Rows = tuple[list[str], list[list[str]]]
"""Columns, and the cells of each row."""


def _tasks(report: Mapping[str, Any]) -> Rows:
    tasks, decoding = report["tasks"], report["decoding"]
    shares = {label: _shares(task) for label, task in tasks.items()}
    shown = [name for name in SHARES if name == "truncated" or any(of[name] for of in shares.values())]
    ks = decoding["k"] if decoding["samples"] else []
    greedy = ["accuracy", "95 %"] if decoding["greedy"] else []
    rows = []
    for label, task in tasks.items():
        cells = [label, task["split"], f"{task['problems']:,} of {task['of']:,}"]
        if decoding["greedy"]:
            cells += [_percent(task["greedy"]["accuracy"]["mean"]), _interval(task["greedy"]["accuracy"])]
        for of in (task["samples"][f"pass@{k}"] for k in ks):
            error = "" if of["error"] is None else f" ± {100 * of['error']:.1f}"
            cells.append(f"{100 * of['mean']:.1f}{error} %")
        cells += [_percent(shares[label][name]) for name in shown]
        rows.append([*cells, f"{task['greedy' if 'greedy' in task else 'samples']['tokens']:.0f}"])
    return ["task", "split", "problems", *greedy, *(f"pass@{k}" for k in ks), *shown, "tokens"], rows


def _likelihood(report: Mapping[str, Any]) -> Rows:
    columns = ["likelihood", "rows", "shots", "by", "accuracy", "95 %", "guessing", "centred", "bits/byte", "cut"]
    rows = []
    for label, suite in report["likelihood"].items():
        accuracy = [_percent(suite["accuracy"]["mean"]), _interval(suite["accuracy"]), _percent(suite["baseline"])]
        about = [f"{suite['items']:,} of {suite['of']:,}", str(suite["shots"]), suite["by"]]
        numbers = [f"{suite['centred']:.3f}", f"{suite['bits_per_byte']:.3f}", str(suite["cut"])]
        rows.append([label, *about, *accuracy, *numbers])
    return columns, rows


def _texts(report: Mapping[str, Any]) -> Rows:
    rows = []
    for label, suite in report.get("texts", {}).items():  # old evaluations have none
        counts = [f"{suite['items']:,} of {suite['of']:,}", f"{suite['tokens']:,}", f"{suite['bytes']:,}"]
        rows.append([label, *counts, f"{suite['loss']:.3f}", f"{suite['bits_per_byte']:.3f}"])
    return ["texts", "documents", "tokens", "bytes", "loss", "bits/byte"], rows


def _lm_eval(report: Mapping[str, Any]) -> Rows:
    """As lm-eval prints them, to four digits."""
    rows = []
    for task, outcome in report.get("lm_eval", {}).items():
        about = [task, f"{outcome['documents']:,} of {outcome['of']:,}", str(outcome["shots"])]
        for metric, (value, error) in outcome["metrics"].items():
            rows.append([*about, metric, f"{value:.4f}", "–" if error is None else f"{error:.4f}"])
    return ["lm-eval", "documents", "shots", "metric", "value", "standard error"], rows


def _references(report: Mapping[str, Any], root: Path) -> Rows:
    """The reference scores that are comparable, each with what it says of this model."""
    rows = []
    for score in baselines.scores(report):
        for one in baselines.references(score, root):
            error = "" if one.error is None else f" ± {100 * one.error:.1f}"
            about = [one.model, f"{100 * one.value:.1f}{error} %", score.beside(one), one.note]
            rows.append([score.task, f"{score.metric}, {score.shots} shots", _percent(score.value), *about])
    return ["reference", "metric", "here", "model", "its score", "here is", "note"], rows


def _shares(task: Mapping[str, Any]) -> dict[str, float]:
    """The worse of both decoding modes: nothing is hidden behind the better one."""
    worst = dict.fromkeys(SHARES, 0.0)
    for outcome in (task[mode] for mode in ("greedy", "samples") if mode in task):
        shares = {name: outcome["statuses"].get(name, 0) / max(1, outcome["answers"]) for name in SHARES}
        shares["truncated"] = outcome["truncated"]
        shares["no_room"] = outcome["statuses"].get("no_room", 0) / outcome["problems"]
        worst = {name: max(worst[name], shares[name]) for name in SHARES}
    return worst


def _mean(metrics: Mapping[str, float]) -> str:
    means = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.count("/") == 1}
    return ", ".join(
        f"{name} {f'{value:.3f}' if name in ('centred', 'bits_per_byte') else _percent(value)}"
        for name, value in means.items()
    )


def _usage(metrics: Mapping[str, float]) -> str:
    prefix = "eval/usage/"
    counts = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    if not counts:  # likelihoods alone, or an old evaluation
        return ""
    tokens = f"{counts['prompt_tokens']:,.0f} of prompts, {counts['completion_tokens']:,.0f} of completions"
    return tokens + (f"; cost {counts['cost']:.4g}" if "cost" in counts else "")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(estimate: Mapping[str, Any]) -> str:
    if estimate["interval"] is None:
        return "–"
    low, high = estimate["interval"]
    return f"{100 * low:.1f} – {100 * high:.1f} %"


# What a terminal would execute instead of print: control characters, lone surrogates, bidirectional overrides.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def indented(text: str) -> str:
    """The lines of a text, printable and two blanks to the right."""
    return "\n".join(f"  {line}" for line in printable(text).split("\n"))


def printable(text: str) -> str:
    """The text with control characters spelled out."""
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
