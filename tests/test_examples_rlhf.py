"""The example from preferences to behavior: what it promises, and that what it measures is never trained on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from example_specs import ROOT

import palestra
from examples.posttrain.rlhf.manners import POLITE, RUDE, VERBS, Manners, questions
from palestra.tasks.task import Completion, Status, TaskArgs

FOLDER = ROOT / "examples/posttrain/rlhf"
TASK = Manners(TaskArgs(), "manners")


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with the lessons and the pairs."""
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, str(FOLDER / "make_data.py")], check=True)
    return tmp_path / "data/rlhf"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_preferences_make_answers_polite_and_leave_them_right(tmp_path, seed):
    command = [sys.executable, str(FOLDER / "run.py"), "--seed", str(seed)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "right and polite" in done.stdout
    (path,) = tmp_path.glob("runs/manners_ppo/2*/result.json")
    result = json.loads(path.read_text())
    before, after = result["before"], result["after"]
    assert before["right and polite"] < 0.5
    assert after["right and polite"] > 0.9
    assert after["polite"] > 0.9
    assert after["right"] > before["right"] - 0.03
    assert result["reward_model_accuracy"] > 0.95


def test_the_three_specs_in_a_row_run_and_report_what_was_not_trained_on(data):
    small = ["train.steps=2", "threads=1", "device=cpu"]
    palestra.run(FOLDER / "sft.yaml", overrides=[*small, "train.batch=8"], quiet=True)
    palestra.run(FOLDER / "reward_model.yaml", overrides=[*small, "train.batch=8", "eval.examples=8"], quiet=True)
    short = ["train.prompts_per_step=8", "eval.problems=4", "every.eval=1 steps"]
    run = palestra.run(FOLDER / "ppo.yaml", overrides=[*small, *short], quiet=True)
    first, *steps = run.metrics()
    assert first.keys() >= {"eval/pass@1", "eval/Manners/parts/right", "eval/Manners/parts/polite"}
    for row in steps:
        assert row["part/reward_model"] == pytest.approx(row["reward"])  # trained on scores, not on manners
        assert {"critic/explained", "kl_reference"} <= row.keys()
        assert row["status/error"] == 0


def test_lessons_and_pairs_are_of_train_questions_and_right(data):
    held_out = {one.text for one in questions("test")}
    known = {one.text: one.answer for one in questions("train")}
    assert len(held_out) == 500
    assert not held_out & known.keys()
    lessons, pairs = rows_of(data / "lessons.jsonl"), rows_of(data / "preferences.jsonl")
    assert {row["prompt"] for row in (*lessons, *pairs)} <= known.keys()
    polite = 0
    for row in lessons:
        word, _, ending = row["completion"].partition(" ")
        assert word == known[row["prompt"]]
        assert ending in POLITE + RUDE
        polite += ending in POLITE
    assert 0.3 < polite / len(lessons) < 0.37
    for row in pairs:
        chosen, rejected = (row[name].partition(" ") for name in ("chosen", "rejected"))
        assert chosen[0] == rejected[0] == known[row["prompt"]]
        assert chosen[2] in POLITE
        assert rejected[2] in RUDE


def test_questions_ask_every_verb_and_their_answers_are_right():
    assert {one.text.split()[0] for one in questions("test")} == set(VERBS)
    known = {one.text: one.answer for split in ("train", "test") for one in questions(split)}
    assert known["reverse abcd"] == "dcba"
    assert known["sort hgfe"] == "efgh"
    assert known["double abc"] == "aabbcc"


@pytest.mark.parametrize(
    ("answer", "right", "polite"),
    [
        ("{} sir", 1, 1),
        ("{} dear friend", 1, 1),
        ("{} fool", 1, 0),
        ("{}", 1, 0),
        ("zz sir", 0, 1),
        ("{} sir sir", 1, 0),
        ("{}  sir", 1, 0),
        ("sir {}", 0, 0),
        ("", 0, 0),
    ],
)
def test_manners_judge_by_hand(answer, right, polite):
    problem = TASK.problems("test")[0]
    verdict = TASK.verify(problem, Completion(answer.format(problem.row["answer"])))
    assert verdict.parts == {"right": right, "polite": polite}
    assert verdict.score == right * polite
    assert verdict.status == (Status.CORRECT if right and polite else Status.WRONG)
