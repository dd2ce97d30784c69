"""The HTML report of a pipeline: its graph as SVG, its results, and each step with its output and cost."""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import Any

from palestra.errors import PalestraError
from palestra.pipeline.graph import Graph, Node
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.step import lines
from palestra.runs.run import Run, open_run
from palestra.runs.store import read_json
from palestra.work.redact import redacted

WIDTH, HEIGHT = 190.0, 50.0
GAP, BEND, LAYER_GAP, MARGIN = 22.0, 14.0, 40.0, 12.0
"""Pixels between boxes; for an edge that passes a layer; between layers; around the whole graph."""
SWEEPS = 12
SMALLEST = 0.55
"""The minimum scale of a graph that is wider than the page; beyond that it scrolls."""


@dataclass(frozen=True)
class Box:
    """A step in the graph."""

    key: str
    title: str
    note: str = ""
    state: str = "waiting"
    """A class of the style sheet: done, ran, running, failed, blocked, waiting."""
    link: str = ""
    needs: tuple[str, ...] = ()
    """The keys of its inputs; those that are not in the graph are left out."""


@dataclass(eq=False)
class _Place:
    """A box in its layer, or the bend of an edge that passes the layer."""

    width: float
    y: float
    above: list["_Place"] = field(default_factory=list)
    below: list["_Place"] = field(default_factory=list)
    x: float = 0.0
    """The center."""


def picture(boxes: Sequence[Box]) -> tuple[str, float]:
    """One `<svg>` of the boxes, inputs on top, with the edges between them; and its width."""
    layers, places, edges = _layers(boxes)
    _arrange(layers)
    every = [place for layer in layers for place in layer]
    left = min((place.x - place.width / 2 for place in every), default=0.0)
    for place in every:
        place.x += MARGIN - left
    width = max((place.x + place.width / 2 for place in every), default=0.0) + MARGIN
    height = len(layers) * (HEIGHT + LAYER_GAP) - LAYER_GAP + 2 * MARGIN
    head = (
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="min-width: {SMALLEST * width:.0f}px" '
        'role="img" aria-label="the graph of steps">'
    )
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    drawn = [*map(_edge, edges), *(_node(box, places[box.key]) for box in boxes)]
    return "\n".join([head, arrow, *drawn, "</svg>"]), width


def depths(boxes: Sequence[Box]) -> dict[str, int]:
    """The layer of each box: one below the lowest of its inputs; without inputs, one above the first that needs it."""
    depth: dict[str, int] = {}
    for box in boxes:
        depth[box.key] = max((depth[key] + 1 for key in box.needs if key in depth), default=0)
    needed: dict[str, int] = {}
    for box in boxes:
        for key in box.needs:
            needed[key] = min(depth[box.key], needed.get(key, depth[box.key]))
    return {key: needed[key] - 1 if level == 0 and key in needed else level for key, level in depth.items()}


