"""The page of a pipeline: its graph, its results, and each step with what it made, told and cost. One HTML file."""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.pipeline.address import lines
from palestra.pipeline.graph import Graph, Node
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.picture import Box, picture
from palestra.pipeline.style import STYLE
from palestra.runs.redact import redacted
from palestra.runs.run import Run, open_run
from palestra.runs.store import read_json

LOG_LINES, LOG_BYTES = 40, 20_000
BESIDE = 640.0
"""Pixels up to which the graph stands beside the steps; a wider one stands above them."""
TIMES = ("seconds", "started", "finished", "tries")
"""What is told of a step's status."""
SHOWN = ("accuracy", "loss", "bits_per_byte", "return", "score", "perplexity")
"""The last part of the names of metrics that are worth a row; pass@k too."""
Cells = Sequence[str]


@dataclass(frozen=True)
class Told:
    """What is known of one step."""

    node: Node
    state: str
    status: dict[str, Any]
    """Of a step that is done, else empty."""
    attempt: dict[str, Any]
    """How the last attempt stands, where it is not done."""
    folder: Path | None
    """Its output, or what of it tells something."""
    log: str
    run: Run | None

    @property
    def seconds(self) -> float | None:
        """How long it took."""
        return self.status.get("seconds")


def write_report(name: str, graph: Graph, outputs: Outputs, states: Mapping[str, str] | None = None) -> str:
    """Write `report-NAME.html` under the prefix, and beside it `report-NAME.json` for programs; where the page is."""
    told = [_told(node, outputs, (states or {}).get(node.address)) for node in graph.nodes.values()]
    record = {"name": name, "prefix": outputs.where, "made": _now(), "steps": [_record(one, outputs) for one in told]}
    outputs.publish(f"report-{name}.json", (json.dumps(redacted(record), indent=1) + "\n").encode())
    return outputs.publish(f"report-{name}.html", _page(name, outputs.where, told).encode())


def _record(one: Told, outputs: Outputs) -> dict[str, Any]:
    node = one.node
    about = {"name": node.step.name, "address": node.address, "output": outputs.place(node.address), "state": one.state}
    about |= {"inputs": list(node.inputs), "not_awaited": list(node.unawaited), "identity": node.identity}
    return about | {key: one.status[key] for key in TIMES if key in one.status} | {"error": one.attempt.get("error")}


def _told(node: Node, outputs: Outputs, state: str | None) -> Told:
    address = node.address
    status = outputs.done(address) or {}
    attempt = {} if status else outputs.attempt(address) or {}
    if status:
        state = "ran" if state == "ran" else "done"
    elif state in (None, "done", "ran"):
        state = attempt.get("state", "waiting")
    folder = outputs.told(address)
    return Told(node, state or "waiting", status, attempt, folder, _tail(outputs.read_log(address)), _run_in(folder))


def _tail(log: bytes) -> str:
    """The end of a log."""
    return "\n".join(log[-LOG_BYTES:].decode(errors="replace").splitlines()[-LOG_LINES:])


def _run_in(folder: Path | None) -> Run | None:
    """The run of a step that is a spec."""
    return open_run(folder) if folder is not None and (folder / "latest").is_file() else None


def _page(name: str, prefix: str, told: Sequence[Told]) -> str:
    seconds = sum(one.seconds or 0.0 for one in told)
    states = ", ".join(f"{count} {state}" for state, count in Counter(one.state for one in told).items())
    graph, width = picture([_box(one) for one in told])
    wide = ' class="wide"' if width > BESIDE else ""
    failures = [_failure(one) for one in told if one.state == "failed"]
    results = [row for one in told if one.run is not None for row in _results(one.node.step.name, one.run)]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(name)}</title><style>{STYLE}</style></head><body>",
            f"<header><h1>{escape(name)}</h1>",
            f"<p>{len(told)} steps: {escape(states)}. {_time(seconds)} of work in all. "
            f"Outputs in <code>{escape(prefix)}</code>. {_now()}</p></header>",
            f'<main{wide}><div class="picture">{graph}</div><div class="told">',
            _table(("step", "error"), failures, "Failures") if failures else "",
            _table(("step", "metric", "first", "last"), results, "Results") if results else "",
            _table(("step", "rows in", "rows out", "dropped"), _data_rows(told), "Data") if _data_rows(told) else "",
            *(_section(one) for one in told),
            "</div></main></body></html>\n",
        ]
    )


def _failure(one: Told) -> Cells:
    error = escape(str(one.attempt.get("error", "")))
    return (
        f'<a href="#{escape(one.node.address)}">{escape(one.node.step.name)}</a>',
        f'<span class="bad">{error}</span>',
    )


