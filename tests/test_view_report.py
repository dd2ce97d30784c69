"""A report is one safe file that needs nothing else; it has results, curves, advice, specs and completions."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import advice_fixtures as fixtures
from rollout_groups import group, trajectory

from palestra.rollout.records import FILE, RolloutRecord, write
from palestra.runs.run import Run
from palestra.track.sinks import JsonlSink
from palestra.view.report import report

ATTACK = "<script>alert('&')</script>"


class Page(HTMLParser):
    """The texts of a page by tag; fails where tags do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.found: dict[str, list[str]] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "onload", "onerror"} & {name for name, _ in attrs}
        self.found.setdefault(tag, [])
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.setdefault(tag, [])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[self.open[-1]].append(data)


def posttrain(root: Path, changes: fixtures.Changes | None = None, **spec: object) -> Run:
    with fixtures.written(root, {**fixtures.POSTTRAIN, **spec}) as (session, tracker):
        fixtures.write_rows(session, tracker, changes or {})
        sink = JsonlSink(session.path / FILE)
        for number in range(8):
            some = tuple(trajectory(reward, completion=f"{reward} {ATTACK}") for reward in (number, 0.0))
            write(sink, RolloutRecord(group((number, 0.0), number, trajectories=some), "filtered", 60))
        sink.close()
    return Run(session.path.parent.parent)


def test_report_holds_everything_and_completions_are_text(tmp_path: Path):
    run = posttrain(tmp_path, fixtures.CASES["truncation"].broken)
    text = report([run])
    page = Page(text)
    assert "script" not in page.found
    assert f"7 {ATTACK}" in page.found["pre"]
    assert page.found["h2"] == [
        "Results",
        "Curves",
        "Advice",
        *(f"{run.name}: {part}" for part in ("completions", "spec", "environment")),
    ]
    titles = page.found["h3"]
    assert titles[1].startswith("best: reward 7")
    assert titles[-1].startswith("worst: reward 0")
    assert any("50 % of the completions are truncated" in advice for advice in page.found["p"])
    assert {"reward", "evaluation arithmetic accuracy", "entropy"} <= set(page.found["figcaption"])
    # The interval of one seed is by its standard error, 0.02.
    assert any(re.fullmatch(r"0\.\d+ ± 0\.039", cell) for cell in page.found["td"])
    assert not re.search(r"https?:|url\(|@import", text)


def test_seeds_are_bands_and_their_interval_is_over_seeds(tmp_path: Path):
    run = fixtures.write_seeds(tmp_path, broken=False)
    text = report([run])
    assert text.count('class="band"') == len(Page(text).found["figcaption"])
    last = [row["eval/return"] for row in run.metrics() if row["step"] == 60]
    mean = sum(last) / 5
    error = (sum((value - mean) ** 2 for value in last) / 4 / 5) ** 0.5
    assert f"{mean:.4g} ± {1.96 * error:.2g}" in Page(text).found["td"]


def test_points_of_a_curve_are_where_its_numbers_are(tmp_path: Path):
    with fixtures.written(tmp_path, fixtures.CONTROL) as (_, tracker):
        for step, value in enumerate((0.0, 10.0, 5.0)):
            tracker.log({"return": value}, step=step, frame=100 * step)
    (curve,) = re.findall(r'<polyline[^>]* points="([^"]*)"', report([Run(next(tmp_path.glob("*/2*")))]))
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in curve.split())
    assert abs((x0 + x2) / 2 - x1) < 0.1
    assert y1 < y2 < y0  # SVG counts down
    assert abs((y0 + y1) / 2 - y2) < 0.1


def test_command_writes_what_differs_between_runs(tmp_path: Path):
    runs = [posttrain(tmp_path), posttrain(tmp_path, rollout={"staleness": 3})]
    out = tmp_path / "deep" / "report.html"
    command = [sys.executable, "-m", "palestra", "report", *(str(run.path) for run in runs), "-o", str(out)]
    subprocess.run(command, check=True)
    page = Page(out.read_text())
    cells = page.found["td"]
    assert cells[cells.index("rollout.staleness") :][:4] == ["rollout.staleness", "0", "3", runs[1].name]
    assert {run.name for run in runs} <= set(page.found["span"])


def test_run_without_rows_has_a_report(tmp_path: Path):
    with fixtures.written(tmp_path, fixtures.CONTROL) as (session, _):
        pass
    assert "Curves" not in Page(report([Run(session.path.parent.parent)])).found["h2"]
