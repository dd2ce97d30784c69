"""Tracker and sinks: rows on disk at once, services in the background that cannot hurt the run."""

import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import SHORT

from palestra.errors import MissingExtra, PalestraError
from palestra.runs.recorder import Recorder
from palestra.runs.session import Session
from palestra.spec.load import resolved
from palestra.track import sinks
from palestra.track.sinks import Background, JsonlSink, Sink, SinkPlace, Tracker


def session(tmp_path: Path) -> Path:
    folder = tmp_path / "cartpole" / "20261115T033000-a1b2" / "sessions" / "0"
    folder.mkdir(parents=True)
    return folder


def tracker(folder: Path, names: list[str], **more) -> Tracker:
    config = {"algorithm": {"lr": 1e-3}}
    return Tracker(SinkPlace(folder, "tests", "cartpole", "a1b2-0", config, **more), names)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_row_is_in_the_file_at_once_in_order(tmp_path):
    with tracker(tmp_path, []) as track:
        track.log({"loss": 2.0, "return": np.float32(1.5)}, step=1, frame=64)
        assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "frame": 64, "loss": 2.0, "return": 1.5}]
        track.log({}, step=2)
        assert rows(tmp_path / "metrics.jsonl")[1] == {"step": 2}
        assert list(rows(tmp_path / "metrics.jsonl")[0]) == ["step", "frame", "loss", "return"]


