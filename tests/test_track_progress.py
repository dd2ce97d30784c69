"""Progress: a live line on a real terminal, plain lines at growing intervals elsewhere, silence when quiet."""

import contextlib
import io
import itertools
import os
import pty
import re
import sys
import threading
import time

import pytest

from palestra.track import progress
from palestra.track.progress import Progress


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock)
    return clock


def on_terminal(show, columns: int = 110) -> str:
    """What `show(stream)` writes to a real terminal of that width."""
    leader, follower = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # Linux ends a closed terminal with EIO
                return
            if not chunk:
                return
            chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    os.environ["COLUMNS"] = str(columns)
    try:
        with open(follower, "w") as stream:
            show(stream)
    finally:
        del os.environ["COLUMNS"]
        reader.join()
        os.close(leader)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(chunks).decode())


def test_plain_lines_first_after_two_seconds_then_at_growing_intervals(clock):
    stream, seen = io.StringIO(), []
    shown = Progress(total=2_000_000, name="cartpole", stream=stream)
    for second in range(400):
        lines = stream.getvalue().count("\n")
        shown.update(second * 1000, "return 12.5")
        if stream.getvalue().count("\n") > lines:
            seen.append(second)
        clock.now += 1
    assert seen[:4] == [2, 12, 27, 50]
    gaps = [b - a for a, b in itertools.pairwise(seen)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 60
    assert stream.getvalue().splitlines()[1] == (
        "cartpole: 12,000/2,000,000 frames (1%), return 12.5, 1k frames/s, 33:08 left"
    )


def test_plain_close_shows_last_state(clock):
    stream = io.StringIO()
    with Progress(total=100, name="x", unit="steps", stream=stream) as shown:
        shown.update(0)
        clock.now += 0.5
        shown.update(100, "return 500")
    assert stream.getvalue() == "x: 100/100 steps (100%), return 500, 200 steps/s\n"


def test_rate_resumed_run_counts_only_what_it_did_itself(clock):
    stream = io.StringIO()
    with Progress(total=2000, name="x", stream=stream) as shown:
        shown.update(1000)
        clock.now += 1
        shown.update(1010)
    assert "10 frames/s, 1:39 left" in stream.getvalue()


def test_rows_parallel_seeds_each_have_a_line(clock):
    stream = io.StringIO()
    shown = Progress(total=100, name="trial", stream=stream)
    for seed in range(3):
        shown.update(10 * seed, f"return {seed}", row=f"seed {seed}")
    shown.close()
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == [
        "seed 0: 0/100 frames (0%)",
        "seed 1: 10/100 frames (10%)",
        "seed 2: 20/100 frames (20%)",
    ]
    assert list(shown.rows) == ["seed 0", "seed 1", "seed 2"]


def test_quiet_writes_nothing():
    stream = io.StringIO()
    with Progress(total=10, stream=stream, enabled=False) as shown:
        shown.update(5)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("columns", [80, 110])
def test_terminal_live_line_fits(monkeypatch, columns):
    monkeypatch.setattr(progress, "LIVE_EVERY", 0.0)
    monkeypatch.setenv("TERM", "xterm")

    def show(stream) -> None:
        with Progress(total=200_000, name="ppo_cartpole", stream=stream) as shown:
            shown.update(0)
            time.sleep(0.05)
            shown.update(100_000, "return 312.4")
            shown.update(200_000, "return 500.0")

    text = on_terminal(show, columns)
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert all(len(line) <= columns for line in lines)
    assert "ppo_cartpole" in lines[-1]
    assert "200,000/200,000 frames" in lines[-1]
    assert "return 500.0" in lines[-1]
    assert "frames/s" in lines[-1]
    assert any("left" in line for line in lines)


def test_terminal_that_cannot_draw_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")

    def show(stream) -> None:
        with Progress(total=10, name="x", stream=stream) as shown:
            shown.update(10)

    assert on_terminal(show).splitlines() == ["x: 10/10 frames (100%)"]


def test_update_not_due_is_measured_and_draws_nothing(record_property):
    stream = io.StringIO()
    shown = Progress(total=10**9, stream=stream)
    start = time.perf_counter()
    for done in range(20_000):
        shown.update(done, "return 1")
    record_property("µs_per_update", (time.perf_counter() - start) / 20_000 * 1e6)
    assert stream.getvalue() == ""
    assert shown.rows[""].done == 19_999


def test_rate_of_a_row_that_is_done_stays_while_others_go_on():
    progress = Progress(100, stream=io.StringIO())
    progress.update(0, row="a")
    time.sleep(0.02)
    progress.update(100, row="a")
    rate = progress.rows["a"].rate()
    time.sleep(0.05)
    progress.update(100, row="a")
    assert progress.rows["a"].rate() == rate


@pytest.mark.parametrize("terminal", [False, True])
def test_reader_that_goes_away_ends_the_lines_not_the_run(clock, terminal: bool):
    leader, follower = pty.openpty() if terminal else os.pipe()
    stream, standard = open(follower, "w"), (sys.stdout, sys.stderr)  # noqa: SIM115  closing it may fail
    shown = Progress(100, stream=stream)
    os.close(leader)
    for done in range(10):
        clock.now += 60.0
        shown.update(done)
    assert terminal or shown.rows[""].done == 0  # the first line was the last
    shown.close()
    assert (sys.stdout, sys.stderr) == standard  # not those of a live line
    with contextlib.suppress(OSError):
        stream.close()