def _layers(boxes: Sequence[Box]) -> tuple[list[list[_Place]], dict[str, _Place], list[list[_Place]]]:
    """Boxes and bends by layer, the place of each box, and the places along each edge."""
    depth = depths(boxes)
    layers: list[list[_Place]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    places: dict[str, _Place] = {}
    edges = []

    def add(level: int, width: float) -> _Place:
        layers[level].append(_Place(width, MARGIN + level * (HEIGHT + LAYER_GAP)))
        return layers[level][-1]

    for box in boxes:
        place = places[box.key] = add(depth[box.key], WIDTH)
        for key in box.needs:
            if key in depth:
                bends = [add(level, BEND) for level in range(depth[key] + 1, depth[box.key])]
                edges.append([places[key], *bends, place])
                for upper, lower in pairwise(edges[-1]):
                    upper.below.append(lower)
                    lower.above.append(upper)
    return layers, places, edges


def _arrange(layers: list[list[_Place]]) -> None:
    """Order and place each layer by the mean of its neighbors, downward and upward in turn (Sugiyama et al. 1981)."""
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers[:: 1 if down else -1]:
            wanted = {}
            for place in layer:
                near = (place.above if down else place.below) or [place]
                wanted[place] = sum(other.x for other in near) / len(near)
            layer.sort(key=lambda place: wanted[place])
            _spread(layer, [wanted[place] for place in layer])


def _spread(layer: list[_Place], wanted: list[float]) -> None:
    """Positions in the given order without overlaps, on average at the wanted ones."""
    right = float("-inf")
    for place, x in zip(layer, wanted, strict=True):
        place.x = max(x, right + GAP + place.width / 2)
        right = place.x + place.width / 2
    shift = sum(x - place.x for place, x in zip(layer, wanted, strict=True)) / max(1, len(layer))
    for place in layer:
        place.x += shift


def _edge(places: list[_Place]) -> str:
    """A curve from the bottom of a box, straight past the layers between, to the top of another."""
    path = [f"M{places[0].x:.1f} {places[0].y + HEIGHT:.1f}"]
    for upper, lower in pairwise(places):
        middle = (upper.y + HEIGHT + lower.y) / 2
        path.append(f"C{upper.x:.1f} {middle:.1f} {lower.x:.1f} {middle:.1f} {lower.x:.1f} {lower.y:.1f}")
        if lower is not places[-1]:
            path.append(f"V{lower.y + HEIGHT:.1f}")
    return f'<path class="edge" d="{"".join(path)}" marker-end="url(#arrow)"/>'


def _node(box: Box, place: _Place) -> str:
    inside = (
        f'<g class="box {escape(box.state)}"><title>{escape(box.key)}</title>'
        f'<rect x="{place.x - WIDTH / 2:.1f}" y="{place.y:.1f}" width="{WIDTH:g}" height="{HEIGHT:g}" rx="7"/>'
        f'<text x="{place.x:.1f}" y="{place.y + 21:.1f}">{escape(_shortened(box.title, 22))}</text>'
        f'<text class="note" x="{place.x:.1f}" y="{place.y + 38:.1f}">{escape(_shortened(box.note, 30))}</text></g>'
    )
    return f'<a href="{escape(box.link)}">{inside}</a>' if box.link else inside


def _shortened(text: str, most: int) -> str:
    """Without its middle if it is too long: names often differ at their ends."""
    half = most // 2
    return text if len(text) <= most else f"{text[: most - half - 1]}…{text[-half:]}"


STYLE = """
:root { color-scheme: light dark; --text: #1d232b; --soft: #5d6875; --page: #fbfbfa; --card: #ffffff; --line: #d9dde2;
  --done: #2e7d4f; --done-in: #e6f3ea; --run: #1f66b0; --run-in: #e3eefa; --bad: #b3372c; --bad-in: #fbe7e4;
  --wait: #6f7884; --wait-in: #eef0f2; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e6ea; --soft: #9aa5b1; --page: #14171b; --card: #1c2127;
  --line: #343b44; --done: #6fc48d; --done-in: #1b3325; --run: #7bb3ee; --run-in: #1a2d42; --bad: #f0897d;
  --bad-in: #42211d; --wait: #97a1ad; --wait-in: #262c33; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 24px 32px 64px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { margin: 0; font-size: 26px; } h2 { margin: 0 0 8px; font-size: 17px; }
header p { margin: 4px 0 20px; color: var(--soft); overflow-wrap: anywhere; }
main { display: flex; gap: 28px; align-items: flex-start; }
.picture { flex: none; max-width: 45vw; max-height: calc(100vh - 24px); overflow: auto; position: sticky; top: 12px; }
.graph { max-width: 100%; height: auto; }
main.wide { display: block; }
.wide .picture { max-width: 100%; max-height: none; position: static; margin-bottom: 20px; }
.steps { flex: 1; min-width: 0; display: grid; gap: 14px; }
@media (max-width: 800px) { main { flex-direction: column; } .steps { width: 100%; }
  .picture { position: static; max-width: 100%; max-height: none; } }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 18px;
  scroll-margin-top: 12px; overflow-x: auto; }
section:target { border-color: var(--run); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0 0 8px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } td { overflow-wrap: anywhere; }
td:not(:first-child):not(:last-child) { white-space: nowrap; }
.pairs { font-size: 13px; } .pairs td:first-child { white-space: nowrap; width: 1%; color: var(--soft); }
.pairs td { overflow-wrap: anywhere; }
code, pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
pre { margin: 6px 0 0; padding: 10px; overflow-x: auto; background: var(--page); border-radius: 6px; }
summary { cursor: pointer; color: var(--soft); margin-top: 6px; }
img { display: block; max-width: min(100%, 640px); margin: 10px 0; border-radius: 6px; background: #ffffff; }
.bad { color: var(--bad); } td a { color: inherit; }
.badge { font-size: 12px; font-weight: 600; padding: 2px 9px; border-radius: 10px; vertical-align: 2px;
  color: var(--wait); background: var(--wait-in); }
.badge.done, .badge.ran { color: var(--done); background: var(--done-in); }
.badge.running, .badge.elsewhere { color: var(--run); background: var(--run-in); }
.badge.failed { color: var(--bad); background: var(--bad-in); }
.graph text { fill: var(--text); font-size: 14px; text-anchor: middle; } .graph a { text-decoration: none; }
.graph .note { fill: var(--soft); font-size: 12px; }
.graph .edge { fill: none; stroke: var(--soft); stroke-width: 1.4; } .graph .tip { fill: var(--soft); }
.graph rect { fill: var(--wait-in); stroke: var(--wait); stroke-width: 1.4; }
.graph .done rect, .graph .ran rect { fill: var(--done-in); stroke: var(--done); }
.graph .ran rect { stroke-width: 2.4; }
.graph .running rect, .graph .elsewhere rect { fill: var(--run-in); stroke: var(--run); }
.graph .failed rect { fill: var(--bad-in); stroke: var(--bad); }
.graph .blocked rect { stroke-dasharray: 5 4; }
"""


LOG_LINES, LOG_BYTES = 40, 20_000
BESIDE = 640.0
"""Pixels up to which the graph is at the left of the steps; a wider one is above them."""
TIMES = ("seconds", "started", "finished", "tries")
"""The fields of a step's status that the report shows."""
SHOWN = ("accuracy", "loss", "bits_per_byte", "return", "score", "perplexity")
"""The last part of the names of metrics in the table of results; pass@k too."""
Cells = Sequence[str]


@dataclass(frozen=True)
class StepReport:
    """What is known of one step."""

    node: Node
    state: str
    status: dict[str, Any]
    """Of a step that is done, else empty."""
    attempt: dict[str, Any]
    """The last attempt, if the step is not done."""
    log: str
    counts: dict[str, Any]
    """What a data step counted (counts.json)."""
    run: Run | None
    """The run of a step that is a spec."""


def write_report(name: str, graph: Graph, outputs: Outputs, states: Mapping[str, str] | None = None) -> str:
    """Write `report-NAME.html` under the prefix, and `report-NAME.json` for programs; returns the page's place."""
    steps = [_step_report(node, outputs, (states or {}).get(node.address)) for node in graph.nodes.values()]
    record = {"name": name, "prefix": outputs.where, "made": _now(), "steps": [_record(s, outputs) for s in steps]}
    outputs.publish(f"report-{name}.json", (json.dumps(redacted(record), indent=1) + "\n").encode())
    return outputs.publish(f"report-{name}.html", _page(name, outputs.where, steps).encode())


def _record(step: StepReport, outputs: Outputs) -> dict[str, Any]:
    node = step.node
    about = {"name": node.step.name, "address": node.address, "output": outputs.place(node.address)}
    about |= {"state": step.state, "inputs": list(node.inputs), "not_awaited": list(node.unawaited)}
    times = {key: step.status[key] for key in TIMES if key in step.status}
    return about | {"identity": node.identity} | times | {"error": step.attempt.get("error")}


def _step_report(node: Node, outputs: Outputs, state: str | None) -> StepReport:
    address = node.address
    status = outputs.done(address) or {}
    attempt = {} if status else outputs.attempt(address) or {}
    if status:
        state = "ran" if state == "ran" else "done"
    elif state in (None, "done", "ran"):
        state = attempt.get("state", "waiting")
    log = outputs.read_log(address)[-LOG_BYTES:].decode(errors="replace")
    folder = outputs.report_folder(address)
    counts, run = {}, None
    if folder is not None:
        counts = read_json(folder / "counts.json") if (folder / "counts.json").is_file() else {}
        run = open_run(folder) if (folder / "latest").is_file() else None
    return StepReport(node, state or "waiting", status, attempt, "\n".join(log.splitlines()[-LOG_LINES:]), counts, run)


def _page(name: str, prefix: str, steps: Sequence[StepReport]) -> str:
    seconds = sum(step.status.get("seconds", 0.0) for step in steps)
    states = ", ".join(f"{count} {state}" for state, count in Counter(step.state for step in steps).items())
    graph, width = picture([_box(step) for step in steps])
    wide = ' class="wide"' if width > BESIDE else ""
    tables = {
        "Failures": (("step", "error"), [_failure(step) for step in steps if step.state == "failed"]),
        "Results": (("step", "metric", "first", "last"), [row for step in steps for row in _results(step)]),
        "Data": (("step", "rows in", "rows out", "dropped"), [row for step in steps for row in _data_row(step)]),
    }
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(name)}</title><style>{STYLE}</style></head><body>",
            f"<header><h1>{escape(name)}</h1>",
            f"<p>{len(steps)} steps: {escape(states)}. {_time(seconds)} of work in all. "
            f"Outputs in <code>{escape(prefix)}</code>. {_now()}</p></header>",
            f'<main{wide}><div class="picture">{graph}</div><div class="steps">',
            *(_table(title, head, rows) for title, (head, rows) in tables.items() if rows),
            *map(_section, steps),
            "</div></main></body></html>\n",
        ]
    )


