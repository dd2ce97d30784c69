"""The trace file: it parses after a kill, survives torn ends and a full disk."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from palestra.track.trace import Tracer, read_traces, span


def record(tracer: Tracer, name: str) -> None:
    with tracer.span(name):
        pass


def events(path: Path, closing: str = "") -> list[dict]:
    return [event for event in json.loads(path.read_text() + closing) if event["ph"] != "M"]


def test_file_process_killed_parses_with_bracket_and_continues_in_order(tmp_path):
    path = tmp_path / "t.json"
    code = f"""
import sys, time
from palestra.track.trace import Tracer
tracer = Tracer({str(path)!r})
for i in range(100000):
    with tracer.span("step", i=i):
        pass
    if i == 3000:
        tracer.flush()
        print("written", flush=True)
    if i > 3000:
        time.sleep(0.001)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    before = events(path, closing="]")
    assert [e["args"]["i"] for e in before[:3001]] == list(range(3001))

    with Tracer(path, append=True) as tracer, tracer.span("resumed"):
        pass
    after = events(path)
    assert after[:-1] == before
    assert after[-1]["name"] == "resumed"
    assert after[-1]["ts"] > before[-1]["ts"] + before[-1]["dur"]


@pytest.mark.parametrize("ending", ["", "\n]\n", "\n]", "\n", ',\n{"ph":"X","na', ',\n{"ph":"X","args":{"a":[1]', ","])
def test_append_any_torn_ending_keeps_whole_events(tmp_path, ending):
    path = tmp_path / "t.json"
    with Tracer(path) as tracer:
        for i in range(3):
            record(tracer, f"before {i}")
    path.write_text(path.read_text().removesuffix("\n]\n") + ending)
    with Tracer(path, append=True) as tracer:
        record(tracer, "after")
    assert [e["name"] for e in events(path)] == ["before 0", "before 1", "before 2", "after"]


@pytest.mark.parametrize("start", ["", "[\n", '[\n{"ph":"M","na'])
def test_append_file_cut_inside_header_starts_anew(tmp_path, start):
    path = tmp_path / "t.json"
    path.write_text(start)
    with Tracer(path, append=True) as tracer:
        record(tracer, "x")
    assert [e["name"] for e in events(path)] == ["x"]


def test_events_are_written_when_they_have_waited_long_enough(tmp_path, monkeypatch):
    path, tracer = tmp_path / "t.json", Tracer(tmp_path / "t.json")
    record(tracer, "waits")
    assert events(path, closing="]") == []
    monkeypatch.setattr(tracer, "_due", 0.0)
    record(tracer, "writes")
    assert [e["name"] for e in events(path, closing="]")] == ["waits", "writes"]
    tracer.close()


def test_disabled_writes_no_file(tmp_path):
    with Tracer(tmp_path / "t.json", enabled=False) as tracer, tracer.span("x"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_warns_once_and_goes_on(caplog):
    with Tracer(Path("/dev/full")) as tracer:
        for _ in range(3):
            record(tracer, "x")
            tracer.flush()
    assert [record.message for record in caplog.records] == [
        "no more trace: cannot write /dev/full (No space left on device)"
    ]


def test_spans_of_a_named_track_that_overlap_are_on_lanes_of_their_own(tmp_path):
    path = tmp_path / "t.json"
    with Tracer(path, track="generator/3"), ExitStack() as first:
        first.enter_context(span("sample", role="generator", group=1))
        with span("sample", role="generator", group=2) as about:
            about["tokens"] = 7
        with span("fetch", track="sync", version=4), span("verify", role="verifier"):
            pass
    found = {event.name + str(event.args.get("group", "")): event for event in read_traces(path)}
    assert {name: event.track for name, event in found.items()} == {
        "sample1": "generator/3", "sample2": "generator/3", "fetch": "sync", "verify": "verifier/0",
    }  # fmt: skip
    assert found["sample2"].args == {"group": 2, "tokens": 7}
    assert found["fetch"].args == {"by": "generator/3", "version": 4}
    lanes = [event["tid"] for event in events(path) if event["name"] == "sample"]
    assert len(set(lanes)) == 2


def test_spans_one_after_another_share_a_lane_and_nothing_is_recorded_once_it_is_closed(tmp_path):
    path = tmp_path / "t.json"
    with Tracer(path):
        for _ in range(5):
            with span("verify", role="verifier"):
                pass
    with span("verify", role="verifier"):
        pass
    assert len({event["tid"] for event in events(path)}) == 1
    assert len(events(path)) == 5


def test_overhead_of_a_span_is_measured(tmp_path, record_property):
    with Tracer(tmp_path / "t.json") as tracer:
        start = time.perf_counter()
        for _ in range(20_000):
            with tracer.span("x"):
                pass
        record_property("µs_per_span", (time.perf_counter() - start) / 20_000 * 1e6)
    assert len(events(tmp_path / "t.json")) == 20_000
