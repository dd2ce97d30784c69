"""Tracer: a file that parses after a kill, nesting spans, several threads, resumed files."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from palestra.track import trace
from palestra.track.trace import Tracer


def events(path: Path, closing: str = "") -> list[dict]:
    return [event for event in json.loads(path.read_text() + closing) if event["ph"] != "M"]


def test_span_nested_lies_within_outer_with_args(tmp_path):
    with Tracer(tmp_path / "t.json") as tracer, tracer.span("step", number=3), tracer.span("learn"):
        time.sleep(0.002)
    inner, outer = events(tmp_path / "t.json")
    assert (inner["name"], outer["name"], outer["args"]) == ("learn", "step", {"number": 3})
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert 2_000 <= inner["dur"] < 1_000_000  # µs


def test_span_left_by_exception_is_recorded(tmp_path):
    with Tracer(tmp_path / "t.json") as tracer, pytest.raises(KeyError), tracer.span("fails"):
        raise KeyError
    assert [event["name"] for event in events(tmp_path / "t.json")] == ["fails"]


def test_counter_is_written_and_nan_left_out(tmp_path):
    with Tracer(tmp_path / "t.json") as tracer:
        tracer.counter("fps", 5.0)
        tracer.counter("fps", float("nan"))
    (counter,) = events(tmp_path / "t.json")
    assert (counter["ph"], counter["args"]) == ("C", {"value": 5.0})


def test_threads_have_own_named_tracks_and_lose_nothing(tmp_path):
    tracer = Tracer(tmp_path / "t.json")

    def work() -> None:
        for _ in range(500):
            with tracer.span("busy"):
                pass

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close()
    everything = json.loads((tmp_path / "t.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in everything if e["name"] == "thread_name"}
    counts = {name: sum(e["ph"] == "X" and names[e["tid"]] == name for e in everything) for name in names.values()}
    assert counts == {"MainThread": 0, "worker 0": 500, "worker 1": 500, "worker 2": 500, "worker 3": 500}


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
            tracer.counter(f"before {i}", 1.0)
    path.write_text(path.read_text().removesuffix("\n]\n") + ending)
    with Tracer(path, append=True) as tracer:
        tracer.counter("after", 1.0)
    assert [e["name"] for e in events(path)] == ["before 0", "before 1", "before 2", "after"]


@pytest.mark.parametrize("start", ["", "[\n", '[\n{"ph":"M","na'])
def test_append_file_cut_inside_header_starts_anew(tmp_path, start):
    path = tmp_path / "t.json"
    path.write_text(start)
    with Tracer(path, append=True) as tracer:
        tracer.counter("x", 1.0)
    assert [e["name"] for e in events(path)] == ["x"]


def test_memory_more_events_than_may_wait_are_written_by_the_recorder(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "MAX_WAITING", 100)
    monkeypatch.setattr(trace, "WRITE_EVERY", 3600.0)
    with Tracer(tmp_path / "t.json") as tracer:
        for _ in range(1000):
            with tracer.span("x"):
                pass
            assert len(tracer._events) <= 101
    assert len(events(tmp_path / "t.json")) == 1000


def test_disabled_writes_no_file(tmp_path):
    with Tracer(tmp_path / "t.json", enabled=False) as tracer, tracer.span("x"):
        tracer.counter("y", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_warns_once_and_goes_on(caplog):
    with Tracer(Path("/dev/full")) as tracer:
        for _ in range(3):
            tracer.counter("x", 1.0)
            tracer.flush()
    assert [record.message for record in caplog.records] == [
        "no more trace: cannot write /dev/full (No space left on device)"
    ]


def test_overhead_of_a_span_is_measured(tmp_path, record_property):
    with Tracer(tmp_path / "t.json") as tracer:
        start = time.perf_counter()
        for _ in range(20_000):
            with tracer.span("x"):
                pass
        record_property("µs_per_span", (time.perf_counter() - start) / 20_000 * 1e6)
    assert len(events(tmp_path / "t.json")) == 20_000
