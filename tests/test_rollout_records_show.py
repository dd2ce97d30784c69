"""What `palestra rollouts` shows of run folders: the newest answers that were asked for, safely for a terminal."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollout_groups import group, trajectory

from palestra.cli.rollouts import show_rollouts
from palestra.errors import UsageError
from palestra.rollout.records import FILE, RolloutRecord, write
from palestra.runs.run import new_trial
from palestra.runs.session import Session
from palestra.tasks.task import Problem, Status, Verdict
from palestra.track.sinks import JsonlSink


def make_run(root: Path, *by_seed: list[RolloutRecord], kind: str = "posttrain") -> Path:
    seeds = list(range(len(by_seed)))
    trial = new_trial(root, "lesson", seeds=seeds, command=["palestra"], spec={})
    for seed, given in enumerate(by_seed):
        folder = trial.session(seed)
        Session.create(folder, spec_yaml="", spec_data={"kind": kind}, manifest={"seed": seed, "diff": ""})
        if given:
            sink = JsonlSink(folder / FILE)
            for record in given:
                write(sink, record)
            sink.close()
    return trial.path


def shown(capsys: pytest.CaptureFixture[str], root: Path, **asked: Any) -> str:
    show_rollouts("lesson", root, **{"status": None, "task": None, "step": None, "limit": 20, **asked})
    return capsys.readouterr().out


def answers(text: str) -> list[str]:
    """Status and number of each answer that is shown, with the prompt it belongs to."""
    found, problem = [], ""
    for line in text.splitlines():
        if head := re.match(r"── (\S+)", line):
            problem = head[1]
        if answer := re.match(r"(\w+)  completion (\d+) of", line):
            found.append(f"{problem} {answer[2]} {answer[1]}")
    return found


RECORDS = [
    RolloutRecord(group([0.0, 1.0], 1), "trained", 1, ((0.0, 0.0, -0.5, -0.5, -0.5), (0.0, 0.0, 0.5, 0.5, 0.5))),
    RolloutRecord(group([1.0, 1.0], 2, task="reverse"), "filtered", 1),
    RolloutRecord(group([0.0, 0.0, 1.0], 3), "trained", 2),
]
EVERY = [
    "sums/train/1 1 wrong",
    "sums/train/1 2 correct",
    "reverse/train/2 1 correct",
    "reverse/train/2 2 correct",
    "sums/train/3 1 wrong",
    "sums/train/3 2 wrong",
    "sums/train/3 3 correct",
]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, EVERY),
        ({"status": "wrong"}, [one for one in EVERY if one.endswith("wrong")]),
        ({"task": "reverse"}, EVERY[2:4]),
        ({"step": 1}, EVERY[:4]),
        ({"step": 1, "status": "wrong", "task": "sums"}, EVERY[:1]),
        ({"limit": 3}, EVERY[4:]),
        ({"limit": 2}, EVERY[4:6]),
        ({"limit": 4}, [EVERY[2], *EVERY[4:]]),
        ({"limit": 1, "status": "correct"}, EVERY[6:]),
        ({"task": "sort"}, []),
        ({"step": 9}, []),
    ],
)
def test_rollouts_that_were_asked_for_are_shown_the_newest_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: dict[str, Any], expected: list[str]
) -> None:
    make_run(tmp_path, RECORDS)
    text = shown(capsys, tmp_path, **asked)
    assert answers(text) == expected
    assert text.count("── ") == len({one.split()[0] for one in expected}), "no prompt without an answer"
    assert ("no rollouts match" in text) == (not expected)
    assert ("there are more" in text) == ("limit" in asked)


def test_rollouts_show_prompt_answer_numbers_and_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(0.5, Status.WRONG, {"strict": 0.0, "flexible": 1.0}, note="took 7 for the answer")
    one = trajectory(0.25, verdict=verdict, completion="It is\n7", versions=(-1, -1, 4, 5, 6), stop_reason="length")
    asked = Problem("sums/train/1", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}))
    record = RolloutRecord(
        replace(group([0.0], problem=asked), trajectories=(one,)), "trained", 7, ((0, 0, 0.5, 0.5, 0.2),)
    )
    make_run(tmp_path, [record])
    assert [line.rstrip() for line in shown(capsys, tmp_path).splitlines()] == [
        "── sums/train/1  number 0  step 7  trained",
        "  system: Be brief.",
        "  user: 2+3?",
        "wrong  completion 1 of 1: reward 0.25, advantage +0.4, 3 tokens, length, versions 4 to 6, "
        "strict 0, flexible 1",
        "  note: took 7 for the answer",
        "  It is",
        "  7",
        "",
    ]


def test_rollouts_with_controls_and_markup_are_shown_as_they_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model may write anything: nothing of it is obeyed by the terminal or by the library that colors."""
    wild = "[bold]x[/nothing] \x1b[31mred\x1b[0m \x07\r\x9b2J \u202etxt \ud800 naïve 日本語 🎉\tend"
    make_run(
        tmp_path, [RolloutRecord(replace(group([0.0]), trajectories=(trajectory(completion=wild),)), "trained", 1)]
    )
    text = shown(capsys, tmp_path)
    assert r"[bold]x[/nothing] \x1b[31mred\x1b[0m \x07\r\x9b2J \u202etxt \ud800 naïve 日本語 🎉" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)


def test_rollouts_in_a_terminal_have_the_colour_of_their_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    make_run(tmp_path, [RolloutRecord(group([0.0, 1.0], 1), "trained", 1)])
    text = shown(capsys, tmp_path)
    assert re.search("\x1b\\[1;31mwrong", text)
    assert re.search("\x1b\\[1;32mcorrect", text)


def test_rollouts_of_long_prompts_show_their_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem("sums/train/1", "first " + "x" * 5000 + " last")
    make_run(tmp_path, [RolloutRecord(group([0.0], problem=problem), "trained", 1)])
    text = shown(capsys, tmp_path)
    assert "first" not in text
    assert " last" in text
    assert len(text) < 1500


def test_rollouts_of_several_seeds_are_shown_seed_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, RECORDS[:1], RECORDS[1:2], [])
    text = shown(capsys, tmp_path, limit=1)
    assert answers(text) == [EVERY[0], EVERY[2]]
    assert re.findall(r"^seed \d", text, re.MULTILINE) == ["seed 0", "seed 1"]


def test_rollouts_with_a_line_half_written_are_shown_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path, RECORDS) / "sessions" / "0" / FILE
    path.write_bytes(path.read_bytes()[:-40])
    assert answers(shown(capsys, tmp_path)) == EVERY[:4]
    path.write_bytes(path.read_bytes()[:40])
    assert "no rollouts yet" in shown(capsys, tmp_path)


@pytest.mark.parametrize(("kind", "why"), [("posttrain", "none has been"), ("sft", "a run of kind sft has none")])
def test_run_without_rollouts_says_why(tmp_path: Path, kind: str, why: str) -> None:
    make_run(tmp_path, [], kind=kind)
    with pytest.raises(UsageError, match=rf"has no {FILE}: {why}"):
        show_rollouts("lesson", tmp_path, status=None, task=None, step=None, limit=20)


def test_status_that_is_none_is_refused_with_those_there_are(tmp_path: Path) -> None:
    make_run(tmp_path, RECORDS)
    with pytest.raises(UsageError, match="no status 'bad': choose one of correct, wrong, unparsable, timeout, error"):
        show_rollouts("lesson", tmp_path, status="bad", task=None, step=None, limit=20)