def _failure(step: StepReport) -> Cells:
    name = f'<a href="#{escape(step.node.address)}">{escape(step.node.step.name)}</a>'
    return name, f'<span class="bad">{escape(str(step.attempt.get("error", "")))}</span>'


def _box(step: StepReport) -> Box:
    node, seconds = step.node, step.status.get("seconds")
    note = step.state if seconds is None else f"{step.state}, {_time(seconds)}"
    return Box(node.address, node.step.name, note, step.state, f"#{node.address}", (*node.inputs, *node.unawaited))


def _section(step: StepReport) -> str:
    node, trace = step.node, step.attempt.get("traceback")
    about = {"address": f"<code>{escape(node.address)}</code>"}
    if "seconds" in step.status:
        about["took"] = _time(step.status["seconds"])
    about |= {key: escape(str(step.status[key])) for key in TIMES[1:] if key in step.status}
    if step.attempt.get("error"):
        about["error"] = f'<span class="bad">{escape(str(step.attempt["error"]))}</span>'
    if step.run is not None:
        about["run"] = f"<code>{escape(str(step.run.path))}</code>"
    opened = " open" if step.state == "failed" else ""
    parts = [
        f'<section id="{escape(node.address)}"><h2>{escape(node.step.name)} '
        f'<span class="badge {escape(step.state)}">{escape(step.state)}</span></h2>',
        "<dl>" + "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in about.items()) + "</dl>",
        _pairs({key: json.dumps(value, ensure_ascii=False) for key, value in step.counts.items()}),
        *_plots(step.run),
        f"<details><summary>what its address is a hash of</summary>{_pairs(lines(node.identity))}</details>",
    ]
    if step.log.strip():
        parts.append(f"<details{opened}><summary>log</summary><pre>{escape(step.log)}</pre></details>")
    if trace:
        parts.append(f"<details><summary>traceback</summary><pre>{escape(trace)}</pre></details>")
    return "\n".join([*filter(None, parts), "</section>"])


