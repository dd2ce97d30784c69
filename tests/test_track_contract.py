"""The contract of a trace, the same for every tracer: what an event carries, tracks, one file per process, kills.

Another tracer is one more line of `TRACERS`.
"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SHORT
from test_runs_session import create

from palestra.runs.recorder import Recorder
from palestra.spec.load import resolved
from palestra.track.trace import NAMES, Tracer, read_traces

TRACERS: dict[str, Callable[..., Tracer]] = {"file": Tracer}

# What a process of its own does: spans until it is killed, or to their end.
PROCESS = """
import sys, time
from pathlib import Path
import test_track_contract
path, track, spans = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
tracer = test_track_contract.TRACERS[sys.argv[4]](path, track=track)
for step in range(spans):
    with tracer.span("train", step=step):
        time.sleep(0.001)
tracer.flush()
print("written", flush=True)
sys.stdin.read()
tracer.close()
"""


@pytest.fixture(params=TRACERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str) -> Callable[..., Tracer]:
    return TRACERS[kind]


def started(kind: str, path: Path, track: str, spans: int) -> subprocess.Popen:
    command = [sys.executable, "-c", PROCESS, str(path), track, str(spans), kind]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=Path(__file__).parent, **pipes)


def test_event_has_name_track_times_in_ns_and_its_numbers(make, tmp_path):
    before = time.time_ns()
    numbers = {"step": 7, "version": 8, "group": 2, "tokens": 64}
    with make(tmp_path / "t.json", track="generator/3") as tracer, tracer.span("publish", **numbers):
        time.sleep(0.002)
    after = time.time_ns()
    (event,) = read_traces(tmp_path / "t.json")
    assert (event.name, event.track) == ("publish", "generator/3")
    assert event.args == numbers
    assert 2_000_000 <= event.duration <= after - before
    # The wall clock may be adjusted while the span is timed by a monotonic one.
    assert before - 1_000_000_000 < event.start < after + 1_000_000_000


def test_spans_nest_and_one_left_by_an_exception_is_recorded(make, tmp_path):
    with make(tmp_path / "t.json") as tracer, pytest.raises(KeyError), tracer.span("rollout"), tracer.span("train"):
        raise KeyError
    outer, inner = read_traces(tmp_path / "t.json")
    assert (outer.name, inner.name, outer.args) == ("rollout", "train", {})
    assert outer.start <= inner.start
    assert inner.start + inner.duration <= outer.start + outer.duration


def test_threads_have_tracks_by_their_names_and_lose_nothing(make, tmp_path):
    tracer = make(tmp_path / "t.json", track="trainer/1")

    def work() -> None:
        for _ in range(300):
            with tracer.span("learn"):
                pass

    threads = [threading.Thread(target=work, name=f"verifier/{i}") for i in range(3)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    tracer.close()
    tracks = [event.track for event in read_traces(tmp_path / "t.json")]
    assert {track: tracks.count(track) for track in tracks} == {
        "trainer/1": 300, "verifier/0": 300, "verifier/1": 300, "verifier/2": 300
    }  # fmt: skip


def test_files_of_several_processes_are_merged_by_time(kind, tmp_path):
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    processes = [started(kind, path, f"trainer/{rank}", 30) for rank, path in enumerate(paths)]
    for process in processes:
        process.communicate()
    events = read_traces(*paths)
    assert [event.start for event in events] == sorted(event.start for event in events)
    for rank in range(2):
        assert [e.args["step"] for e in events if e.track == f"trainer/{rank}"] == list(range(30))


def test_killed_process_leaves_what_it_wrote_and_a_resumed_one_continues_in_time(kind, make, tmp_path):
    path = tmp_path / "t.json"
    process = started(kind, path, "trainer/0", 20)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    assert [event.args["step"] for event in read_traces(path)] == list(range(20))
    with make(path, append=True) as tracer, tracer.span("checkpoint", step=20):
        pass
    events = read_traces(path)
    assert [event.args["step"] for event in events] == list(range(21))
    assert events[-1].start >= events[-2].start + events[-2].duration


def test_disabled_tracer_writes_nothing(make, tmp_path):
    with make(tmp_path / "t.json", enabled=False) as tracer, tracer.span("train"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_names_are_a_fixed_list():
    sources = Path(__file__).parent.parent.joinpath("palestra").rglob("*.py")
    used = {name for path in sources for name in re.findall(r"\bspan\(\"(\w+)\"", path.read_text())}
    assert used == NAMES


def test_spans_of_a_run_have_the_step_and_the_trainers_track(tmp_path):
    about = {"total": 1, "unit": "frames", "show": False}
    with create(tmp_path / "sessions" / "0") as session, Recorder(session, resolved(SHORT), **about) as record:
        record.step = 3
        with record.span("learn"), record.span("publish", version=4):
            pass
    learn, publish = read_traces(session.path / "trace.json")
    assert (learn.name, learn.track, learn.args) == ("learn", "trainer/0", {"step": 3})
    assert publish.args == {"step": 3, "version": 4}
