"""`palestra pipeline run` and `explain` as real commands: plans, runs, caches, failures, kills in the middle."""

import os
import signal
from pathlib import Path

import pytest
import yaml
from conftest import SHORT, Scratch, last_step, numbers, wait_until

STEPS = """\
from pathlib import Path
from palestra.pipeline import Execution

def note(out: Path, *, text: str, after: list[Path] = (), fails: str = "", workers: Execution[int] = 1) -> None:
    with open("journal.txt", "a") as journal:
        journal.write(out.name.partition("-")[0] + "\\n")
    print("noting", text)
    if fails and Path(fails).exists():
        raise ValueError("the disk is cursed")
    (out / "note.txt").write_text(text)
"""
GRAPH = {
    "kind": "pipeline",
    "prefix": "out",
    "steps": {
        "left": {"use": "own_steps:note", "with": {"text": "l"}},
        "right": {"use": "own_steps:note", "with": {"text": "r", "fails": "curse"}},
        "both": {"use": "own_steps:note", "with": {"text": "b", "after": ["step:left", "step:right/note.txt"]}},
        "beside": {"use": "own_steps:note", "with": {"text": "x", "after": ["step:left"]}},
    },
}


@pytest.fixture
def graph(scratch: Scratch) -> Scratch:
    (scratch.path / "own_steps.py").write_text(STEPS)
    (scratch.path / "graph.yaml").write_text(yaml.safe_dump(GRAPH))
    return scratch


def journal(scratch: Scratch) -> list[str]:
    path = scratch.path / "journal.txt"
    return sorted(path.read_text().split()) if path.exists() else []


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in str(path))


def test_dry_run_says_what_would_run_and_writes_nothing(graph):
    before = files(graph.path)
    said = graph("pipeline", "run", "graph.yaml", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("not done yet") == 4
    assert str(graph.path / "out" / "both-") in said.stdout
    assert files(graph.path) == before


def test_run_does_each_step_once_and_the_second_run_none(graph):
    first = graph("pipeline", "run", "graph.yaml")
    assert first.returncode == 0, first.stderr
    assert journal(graph) == ["beside", "both", "left", "right"]
    assert (graph.path / "out" / "report-graph.html").exists()
    second = graph("pipeline", "run", "graph.yaml")
    assert second.stdout.count("done before") == 4
    assert len(journal(graph)) == 4
    # One value of one step: that one and the one after it.
    changed = graph("pipeline", "run", "graph.yaml", "steps.right.with.text=other")
    assert changed.returncode == 0, changed.stderr
    assert journal(graph) == ["beside", "both", "both", "left", "right", "right"]
    explained = graph("pipeline", "explain", "graph.yaml", "both", "steps.right.with.workers=5")
    assert explained.returncode == 0, explained.stderr
    made, _, differs = explained.stdout.partition("differs from both-")
    assert "text  " in made
    assert "right-" in differs
    assert "not part of it: execution only\n  workers  1" in made
    assert "text" not in differs


def test_only_runs_what_fits_and_what_that_needs(graph):
    said = graph("pipeline", "run", "graph.yaml", "--only", "^bes", "--prefix", "elsewhere")
    assert said.returncode == 0, said.stderr
    assert journal(graph) == ["beside", "left"]
    assert not (graph.path / "out").exists()
    wrong = graph("pipeline", "run", "graph.yaml", "--only", "nobody")
    assert wrong.returncode == 2
    assert "matches no step; there are" in wrong.stderr


def test_failed_step_stops_those_after_it_and_is_tried_again_only_when_asked(graph):
    (graph.path / "curse").touch()
    said = graph("pipeline", "run", "graph.yaml")
    assert said.returncode != 0
    assert "ValueError: the disk is cursed" in said.stderr
    assert journal(graph) == ["beside", "left", "right"]
    page = (graph.path / "out" / "report-graph.html").read_text()
    assert "the disk is cursed" in page
    assert "noting r" in page
    (graph.path / "curse").unlink()
    again = graph("pipeline", "run", "graph.yaml")
    assert again.returncode != 0
    assert "--force-failed" in again.stderr
    forced = graph("pipeline", "run", "graph.yaml", "--force-failed", "--max-parallel", "1")
    assert forced.returncode == 0, forced.stderr
    assert journal(graph) == ["beside", "both", "left", "right", "right"]


def test_problems_end_in_one_paragraph_with_lines(graph):
    text = (graph.path / "graph.yaml").read_text().replace("text: l", "txt: l")
    (graph.path / "graph.yaml").write_text(text)
    for command in (("pipeline", "run"), ("check",)):
        said = graph(*command, "graph.yaml")
        assert said.returncode == 2
        assert "unknown argument of note. Did you mean 'text'?" in said.stderr
        assert "graph.yaml:" in said.stderr


@pytest.mark.slow
def test_training_step_that_is_killed_goes_on_to_the_same_numbers(scratch):
    spec = {**SHORT, "train": {"frames": 16 * 128}}
    specs = {"name": "kill", "kind": "pipeline", "prefix": "out", "steps": {"train": {"spec": spec}}}
    (scratch.path / "kill.yaml").write_text(yaml.safe_dump(specs))
    running = scratch.start("pipeline", "run", "kill.yaml")

    def trained() -> list[Path]:
        sessions = list((scratch.path / "out").glob("train-*.partial-*/train/*/sessions/0"))
        return [one for one in sessions if last_step(one) >= 5]

    wait_until(trained, running)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    assert not [path for path in (scratch.path / "out").glob("train-*") if ".partial" not in path.name]
    finished = scratch("pipeline", "run", "kill.yaml")
    assert finished.returncode == 0, finished.stderr
    (session,) = (scratch.path / "out").glob("train-*/train/*/sessions/0")  # one run, in the folder's last name
    whole = scratch.here("pipeline", "run", "kill.yaml", "--prefix", "whole")
    assert not whole.returncode, whole.stderr
    (other,) = (scratch.path / "whole").glob("train-*/train/*/sessions/0")
    assert session.relative_to(scratch.path / "out").parts[0] == other.relative_to(scratch.path / "whole").parts[0]
    assert numbers(session) == numbers(other)
