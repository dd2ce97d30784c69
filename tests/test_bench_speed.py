"""`palestra bench --hours`: measured speeds, the order of rows, the hours in the table, and a stop in time."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import SHORT

from palestra.bench import run as bench_run
from palestra.bench.results import append, identity, measure, shipped
from palestra.bench.run import plan, run, run_for, unrecorded
from palestra.bench.speed import Missing, cheapest_first, hours_cell, missing, speed_file, write_speeds
from palestra.bench.suites import SUITES, Entry
from palestra.errors import PalestraError

ENTRY = SUITES["classic"].entries[0]
OTHER = replace(ENTRY, spec="other", file="several")


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """A spec in a file of its own, and one in a file of several."""
    folder = tmp_path / "specs"
    folder.mkdir()
    data = {key: value for key, value in SHORT.items() if key != "name"}
    data |= {"train": {"frames": 6 * 128}, "every": {"checkpoint": "2 steps", "eval": None}}
    (folder / f"{ENTRY.spec}.yaml").write_text(yaml.safe_dump(data))
    (folder / "several.yaml").write_text(yaml.safe_dump({"other": data, "more": data}))
    return folder


def rate(root: Path, spec: str, value: float) -> None:
    """Write into the rows of a spec's runs how fast they were."""
    for path in root.glob(f"{spec}/*/sessions/*/metrics.jsonl"):
        rows = [json.loads(line) | {"time/fps": value} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_are_ordered_by_the_hours_that_they_lack_and_unknown_ones_are_last():
    def row(spec: str, frames: int, rate: float | None, seeds: tuple[int, ...] = (1,)) -> Missing:
        return Missing(Entry(spec, 0, "–", 1, 1), seeds, frames, rate)

    rows = [row("unknown", 1, None), row("slow", 7200, 1), row("fast", 7200, 2), row("done", 0, 5, ()), row("b", 9, 3)]
    ordered = cheapest_first(rows)
    assert [each.entry.spec for each in ordered] == ["b", "fast", "slow", "unknown"]
    assert [each.hours for each in ordered][1:] == [1.0, 2.0, math.inf]


def test_hours_bench_runs_all_that_fits_and_measures_what_is_left(specs, tmp_path):
    root, out, told = tmp_path / "runs", tmp_path / "benchmarks.md", []
    assert missing(ENTRY, [1, 2], specs, root) == Missing(ENTRY, (1, 2), 2 * 768, None)
    run_for(0.2, {ENTRY: [1], OTHER: [1]}, specs, root, 2, told.append, None)
    assert told[0] == "measuring ppo_cartpole, other"
    assert {"ppo_cartpole seed 1: done", "other seed 1: done"} <= {line.partition(" (")[0] for line in told}
    for entry, value in ((ENTRY, 64.0), (OTHER, 32.0)):
        rate(root, entry.spec, value)
        assert missing(entry, [1], specs, root).seeds == ()
        assert missing(entry, [1, 2], specs, root) == Missing(entry, (2,), 768, value)
    write_speeds(out, [ENTRY, OTHER], specs, root)
    speeds, spec = json.loads(speed_file(out).read_text()), shipped(specs, OTHER)
    assert spec is not None
    assert spec.name == "other"
    assert speeds[identity(spec)]["frames_per_s"] == 32
    cell = hours_cell(OTHER, spec, OTHER.seeds[:4], speeds)  # 6 of 10 seeds
    assert cell.startswith(f"{6 * 768 / 32 / 3600:.2g} (6 seeds at 32 frames/s, ")
    assert hours_cell(OTHER, spec, OTHER.seeds, speeds) == "–"
    assert hours_cell(OTHER, spec, (), {}) == "not measured"
    (status,) = root.glob("other/*/sessions/1/status.json")  # of a seed that was begun only the rest is missing
    data = json.loads(status.read_text())
    status.write_text(json.dumps(data | {"state": "interrupted", "progress": {"frame": 512}}))
    assert missing(OTHER, [1], specs, root) == Missing(OTHER, (1,), 256, 32.0)


def test_hours_bench_measures_a_row_that_logged_nothing_again_and_for_twice_as_long(specs, tmp_path, monkeypatch):
    asked, real = [], bench_run._run

    def noted(items, root, parallel, tell, on, seconds):
        asked.extend((item.name, round(seconds)) for item in items)
        if len(asked) == 1:
            return {}  # as if stopped before anything was logged
        return real(items, root, parallel, tell, on, seconds)

    monkeypatch.setattr(bench_run, "_run", noted)
    run_for(1, {OTHER: [1], ENTRY: [1]}, specs, tmp_path / "runs", 1, lambda line: None, None)
    assert asked == [("other seed 1", 90), ("ppo_cartpole seed 1", 90), ("other seed 1", 180)]


def test_hours_bench_leaves_out_what_the_table_has_of_this_version_of_the_spec(specs, tmp_path):
    root, out, told = tmp_path / "runs", tmp_path / "benchmarks.md", []
    assert unrecorded([ENTRY, OTHER], [1, 2], specs, None) == {ENTRY: (1, 2), OTHER: (1, 2)}
    run(plan([ENTRY], [100], specs, root, told.append), root, 1, told.append)
    (record,) = measure(ENTRY, specs, root, [100])
    append(out.with_suffix(".jsonl"), [replace(record, commit="c0ffee")], told.append)
    assert unrecorded([ENTRY, OTHER], [100, 101], specs, out) == {ENTRY: (101,), OTHER: (100, 101)}
    text = (specs / f"{ENTRY.spec}.yaml").read_text().replace("frames: 768", "frames: 896")
    (specs / f"{ENTRY.spec}.yaml").write_text(text)
    assert unrecorded([ENTRY], None, specs, out) == {ENTRY: ENTRY.seeds}


def test_hours_bench_without_time_stops_what_it_began_and_says_so(specs, tmp_path):
    spec = specs / f"{ENTRY.spec}.yaml"
    spec.write_text(yaml.safe_dump(yaml.safe_load(spec.read_text()) | {"train": {"frames": 10_000_000}}))
    told: list[str] = []
    run_for(0.0, {ENTRY: [1, 2]}, specs, tmp_path / "runs", 1, told.append, None)
    assert "stopping: runs save their state" in told
    assert not any(": done" in line for line in told)
    assert missing(ENTRY, [1, 2], specs, tmp_path / "runs").seeds == (1, 2)


def test_hours_bench_a_row_that_cannot_run_is_named_and_the_others_run(specs, tmp_path):
    text = (specs / "several.yaml").read_text().replace("CartPole-v1", "NoSuch-v1")
    (specs / "several.yaml").write_text(text)
    told: list[str] = []
    with pytest.raises(PalestraError, match=r"(?s)other seed 1: .*NoSuch-v1"):
        run_for(0.2, {ENTRY: [1], OTHER: [1]}, specs, tmp_path / "runs", 2, told.append, None)
    assert any(line.startswith("ppo_cartpole seed 1: done") for line in told)
    (line,) = [line for line in told if line.startswith("other seed 1: failed")]  # and is not tried again
    assert "NoSuch" in line