def test_jsonl_non_finite_numbers_come_back(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write({"a": math.nan, "b": -math.inf, "c": 0.1 + 0.2, "d": 2**70})
    sink.close()
    (row,) = rows(tmp_path / "m.jsonl")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"], row["d"]) == (-math.inf, 0.1 + 0.2, 2**70)


def test_jsonl_append_cuts_torn_line_and_continues(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    sink = JsonlSink(path, append=True)
    sink.write({"step": 3})
    sink.close()
    assert rows(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_jsonl_new_file_replaces_old(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n')
    JsonlSink(path).close()
    assert path.read_text() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_jsonl_full_disk_raises_error_naming_the_file():
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(PalestraError, match="Cannot write /dev/full: No space left on device"):
        sink.write({"step": 1})


def test_jsonl_process_killed_keeps_every_logged_row(tmp_path):
    code = f"""
from pathlib import Path
from palestra.track.sinks import SinkPlace, Tracker
track = Tracker(SinkPlace(Path({str(tmp_path)!r}), "p", "n", "i", {{}}))
for step in range(10**9):
    track.log({{"x": step / 3}}, step)
    print(step, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(50):
        seen = process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    written = rows(tmp_path / "metrics.jsonl")
    assert len(written) > int(seen)
    assert written == [{"step": i, "x": i / 3} for i in range(len(written))]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_rows_read_back_and_resume_replaces_steps_after_the_checkpoint(tmp_path):
    pytest.importorskip("tensorboard")
    with tracker(tmp_path, ["tensorboard"]) as track:
        for step in range(1, 6):
            track.log({"return": step * 10.0, "note": "not a number"}, step=step, frame=step * 64)
    time.sleep(1.1)  # TensorBoard orders event files by the second in their names
    with tracker(tmp_path, ["tensorboard"], append=True) as track:
        for step in range(3, 5):
            track.log({"return": step * 100.0}, step=step, frame=step * 64)
    read = scalars(tmp_path / "tensorboard")
    assert read["return"] == [(1, 10.0), (2, 20.0), (3, 300.0), (4, 400.0)]
    assert read["frame"] == [(1, 64.0), (2, 128.0), (3, 192.0), (4, 256.0)]
    assert set(read) == {"return", "frame"}


TABLE = [
    {"step": 3, "prompt": "1+1=", "completion": "```\n2\n\n| a | b |\n<script>", "reward": 1.0, "status": "correct"},
    {"step": 3, "prompt": "2+2=", "completion": "x" * 9000, "reward": 0.0, "status": "wrong"},
]


def test_tensorboard_table_reads_back_as_texts_that_are_no_markdown(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    with tracker(tmp_path, ["tensorboard"]) as track:
        track.table("completions/rollouts", [*TABLE, TABLE[0] | {"prompt": "the key is very-secret-value"}], step=3)
        track.table("completions/eval", [], step=3)
        track.log({"return": 1.0}, step=3)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert accumulator.Tags()["tensors"] == ["completions/rollouts"]
    assert accumulator.SummaryMetadata("completions/rollouts").plugin_data.plugin_name == "text"
    (event,) = accumulator.Tensors("completions/rollouts")
    cells = make_ndarray(event.tensor_proto)
    assert event.step == 3
    assert [cell.decode() for cell in cells[0]] == list(TABLE[0])
    assert cells[1, 2].decode() == "    ```\n    2\n    \n    | a | b |\n    <script>"
    assert len(cells[2, 2]) < 8100
    assert cells[3, 1].decode() == "    the key is (redacted)"
    page = text_array_to_html(cells, enable_markdown=True)
    assert "&lt;script&gt;" in page
    assert "<th>a</th>" not in page
    assert scalars(tmp_path / "tensorboard")["return"] == [(3, 1.0)]


def test_tensorboard_table_first_after_a_resume_drops_what_the_killed_run_wrote(tmp_path):
    pytest.importorskip("tensorboard")
    with tracker(tmp_path, ["tensorboard"]) as track:
        for step in range(1, 6):
            track.log({"return": step * 10.0}, step=step)
    time.sleep(1.1)  # TensorBoard orders event files by the second in their names
    with tracker(tmp_path, ["tensorboard"], append=True) as track:
        track.table("completions/eval", TABLE, step=3)
    assert scalars(tmp_path / "tensorboard")["return"] == [(1, 10.0), (2, 20.0)]


def test_tensorboard_sink_imports_neither_torch_nor_tensorflow(tmp_path):
    pytest.importorskip("tensorboard")
    code = f"""
import sys
from pathlib import Path
from palestra.track.sinks import SinkPlace, Tracker
with Tracker(SinkPlace(Path({str(tmp_path)!r}), "p", "n", "i", {{}}), ["tensorboard"]) as track:
    track.log({{"x": 1.0}}, 1)
assert not {{"torch", "tensorflow"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert scalars(tmp_path / "tensorboard") == {"x": [(1, 1.0)]}


def test_wandb_offline_run_holds_rows_and_config(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = session(tmp_path)
    with tracker(folder, ["wandb"]) as track:
        track.log({"return": 12.5}, step=1, frame=64)
    (run,) = folder.glob("wandb/offline-run-*-a1b2-0/run-*.wandb")
    data = run.read_bytes()
    assert b"return" in data
    assert b"12.5" in data
    assert b"algorithm" in data


def test_wandb_offline_run_holds_tables(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = session(tmp_path)
    with tracker(folder, ["wandb"]) as track:
        track.table("completions/eval", TABLE, step=3)
        track.log({"return": 12.5}, step=3)
    (path,) = folder.glob("wandb/offline-run-*/files/media/table/completions/eval_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == list(TABLE[0])
    assert table["data"][0] == list(TABLE[0].values())


def test_swanlab_offline_run_holds_rows(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    folder = session(tmp_path)
    for append in (False, True):
        with tracker(folder, ["swanlab"], append=append) as track:
            track.log({"return": 12.5}, step=1, frame=64)
    files = list(folder.glob("swanlab/run-*/run-*.swanlab"))
    assert files
    assert all(b"return" in file.read_bytes() for file in files)


def test_swanlab_offline_run_holds_tables(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    folder = session(tmp_path)
    with tracker(folder, ["swanlab"]) as track:
        track.table("completions/eval", TABLE, step=3)
    held = b"".join(path.read_bytes() for path in folder.glob("swanlab/run-*/**/*") if path.is_file())
    assert b"completions/eval" in held
    assert b"1+1=" in held


def test_trackio_rows_are_in_its_database(tmp_path):
    pytest.importorskip("trackio")
    folder = session(tmp_path)
    code = f"""
from pathlib import Path
from palestra.track.sinks import SinkPlace, Tracker
for append in (False, True):
    with Tracker(SinkPlace(Path({str(folder)!r}), "tests", "n", "a1b2-0", {{}}, append), ["trackio"]) as track:
        track.log({{"return": 12.5}}, step=1 + append, frame=64)
        track.table("completions/eval", {TABLE!r}, step=1 + append)
import trackio
(run,) = trackio.Api().runs("tests")
print(run.name)
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "a1b2-0"
    held = b"".join(path.read_bytes() for path in (tmp_path / "trackio").rglob("*") if path.is_file())
    assert b'"_type":"trackio.table"' in held.replace(b" ", b"")
    assert b"1+1=" in held


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_sink_package_not_installed_names_the_extra_before_anything_is_written(tmp_path, name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(MissingExtra, match=rf"palestra\[{name}\]"):
        tracker(tmp_path, [name])
    assert list(tmp_path.iterdir()) == []


class Failing(Sink):
    """A service that breaks at the chosen moment."""

    def __init__(self, when: str) -> None:
        self.when, self.taken = when, []

    def open(self) -> None:
        self._maybe("open")

    def write(self, row: dict[str, float], step: int) -> None:
        self._maybe("write")
        self.taken.append((row, step))

    def close(self) -> None:
        self._maybe("close")

    def _maybe(self, now: str) -> None:
        if now == self.when:
            raise ConnectionError("no route to host")


@pytest.mark.parametrize("when", ["open", "write", "close"])
def test_background_failing_sink_warns_once_and_never_raises(caplog, when):
    background = Background(Failing(when))
    for step in range(2000):
        background.write({"x": 1.0}, step)
    background.close()
    (warning,) = [r.message for r in caplog.records if r.name == "palestra.track" and "failed" in r.message]
    assert warning == "Failing failed and gets no more rows: ConnectionError: no route to host"


class Stuck(Failing):
    """A service that answers only when it is let go."""

    def __init__(self) -> None:
        super().__init__("never")
        self.go = threading.Event()

    def write(self, row: dict[str, float], step: int) -> None:
        self.go.wait()
        super().write(row, step)


def test_background_stuck_sink_neither_blocks_nor_grows_nor_holds_the_end(caplog, monkeypatch):
    monkeypatch.setattr(sinks, "WAITING_ROWS", 10)
    sink = Stuck()
    background = Background(sink)
    for step in range(10_000):
        background.write({"x": 1.0}, step)
    background.close(seconds=0.2)
    messages = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 2
    assert "too slow" in messages[0]
    assert "left behind" in messages[1]
    sink.go.set()


def test_background_close_drains_what_waits():
    sink = Failing("never")
    background = Background(sink)
    for step in range(500):
        background.write({"x": float(step)}, step)
    background.close()
    assert sink.taken == [({"x": float(step)}, step) for step in range(500)]


class Telling(Failing):
    """A service that notes by which id it was asked to open a run."""

    opened: tuple[str, ...] = ()

    def __init__(self, place: SinkPlace) -> None:
        super().__init__("never")
        self.place = place

    def open(self) -> None:
        Telling.opened = (*Telling.opened, self.place.id)


def test_services_get_an_id_that_is_the_sessions_alone_and_stays_over_a_resume_and_a_move(tmp_path, monkeypatch):
    monkeypatch.setitem(sinks.SINKS, "json", Telling)  # the name of a package that is there
    spec = resolved(SHORT)
    spec = spec.model_copy(update={"track": spec.track.model_copy(update={"sinks": ["json"]})})

    def opened(folder: Path) -> str:
        with Session.open(folder) as session, Recorder(session, spec, total=1, unit="frames", show=False):
            pass
        return Telling.opened[-1]

    places = [tmp_path / root / "lr0.5-a1b2" / "sessions" / "0" for root in ("one", "two")]
    for place in places:
        Session.create(place, spec_yaml="", spec_data={}, manifest={"seed": 0})
    first, second = map(opened, places)
    assert first != second
    assert first.startswith("lr0.5-a1b2-0-")
    Session.open(places[0]).amend(spec_yaml="", spec_data={"x": 1}, manifest={"seed": 0})
    (tmp_path / "one").rename(tmp_path / "three")
    assert opened(tmp_path / "three" / "lr0.5-a1b2" / "sessions" / "0") == first
    long = Session.create(tmp_path / ("x" * 64) / "sessions" / "123456", spec_yaml="", spec_data={}, manifest={})
    assert len(long.id) <= 64
