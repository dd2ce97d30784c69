"""Advice: each rule fires on a run that is broken for it and not on one near to it; nothing is latched."""

import json
import subprocess
import sys
from pathlib import Path

import advice_fixtures as fixtures
import pytest

from palestra.runs.run import Run
from palestra.view.advice import ENDS, RULES, advise


def fired(run: Run) -> list[str]:
    return [one.rule for one in advise(run)]


def doctor(run: Run, *options: str) -> str:
    command = [sys.executable, "-m", "palestra", "doctor", str(run.path), *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_every_rule_has_a_broken_run():
    assert {*fixtures.CASES, "failed", "stalled", "odd_seed"} == set(RULES)


@pytest.mark.parametrize("rule", fixtures.CASES)
def test_rule_fires_on_broken_run_with_numbers(rule: str, tmp_path: Path):
    run = fixtures.write_case(tmp_path, rule, broken=True)
    (advice,) = [one for one in advise(run) if one.rule == rule]
    assert advice.step == fixtures.ROWS
    assert any(letter.isdigit() for letter in advice.text)
    assert "nan" not in advice.text
    assert "{" not in advice.text.replace("{anchor", "")


@pytest.mark.parametrize("rule", fixtures.CASES)
@pytest.mark.parametrize("noise", [1, 2])
def test_no_rule_fires_on_run_near_the_limit(rule: str, noise: int, tmp_path: Path):
    assert fired(fixtures.write_case(tmp_path, rule, broken=False, noise=noise)) == []


def test_loss_that_does_not_fall_is_told_and_one_that_diverged_is_no_guess(tmp_path: Path):
    for loss, expected in ((3.0, ["no_progress"]), (9.0, ["no_progress"])):
        with fixtures.written(tmp_path, fixtures.PRETRAIN) as (session, tracker):
            fixtures.write_rows(
                session, tracker, {"loss": lambda done, loss=loss: loss + round(60 * done) * 7 % 5 / 50}
            )
        assert fired(Run(session.path.parent.parent)) == expected


def test_seed_unlike_the_others_is_named(tmp_path: Path):
    (advice,) = advise(fixtures.write_seeds(tmp_path, broken=True))
    assert advice.rule == "odd_seed"
    assert advice.text.startswith("seed 3: its return is")
    assert fired(fixtures.write_seeds(tmp_path, broken=False)) == []


def test_stalled_run_is_told_while_it_runs(tmp_path: Path):
    with fixtures.running(tmp_path, broken=True) as run:
        assert fired(run) == ["stalled"]
    with fixtures.running(tmp_path, broken=False) as run:
        assert fired(run) == []


def test_failed_run_shows_its_error_first_with_the_remedy(tmp_path: Path):
    run = fixtures.write_failed(tmp_path, broken=True)
    first = doctor(run).splitlines()
    assert first[0].startswith(f"{run.name}/{run.id}: failed, step 60")
    assert first[2] == "alarm: The run failed (failed)"
    assert "PalestraError: the model is gone" in first[3]
    assert f"palestra train --resume {run.path}" in first[3]
    assert fired(fixtures.write_failed(tmp_path, broken=False)) == []


def test_killed_run_is_told_as_json(tmp_path: Path):
    (advice,) = json.loads(doctor(fixtures.write_killed(tmp_path), "--json"))
    assert (advice["rule"], advice["level"], advice["step"]) == ("failed", "alarm", 60)
    assert "ended without a word" in advice["text"]


def test_tuning_is_left_out_of_a_run_with_alarms(tmp_path: Path):
    cases = fixtures.CASES
    with fixtures.written(tmp_path, fixtures.POSTTRAIN) as (session, tracker):
        fixtures.write_rows(session, tracker, {**cases["truncation"].broken, **cases["mismatch"].broken})
    assert fired(Run(session.path.parent.parent)) == ["mismatch"]


def test_tuning_is_told_of_a_run_that_does_not_learn(tmp_path: Path):
    flat = {"reward": lambda done: 0.3 + round(60 * done) * 7 % 5 / 50}
    with fixtures.written(tmp_path, fixtures.POSTTRAIN) as (session, tracker):
        fixtures.write_rows(session, tracker, {**fixtures.CASES["truncation"].broken, **flat})
    assert fired(Run(session.path.parent.parent)) == ["no_progress", "truncation"]


def test_alarm_ends_when_the_cause_is_mended_and_the_run_resumed(tmp_path: Path):
    broken = fixtures.CASES["mismatch"].broken
    with fixtures.written(tmp_path, fixtures.POSTTRAIN) as (session, tracker):
        fixtures.write_rows(session, tracker, broken)
        session.checkpoint(60, {}, reasons={"temporary"})
    trial = Run(session.path.parent.parent)
    assert fired(trial) == ["mismatch"]
    with fixtures.written(tmp_path, fixtures.POSTTRAIN, trial=trial) as (session, tracker):
        fixtures.write_rows(session, tracker, {}, first=61, rows=30)
    assert fired(trial) == []


def test_one_bad_row_is_noise(tmp_path: Path):
    last = {"mismatch": 5.0, "grad_norm": 100.0, "kl_reference": 9.0, "entropy": 0.0, "loss": 50.0, "reward": -3.0}
    changes = {name: lambda done, value=value: value if done == 1 else 0.2 for name, value in last.items()}
    changes["reward"] = lambda done: -3.0 if done == 1 else done
    changes["mismatch"] = lambda done: 5.0 if done == 1 else 2e-4
    with fixtures.written(tmp_path, fixtures.POSTTRAIN) as (session, tracker):
        fixtures.write_rows(session, tracker, changes)
    assert fired(Run(session.path.parent.parent)) == []


def test_run_without_rows_or_with_foreign_lines_gets_no_advice(tmp_path: Path):
    with fixtures.written(tmp_path, fixtures.CONTROL) as (session, _):
        pass
    run = Run(session.path.parent.parent)
    assert fired(run) == []
    (session.path / "metrics.jsonl").write_bytes(b'[1]\nnull\n{"step": "x"}\n{"step": 1, "ppo/grad_norm": NaN}\n{"st')
    assert fired(run) == []
    assert "no advice" in doctor(run)


def test_of_a_long_file_only_both_ends_are_read(tmp_path: Path):
    run = fixtures.write_case(tmp_path, "truncation", broken=True)
    path = run.session(0) / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    with path.open("wb") as file:
        file.write(first)
        file.truncate(200 << 20)  # a hole, which costs nothing on the disk
        file.seek(0, 2)
        file.write(b"\n" + b"".join(rest))
    assert path.stat().st_size > 50 * ENDS
    assert fired(run) == ["truncation"]