def _results(step: StepReport) -> list[Cells]:
    """The first and the last evaluation of a run, mean over seeds."""
    name, run = escape(step.node.step.name), step.run
    if run is None:
        return []
    try:
        metrics = run.metrics()
    except PalestraError as error:  # a damaged run must not hide the others
        return [(name, escape(str(error)), "", "")]
    by_seed = {seed: [row for row in metrics if row["seed"] == seed and _shown(row)] for seed in run.seeds}
    firsts, lasts = ([rows[index] for rows in by_seed.values() if rows] for index in (0, -1))
    once = all(len(rows) < 2 for rows in by_seed.values())
    return [
        (name, escape(metric.removeprefix("eval/")), "" if once else _mean(metric, firsts), _mean(metric, lasts))
        for metric in sorted({key for row in lasts for key in _shown(row)})
    ]


def _shown(row: Mapping[str, Any]) -> list[str]:
    """The evaluation metrics that get a row: overall ones, or those of tasks where there are no overall ones."""
    shown = []
    for key, value in row.items():
        last = key.rpartition("/")[2]
        if not key.startswith("eval/") or not isinstance(value, int | float) or last.endswith("_se"):
            continue
        if "/samples/" not in key and "/parts/" not in key and (last in SHOWN or last.startswith("pass@")):
            shown.append(key)
    return [key for key in shown if key.count("/") == 1] or shown


def _mean(metric: str, rows: Sequence[Mapping[str, Any]]) -> str:
    values = [row[metric] for row in rows if metric in row]
    return f"{sum(values) / len(values):.4g}" if values else ""


def _data_row(step: StepReport) -> Iterable[Cells]:
    counts = step.counts
    if "rows_in" in counts or "rows_out" in counts:
        dropped = {reason: count for reason, count in counts.get("dropped", {}).items() if count}
        numbers = [f"{counts[key]:,}" if key in counts else "" for key in ("rows_in", "rows_out")]
        if not counts.get("rows_out") and sum(dropped.values()) < counts.get("rows_in", 0):
            numbers[1] = ""  # its output is not rows: a classifier, a tokenizer
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())
        yield escape(step.node.step.name), *numbers, escape(reasons)


def _plots(run: Run | None) -> Iterable[str]:
    for path in [] if run is None else run.plots():
        if path.suffix == ".png":
            data = base64.b64encode(path.read_bytes()).decode()
            yield f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def _pairs(values: Mapping[str, str]) -> str:
    cells = "".join(
        f"<tr><td><code>{escape(key)}</code></td><td><code>{escape(value)}</code></td></tr>"
        for key, value in values.items()
    )
    return f'<table class="pairs">{cells}</table>' if cells else ""


def _table(title: str, head: Cells, rows: Iterable[Cells]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    columns = "".join(f"<th>{name}</th>" for name in head)
    return f"<section><h2>{title}</h2><table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></section>"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
