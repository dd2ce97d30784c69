"""A report on runs as one HTML file that needs nothing else: results, curves, advice, specs, completions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from typing import Any

import numpy as np

from palestra import __version__
from palestra.rollout.records import FILE, newest
from palestra.runs.plot import LEADING, Curve, counted_by, numeric, seed_curve, words
from palestra.runs.recorder import in_words
from palestra.runs.run import Run
from palestra.runs.store import read_json
from palestra.spec.load import differences
from palestra.view.advice import advise

CHARTS, POINTS, GROUPS, SAMPLES = 12, 240, 64, 3
"""At most: charts, points of a curve, groups from the end of the rollouts, and completions of each sort."""
FIRST = ("return", *LEADING[:2], "loss", *LEADING[2:])
HIDDEN = ("time/", "suite/", "selftest/")
COLORS = 6  # in report.html
WIDTH, HEIGHT, LEFT, BELOW = 400, 200, 52, 20  # of a chart and of the room for its numbers

Named = Mapping[str, Run]
Rows = Mapping[str, list[dict[str, Any]]]
"""Of metrics, by the name of the run."""


def report(runs: Sequence[Run]) -> str:
    """The page."""
    known = [run.name for run in runs]
    named = {run.name if known.count(run.name) == 1 else f"{run.name}/{run.id}": run for run in runs}
    rows = {name: run.metrics() for name, run in named.items()}
    parts = [("Results", _results(named, rows)), ("Curves", _charts(rows)), ("Advice", _advice(named))]
    changes = {name: differences(runs[0].spec, run.spec) for name, run in named.items()}
    changed = [(one.path, one.before, one.after, name) for name, some in changes.items() for one in some]
    parts += [("Spec differences", _table(("field", next(iter(named)), "changed", "in"), changed))] if changed else []
    for name, run in named.items():
        parts.append((f"{name}: completions", _samples(run)))
        for session in run.sessions[:1]:
            manifest = {key: value for key, value in read_json(session.path / "manifest.json").items() if key != "spec"}
            parts.append((f"{name}: spec", _folded("resolved", (session.path / "spec.yaml").read_text())))
            parts.append((f"{name}: environment", _folded("manifest", json.dumps(manifest, indent=1))))
    body = "".join(f"<h2>{escape(title)}</h2>{content}" for title, content in parts if content)
    about = f"{', '.join(f'{run.name}/{run.id}' for run in runs)}. Written by Palestra {__version__}."
    page = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return page.substitute(title=escape(", ".join(named)), about=escape(about), body=body)


def _results(named: Named, rows: Rows) -> str:
    """State and headline of each run, and its last evaluations with 95 % intervals, over seeds or by standard error."""
    heads = [(n, r.state, r.spec["kind"], len(r.seeds), in_words(r.progress()["headline"])) for n, r in named.items()]
    shown = [key for key in _metrics(rows) if key.startswith("eval/")]
    scores = [(words(key), *(_interval(table, key) for table in rows.values())) for key in shown]
    results = _table(("run", "state", "kind", "seeds", "headline"), heads)
    return results + (f"<h3>Last evaluation</h3>{_table(('', *named), scores)}" if scores else "")


def _metrics(rows: Rows) -> list[str]:
    """What is shown, the most important first; of evaluations what has a standard error, and the means of the rest."""
    keys = numeric([row for table in rows.values() for row in table])
    measured = [key for key in keys if f"{key}_se" in keys]
    whole = [key for key in keys if not key.startswith(HIDDEN) and not key.endswith(("_se", "_std", "_min"))]
    means = [key for key in whole if not key.startswith("eval/") or key.count("/") == 1]
    means = [key for key in means if not any(one.endswith(key.removeprefix("eval")) for one in measured)]
    scores = [*measured, *(key for key in means if key.startswith("eval/"))]
    first = [key for name in FIRST for key in (scores if name == "eval" else [name]) if key in keys]
    return list(dict.fromkeys([*first, *means]))


def _interval(rows: list[dict[str, Any]], metric: str) -> str:
    last = list({row["seed"]: row for row in rows if metric in row}.values())
    values, errors = [row[metric] for row in last], [row.get(f"{metric}_se") for row in last]
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else next(iter(errors), None)
    return f"{fmean(values):.4g}" + ("" if error is None else f" ± {1.96 * error:.2g}") if values else "–"


def _advice(named: Named) -> str:
    told = [(f"{name}: {one.title}", one) for name, run in named.items() for one in advise(run)]
    item = '<div class="advice {}"><b>{}</b><p>{}</p></div>'
    found = [item.format(one.level, escape(title), escape(one.text)) for title, one in told]
    return "".join(found) or "<p>No rule of <code>palestra doctor</code> applies.</p>"


def _charts(rows: Rows) -> str:
    """The metrics that matter first, over what all runs count: frames, tokens or steps."""
    everything = [row for table in rows.values() for row in table]
    x, charts = counted_by({key for row in everything for key in row}), []
    for metric in _metrics(rows):
        curves = {at: c for at, table in enumerate(rows.values()) if (c := seed_curve(table, metric, x)) is not None}
        if any(len(curve.x) > 1 and np.ptp(curve.ys) > 0 for curve in curves.values()):
            charts.append(f"<figure><figcaption>{escape(words(metric))}</figcaption>{_chart(curves)}</figure>")
    key = '<span class="key" style="--c: var(--c{})">{}</span>'
    keys = "".join(key.format(at % COLORS, escape(name)) for at, name in enumerate(rows))
    about = f'<p class="dim">{keys} over {x}; a band is one standard deviation over seeds</p>'
    return f'{about}<div class="charts">{"".join(charts[:CHARTS])}</div>' if charts else ""


def _chart(curves: Mapping[int, Curve]) -> str:
    """Means with bands, as SVG."""
    spread = {at: (curve.ys.mean(0), curve.ys.std(0)) for at, curve in curves.items()}
    bands = {at: (mean - std, mean + std) for at, (mean, std) in spread.items()}
    axes = [curve.x for curve in curves.values()], [edge for band in bands.values() for edge in band]
    (x0, x1), (y0, y1) = ((min(map(np.min, values)), max(map(np.max, values))) for values in axes)
    right, bottom, top = WIDTH - 8, HEIGHT - BELOW, 8

    def points(x: Any, y: Any) -> str:
        across = LEFT + (x - x0) / ((x1 - x0) or 1) * (right - LEFT)
        down = bottom - (y - y0) / ((y1 - y0) or 1) * (bottom - top)
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, down, strict=True))

    parts = [f'<text x="{LEFT}" y="{HEIGHT - 4}">{x0:,.0f}</text>']
    parts.append(f'<text x="{right}" y="{HEIGHT - 4}" text-anchor="end">{x1:,.0f}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        at, value = bottom - share * (bottom - top), y0 + share * (y1 - y0)
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{right}"/><text y="{at + 4}">{value:.3g}</text>')
    for at, curve in curves.items():
        chosen = np.unique(np.linspace(0, len(curve.x) - 1, POINTS).astype(int))
        x, color, (low, high) = curve.x[chosen], f"var(--c{at % COLORS})", bands[at]
        area = f"{points(x, low[chosen])} {points(x[::-1], high[chosen][::-1])}"
        parts.append(f'<polygon class="band" style="fill: {color}" points="{area}"/>' if len(curve.ys) > 1 else "")
        line = points(x, curve.ys.mean(0)[chosen])
        parts.append(f'<polyline class="curve" style="stroke: {color}" points="{line}"/>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _samples(run: Run) -> str:
    """The best and the worst rewarded of the last completions."""
    files = [path for session in run.sessions if (path := session.path / FILE).exists()]
    records = [record for path in files for record in islice(newest(path), GROUPS)]
    rows = [(t.reward, r.step, r.group.problem, t) for r in records for t in r.group.trajectories]
    found = sorted({(row[2].id, row[0]): row for row in rows}.values(), key=lambda row: -row[0])
    texts = []
    for title, some in (("best", found[:SAMPLES]), ("worst", found[SAMPLES:][-SAMPLES:])):
        for reward, step, problem, t in some:
            head = escape(f"{title}: reward {reward:g}, {t.verdict.status}, {problem.id}, step {step}")
            texts.append(f"<h3>{head}</h3><pre>{escape(str(problem.prompt))}</pre><pre>{escape(t.completion)}</pre>")
    return "".join(texts)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
