"""The page of a pipeline: its graph as SVG, its results, and each step with what it made and cost. One HTML file."""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
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
"""Between boxes; the room that an edge takes where it passes a layer; between layers; around all. Pixels."""
SWEEPS = 12
SMALLEST = 0.55
"""As far as a picture that is wider than the page is made smaller; beyond that it scrolls."""


@dataclass(frozen=True)
class Box:
    """A step as it is drawn."""

    key: str
    title: str
    note: str = ""
    state: str = "waiting"
    """A class of the style sheet: done, ran, running, failed, blocked, waiting."""
    link: str = ""
    needs: tuple[str, ...] = ()
    """The keys of its inputs; those that are not drawn are left out."""


@dataclass
class _Place:
    """A box in its layer, or the bend of an edge that passes the layer."""

    width: float
    above: list["_Place"] = field(default_factory=list)
    below: list["_Place"] = field(default_factory=list)
    x: float = 0.0
    """The middle."""


def picture(boxes: Sequence[Box]) -> tuple[str, float]:
    """One `<svg>` of the boxes, inputs first, and the edges between them; and how wide it is."""
    layers, places, chains = _layers(boxes)
    _untangle(layers)
    _straighten(layers)
    left = min((one.x - one.width / 2 for layer in layers for one in layer), default=0.0)
    for layer in layers:
        for one in layer:
            one.x += MARGIN - left
    width = max((one.x + one.width / 2 for layer in layers for one in layer), default=0.0) + MARGIN
    height = len(layers) * (HEIGHT + LAYER_GAP) - LAYER_GAP + 2 * MARGIN
    tops = {id(one): _top(level) for level, layer in enumerate(layers) for one in layer}
    edges = [_edge([(one.x, tops[id(one)]) for one in chain]) for chain in chains]
    drawn = [_node(box, places[box.key].x, tops[id(places[box.key])]) for box in boxes]
    head = (
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="min-width: {SMALLEST * width:.0f}px" '
        'role="img" aria-label="the graph of steps">'
    )
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    return "\n".join([head, arrow, *edges, *drawn, "</svg>"]), width


def depths(boxes: Sequence[Box]) -> dict[str, int]:
    """The layer of each box: one below the lowest of its inputs; without inputs, one above the first that needs it."""
    found: dict[str, int] = {}
    for box in boxes:
        found[box.key] = max((found[key] + 1 for key in box.needs if key in found), default=0)
    needed: dict[str, int] = {}
    for box in boxes:
        for key in box.needs:
            needed[key] = min(found[box.key], needed.get(key, found[box.key]))
    return {key: needed[key] - 1 if level == 0 and key in needed else level for key, level in found.items()}


def _layers(boxes: Sequence[Box]) -> tuple[list[list[_Place]], dict[str, _Place], list[list[_Place]]]:
    """Boxes and bends by layer, the place of each box, and the places that each edge goes through."""
    depth = depths(boxes)
    layers: list[list[_Place]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    places: dict[str, _Place] = {}
    chains = []
    for box in boxes:
        place = places[box.key] = _Place(WIDTH)
        for key in box.needs:
            if key in places:
                bends = [_Place(BEND) for _ in range(depth[key] + 1, depth[box.key])]
                for level, bend in enumerate(bends, depth[key] + 1):
                    layers[level].append(bend)
                chain = [places[key], *bends, place]
                for upper, lower in pairwise(chain):
                    upper.below.append(lower)
                    lower.above.append(upper)
                chains.append(chain)
        layers[depth[box.key]].append(place)
    return layers, places, chains


def _untangle(layers: list[list[_Place]]) -> None:
    """Order each layer by the middle of its neighbors', downwards and upwards in turn (Sugiyama et al. 1981)."""
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for level, layer in list(enumerate(layers))[:: 1 if down else -1]:
            beside = layers[level - 1 if down else level + 1] if 0 <= level + (-1 if down else 1) < len(layers) else []
            rank = {id(one): place for place, one in enumerate(beside)}
            own = {id(one): place for place, one in enumerate(layer)}
            middles = {}
            for one in layer:
                near = [rank[id(other)] for other in (one.above if down else one.below)]
                scale = len(layer) / max(1, len(beside))
                middles[id(one)] = scale * sum(near) / len(near) if near else own[id(one)]
            layer.sort(key=lambda one: (middles[id(one)], own[id(one)]))


def _straighten(layers: list[list[_Place]]) -> None:
    """Put each place below its inputs, and above those who need it, as far as its neighbors let it."""
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers[:: 1 if down else -1]:
            wanted = []
            for one in layer:
                near = (one.above if down else one.below) or [one]
                wanted.append(sum(other.x for other in near) / len(near))
            _spread(layer, wanted)


def _spread(layer: list[_Place], wanted: list[float]) -> None:
    """Positions in the given order, as near as can be to the wanted ones on the mean, without overlaps."""
    right = float("-inf")
    for one, x in zip(layer, wanted, strict=True):
        one.x = max(x, right + GAP + one.width / 2)
        right = one.x + one.width / 2
    shift = sum(x - one.x for one, x in zip(layer, wanted, strict=True)) / max(1, len(layer))
    for one in layer:
        one.x += shift


def _top(level: int) -> float:
    return MARGIN + level * (HEIGHT + LAYER_GAP)


def _edge(points: list[tuple[float, float]]) -> str:
    """A curve from the bottom of a box through bends to the top of another."""
    x, top = points[0]
    path = [f"M{x:.1f} {top + HEIGHT:.1f}"]
    y = top + HEIGHT
    for place, (to, top) in enumerate(points[1:], 1):
        middle = (y + top) / 2
        path.append(f"C{x:.1f} {middle:.1f} {to:.1f} {middle:.1f} {to:.1f} {top:.1f}")
        x, y = to, top
        if place < len(points) - 1:  # straight past the layer
            y = top + HEIGHT
            path.append(f"V{y:.1f}")
    return f'<path class="edge" d="{"".join(path)}" marker-end="url(#arrow)"/>'


def _node(box: Box, x: float, top: float) -> str:
    inside = (
        f'<g class="box {escape(box.state)}"><title>{escape(box.key)}</title>'
        f'<rect x="{x - WIDTH / 2:.1f}" y="{top:.1f}" width="{WIDTH:g}" height="{HEIGHT:g}" rx="7"/>'
        f'<text x="{x:.1f}" y="{top + 21:.1f}">{escape(_cut(box.title, 22))}</text>'
        f'<text class="note" x="{x:.1f}" y="{top + 38:.1f}">{escape(_cut(box.note, 30))}</text></g>'
    )
    return f'<a href="{escape(box.link)}">{inside}</a>' if box.link else inside


def _cut(text: str, most: int) -> str:
    """Without its middle where it is too long: names often differ at their ends."""
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
.told { flex: 1; min-width: 0; display: grid; gap: 14px; }
@media (max-width: 800px) { main { flex-direction: column; } .told { width: 100%; }
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
