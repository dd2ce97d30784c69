"""The timeline of the web view: exact spans of a window, and bins of many, against sums over all spans."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from view_runs import View, demo_folder  # noqa: F401

from palestra.track.trace import Tracer, read_traces
from palestra.view import index as index_module
from palestra.view import timeline


@pytest.fixture
def view(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:  # noqa: F811
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    shutil.copytree(demo_folder, tmp_path / "runs")
    return View(tmp_path / "runs")


def spans(view: View) -> list[tuple[str, str, float, float]]:
    """Lane, name, start and end of all spans, by the reader of `palestra.track`."""
    events = read_traces(view.session("demo_sums") / "trace.json")
    origin = 1_700_000_000_000_000_000
    return [(e.track, e.name, (e.start - origin) / 1e9, (e.start + e.duration - origin) / 1e9) for e in events]


def test_window_has_exactly_the_spans_that_overlap_it(view: View):
    run = view.run("demo_sums")
    for low, high in ((20.0, 31.5), (0.0, 0.5), (100.0, 100.01), (190.0, 500.0)):
        answer = view.get("timeline", run=run, low=low, high=high)
        tracks, names, events = [lane["track"] for lane in answer["lanes"]], answer["names"], answer["events"]
        found = [
            (tracks[lane], names[name], pytest.approx(start, abs=1e-5), pytest.approx(start + duration, abs=1e-5))
            for lane, name, start, duration in zip(
                events["lane"], events["name"], events["start"], events["duration"], strict=True
            )
        ]
        expected = [span for span in spans(view) if span[3] >= low and span[2] < high]
        assert answer["exact"]
        assert sorted(expected) == sorted(found, key=lambda span: (span[0], span[1], span[2].expected))


def test_lanes_are_in_order_and_the_whole_is_shown_at_first(view: View):
    answer = view.get("timeline", run=view.run("demo_sums"))
    expected = ["trainer/0", *(f"generator/{n}" for n in range(4)), "verifier/0", "verifier/1", "sync"]
    assert [lane["track"] for lane in answer["lanes"]] == expected
    assert (answer["low"], answer["unix"]) == (0.0, 1.7e9)
    assert len(answer["events"]["args"]) == len(spans(view))
    trainer = sum(end - start for lane, _, start, end in spans(view) if lane == "trainer/0")
    assert answer["lanes"][0]["seconds"] == pytest.approx(trainer)


def test_step_is_the_window_from_its_first_span_to_that_of_the_next(view: View):
    answer = view.get("timeline", run=view.run("demo_sums"), step=7)
    assert (answer["low"], answer["high"]) == pytest.approx((30.0, 35.0), abs=1.0)
    steps = {args.get("step") for args in answer["events"]["args"]}
    assert 7 in steps


@pytest.mark.parametrize("coarse", [False, True])
def test_bins_of_many_spans_are_their_busy_shares(view: View, monkeypatch: pytest.MonkeyPatch, coarse: bool):
    run = view.run("demo_sums")
    monkeypatch.setattr(timeline, "EXACT_BYTES", 1000)
    monkeypatch.setattr(index_module, "CHUNK", 100)
    if coarse:
        monkeypatch.setattr(timeline, "ROWS", 100)
    low, high, bins = 12.0, 180.0, 21
    answer = view.get("timeline", run=run, low=low, high=high, bins=bins)
    shares = answer["bins"]
    found = np.zeros((len(answer["lanes"]), len(answer["names"]), bins))
    found[shares["lane"], shares["name"], shares["bin"]] = shares["busy"]
    tracks, names = [lane["track"] for lane in answer["lanes"]], answer["names"]
    edges = np.linspace(low, high, bins + 1)
    expected = np.zeros_like(found)
    for lane, name, start, end in spans(view):
        overlap = np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1])
        expected[tracks.index(lane), names.index(name)] += np.maximum(overlap, 0) / (edges[1] - edges[0])
    if coarse:  # short spans are moved by at most the width of a coarse bin
        assert np.abs(found.sum(2) - expected.sum(2)).max() < 0.05 * bins
        assert np.abs(found - expected).mean() < 0.05
    else:
        assert np.abs(found - np.minimum(expected, 1)).max() < 0.002
    busy = [lane["seconds"] / (high - low) for lane in answer["lanes"]]
    assert busy == pytest.approx((expected.sum((1, 2)) / bins).tolist(), abs=0.05 if coarse else 0.003)


def test_long_trace_is_indexed_by_another_process_meanwhile(view: View, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline, "EXACT_BYTES", 1000)
    monkeypatch.setattr(index_module, "SHORT", 0)
    run = view.run("demo_sums")
    answer = view.get("timeline", run=run, low=0, high=200)
    assert (answer["exact"], answer["bins"], answer["indexed"]) == (False, None, 0.0)
    while answer["bins"] is None:
        time.sleep(0.1)
        answer = view.get("timeline", run=run, low=0, high=200)
    assert answer["indexed"] == 1.0
    assert answer["bins"]["lane"]
    monkeypatch.setattr(index_module, "SHORT", 1000)
    with (view.session("demo_sums") / "trace.json").open("a") as file:  # it grows: what is indexed is shown meanwhile
        file.write(',\n{"ph":"X","name":"train","pid":1,"tid":0,"ts":2e8,"dur":1e6}\n')
    assert view.get("timeline", run=run, low=0, high=200)["bins"] == answer["bins"]


def test_traces_of_other_processes_are_on_the_clock_of_the_first(view: View, monkeypatch: pytest.MonkeyPatch):
    run, folder = view.run("demo_sums"), view.session("demo_sums")
    late = 1_700_000_000_000_000_000 + 10_000_000_000
    lines = [
        {"ph": "M", "name": "start", "args": {"unix_ns": late}},
        *({"ph": "M", "name": "thread_name", "pid": 7, "tid": tid, "args": {"name": "generator/9"}} for tid in (1, 2)),
        {"ph": "X", "name": "sample", "pid": 7, "tid": 1, "ts": 1e6, "dur": 2e6, "args": {"group": 3}},
        {"ph": "X", "name": "fetch", "pid": 7, "tid": 2, "ts": 5e6, "dur": 1e6},
    ]
    text = ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    (folder / "trace.generator-9.json").write_text("[\n" + text + "\n]\n")
    answer = view.get("timeline", run=run, low=10.5, high=16.5)
    lane = next(place for place, lane in enumerate(answer["lanes"]) if lane["track"] == "generator/9")
    events = answer["events"]
    found = [events["start"][place] for place, one in enumerate(events["lane"]) if one == lane]
    assert found == [11.0, 15.0]
    assert answer["lanes"][lane]["seconds"] == 3.0
    monkeypatch.setattr(timeline, "EXACT_BYTES", 1000)
    answer = view.get("timeline", run=run, low=10.0, high=42.0, bins=16)
    lane = next(place for place, lane in enumerate(answer["lanes"]) if lane["track"] == "generator/9")
    bins = answer["bins"]
    busy = {at: share for one, at, share in zip(bins["lane"], bins["bin"], bins["busy"], strict=True) if one == lane}
    assert busy == {0: 0.5, 1: 0.5, 2: 0.5}
    assert answer["lanes"][0]["seconds"] > 25


def test_a_real_tracer_that_was_killed_and_resumed_is_read(view: View, tmp_path: Path):
    path = view.session("demo_cartpole") / "trace.json"
    with Tracer(path) as tracer, tracer.span("collect", step=1):
        pass
    path.write_bytes(path.read_bytes()[:-3] + b',\n{"ph":"X","name":"to')  # torn
    answer = view.get("timeline", run=view.run("demo_cartpole"))
    assert [answer["names"][name] for name in answer["events"]["name"]] == ["collect"]
    assert answer["lanes"][0]["track"] == "trainer/0"


def test_malformed_events_are_passed_over(view: View):
    path = view.session("demo_sums") / "trace.json"
    lines = path.read_bytes().splitlines(keepends=True)
    bad = [b"{\n", b'{"ph":"X","name":"x","pid":1,"tid":1,"ts":"a","dur":1}\n', b"\xff\n", b'{"name":"x"}\n']
    path.write_bytes(b"".join([*lines[:50], *bad, *lines[50:]]))
    answer = view.get("timeline", run=view.run("demo_sums"))
    assert len(answer["events"]["lane"]) == len(spans_without(path))
    path.write_text("")
    assert view.get("timeline", run=view.run("demo_sums"))["lanes"] == []


def spans_without(path: Path) -> list:
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line.rstrip(b","))
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("ts"), float) and "dur" in row:
            rows.append(row)
    return rows