def _box(one: Told) -> Box:
    note = one.state if one.seconds is None else f"{one.state}, {_time(one.seconds)}"
    needs = (*one.node.inputs, *one.node.unawaited)
    return Box(one.node.address, one.node.step.name, note, one.state, f"#{one.node.address}", needs)


def _section(one: Told) -> str:
    node, trace = one.node, one.attempt.get("traceback")
    about = [("address", f"<code>{escape(node.address)}</code>")]
    if one.seconds is not None:
        about.append(("took", _time(one.seconds)))
    about += [(key, escape(str(one.status[key]))) for key in TIMES[1:] if key in one.status]
    if one.attempt.get("error"):
        about.append(("error", f'<span class="bad">{escape(str(one.attempt["error"]))}</span>'))
    if one.folder is not None and one.run is not None:
        about.append(("run", f"<code>{escape(str(one.run.path))}</code>"))
    parts = [
        f'<section id="{escape(node.address)}"><h2>{escape(node.step.name)} '
        f'<span class="badge {escape(one.state)}">{escape(one.state)}</span></h2>',
        "<dl>" + "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in about) + "</dl>",
        _counts(one.folder),
        *_plots(one.run),
        _details("what its address is made of", _pairs(lines(node.identity))),
        _details("log", f"<pre>{escape(one.log)}</pre>", opened=one.state == "failed") if one.log.strip() else "",
        _details("traceback", f"<pre>{escape(trace)}</pre>") if trace else "",
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _results(step: str, run: Run) -> list[Cells]:
    """The first and the last evaluation of a run, mean over seeds."""
    try:
        rows = run.metrics()
    except PalestraError as error:  # a damaged run has a step of its own to say so
        return [(step, escape(str(error)), "", "")]
    evaluated = {seed: [row for row in rows if row["seed"] == seed and _shown(row)] for seed in run.seeds}
    firsts = [of_seed[0] for of_seed in evaluated.values() if of_seed]
    lasts = [of_seed[-1] for of_seed in evaluated.values() if of_seed]
    once = all(len(of_seed) < 2 for of_seed in evaluated.values())
    found: list[Cells] = []
    for metric in sorted({key for row in lasts for key in _shown(row)}):
        first = "" if once else _mean([row[metric] for row in firsts if metric in row])
        last = _mean([row[metric] for row in lasts if metric in row])
        found.append((escape(step), escape(metric.removeprefix("eval/")), first, last))
    return found


def _shown(row: Mapping[str, Any]) -> list[str]:
    """The metrics of evaluations that are worth a row: of the whole, or of tasks where there is no whole."""
    found = []
    for key, value in row.items():
        last = key.rpartition("/")[2]
        if not key.startswith("eval/") or not isinstance(value, int | float) or last.endswith("_se"):
            continue
        if "/samples/" not in key and "/parts/" not in key and (last in SHOWN or last.startswith("pass@")):
            found.append(key)
    whole = [key for key in found if key.count("/") == 1]
    return whole or found


def _data_rows(told: Sequence[Told]) -> list[Cells]:
    found: list[Cells] = []
    for one in told:
        counts = _read_counts(one.folder)
        if "rows_in" in counts or "rows_out" in counts:
            dropped = {reason: count for reason, count in counts.get("dropped", {}).items() if count}
            numbers = [f"{counts[key]:,}" if key in counts else "" for key in ("rows_in", "rows_out")]
            if not counts.get("rows_out") and sum(dropped.values()) < counts.get("rows_in", 0):
                numbers[1] = ""  # it makes something else of its rows: a classifier, a tokenizer
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
            found.append((escape(one.node.step.name), *numbers, escape(reasons)))
    return found


def _read_counts(folder: Path | None) -> dict[str, Any]:
    path = None if folder is None else folder / "counts.json"
    return read_json(path) if path is not None and path.is_file() else {}


def _counts(folder: Path | None) -> str:
    counts = _read_counts(folder)
    return _pairs({key: json.dumps(value, ensure_ascii=False) for key, value in counts.items()}) if counts else ""


def _plots(run: Run | None) -> Iterable[str]:
    for path in [] if run is None else run.plots():
        if path.suffix == ".png":
            data = base64.b64encode(path.read_bytes()).decode()
            yield f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def _pairs(values: Mapping[str, str]) -> str:
    rows = [(f"<code>{escape(key)}</code>", f"<code>{escape(value)}</code>") for key, value in values.items()]
    return '<table class="pairs">' + "".join(f"<tr><td>{a}</td><td>{b}</td></tr>" for a, b in rows) + "</table>"


def _table(head: Cells, rows: Iterable[Cells], title: str) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    columns = "".join(f"<th>{name}</th>" for name in head)
    return f"<section><h2>{title}</h2><table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></section>"


def _details(title: str, inside: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{title}</summary>{inside}</details>"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4g}" if values else ""


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
