"""SQL over runs: the tables have what the files have, nothing else can be read, and nothing written."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import advice_fixtures as fixtures
import pytest
from rollout_groups import group

from palestra.errors import UsageError
from palestra.rollout.records import FILE, RolloutRecord, write
from palestra.runs.run import Run
from palestra.track.sinks import JsonlSink
from palestra.track.trace import Tracer
from palestra.view.query import query

pytest.importorskip("duckdb")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A run of post-training with rollouts and a trace, one of control with two seeds, and one without rows."""
    root = tmp_path_factory.mktemp("it's")  # a quote in the path
    with fixtures.written(root, fixtures.POSTTRAIN) as (session, tracker):
        fixtures.write_rows(session, tracker, {"loss": lambda done: float("nan") if done == 1 else 1.0})
        sink = JsonlSink(session.path / FILE)
        write(sink, *(RolloutRecord(group((1.0, 0.0, 0.5), number), "filtered", number // 2) for number in range(6)))
        sink.close()
        with Tracer(session.path / "trace.json") as tracer:
            for step in range(3):
                with tracer.span("train", step=step), tracer.span("publish", step=step, version=step):
                    pass
    first = Run(session.path.parent.parent)
    trial = None
    for seed in (0, 1):
        with fixtures.written(root, fixtures.CONTROL, seed, (0, 1), trial) as (session, tracker):
            fixtures.write_rows(session, tracker, {}, noise=seed)
        trial = Run(session.path.parent.parent)
    with fixtures.written(root, fixtures.CONTROL) as (session, _):
        pass
    assert trial is not None
    return [first, trial, Run(session.path.parent.parent)]


def ask(sql: str, runs: list[Run]) -> list[tuple[Any, ...]]:
    with query(sql, runs) as result:
        return list(result.rows)


def test_metrics_equal_the_rows_of_the_files(runs: list[Run]):
    with query(
        'SELECT run, seed, step, frame, "ppo/entropy", "eval/return" FROM metrics WHERE frame > 0', runs
    ) as result:
        rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    expected = [
        (row["seed"], row["step"], row["frame"], row["ppo/entropy"], row.get("eval/return"))
        for row in runs[1].metrics()
    ]
    assert sorted((r["seed"], r["step"], r["frame"], r["ppo/entropy"], r["eval/return"]) for r in rows) == sorted(
        expected, key=lambda r: r[:2]
    )
    assert {row["run"] for row in rows} == {f"{runs[1].name}/{runs[1].id}"}


def test_not_a_number_stays_one(runs: list[Run]):
    assert ask("SELECT count(*) FROM metrics WHERE isnan(loss)", runs) == [(1,)]


def test_rollouts_have_a_row_for_each_completion(runs: list[Run]):
    rows = ask(
        "SELECT step, task, count(*), sum(reward), max(length), min(status) FROM rollouts GROUP BY ALL ORDER BY 1", runs
    )
    assert rows == [(step, "sums", 6, 3.0, 3, "correct") for step in range(3)]
    assert ask("SELECT problem, prompt, \"row\"->>'answer' FROM rollouts WHERE number = 3 LIMIT 1", runs) == [
        ("sums/train/3", '"What is 3?"', "3")
    ]


def test_evaluations_have_their_standard_errors(runs: list[Run]):
    rows = ask("SELECT step, error FROM evaluations WHERE metric = 'arithmetic/accuracy' ORDER BY step", runs)
    assert rows == [(step, 0.02) for step in range(10, 61, 10)]


def test_events_have_their_tracks(runs: list[Run]):
    sql = "SELECT name, track, count(*), sum(step), max(args->>'version') FROM events WHERE seconds >= 0"
    assert ask(f"{sql} GROUP BY ALL ORDER BY name", runs) == [
        ("publish", "trainer/0", 3, 3, "2"),
        ("train", "trainer/0", 3, 3, None),
    ]


def test_runs_have_state_and_spec(runs: list[Run]):
    rows = ask("SELECT kind, state, seeds, step, spec->>'$.train.frames' FROM runs ORDER BY kind, seeds", runs)
    assert rows == [
        ("control", "done", 1, None, "100000"),
        ("control", "done", 2, 60, "100000"),
        ("posttrain", "done", 1, 60, None),
    ]


def test_tables_without_files_are_empty(runs: list[Run]):
    for table in ("metrics", "rollouts", "evaluations", "events"):
        assert ask(f"SELECT * FROM {table}", runs[2:]) == []


def test_torn_and_foreign_lines_are_left_out(runs: list[Run], tmp_path: Path):
    with fixtures.written(tmp_path, fixtures.CONTROL) as (session, tracker):
        fixtures.write_rows(session, tracker, {})
    with (session.path / "metrics.jsonl").open("ab") as file:
        file.write(b'[1, 2]\nnull\n"text"\nnot json\n{"step": 61, "ret')
    assert ask("SELECT count(*), max(step) FROM metrics", [Run(session.path.parent.parent)]) == [(60, 60)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM read_csv('{}')",
        "SELECT * FROM glob('/*')",
        "COPY (SELECT 1) TO '{}'",
        "CREATE TABLE mine AS SELECT 1",
        "SET enable_external_access=true",
        "ATTACH '{}' AS other",
        "SELECT 1; SELECT 2",
        "DELETE FROM metrics",
        "",
    ],
)
def test_other_files_and_changes_are_refused(sql: str, runs: list[Run], tmp_path: Path):
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(UsageError):
        ask(sql.format(secret), runs)
    assert secret.read_text() == "a\n1\n"


def test_unknown_column_and_table_are_told_with_what_there_is(runs: list[Run]):
    with pytest.raises(UsageError, match=r'"rewrd" not found(.|\n)*columns of metrics: run, seed, step.*"eval/return"'):
        ask("SELECT rewrd FROM metrics", runs)
    with pytest.raises(UsageError, match="the tables are: runs, metrics, rollouts, evaluations, events"):
        ask("SELECT * FROM steps", runs)


def test_command_prints_table_json_and_csv(runs: list[Run]):
    def command(*options: str) -> str:
        sql = "SELECT seed, max(step) AS last FROM metrics GROUP BY seed ORDER BY seed"
        asked = [sys.executable, "-m", "palestra", "query", sql, str(runs[1].path), *options]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout

    assert [line.split() for line in command().splitlines()] == [["seed", "last"], ["0", "60"], ["1", "60"]]
    assert json.loads(command("--json")) == [{"seed": 0, "last": 60}, {"seed": 1, "last": 60}]
    assert list(csv.reader(io.StringIO(command("--csv")))) == [["seed", "last"], ["0", "60"], ["1", "60"]]
