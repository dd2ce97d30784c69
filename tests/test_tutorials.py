"""The tutorials, followed from top to bottom in an empty folder: their files, their commands, in their order.

A block belongs to the file that the line above it names, as in "In `larger.py`:"; blocks of `bash` are run. As in the
recipes, nothing is added; only patterns such as `outputs/clean-*` are filled in, as a shell would.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_recipes import blocks, run

import palestra
from palestra.api import check

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
NAMES = ["control", "evaluation", "language_model", "pipeline", "posttrain", "search"]


def minutes(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that takes one or two minutes on idle cores, and may take ten on busy ones."""
    return pytest.mark.slow(pytest.mark.timeout(1200)(test))


def write_files(name: str, folder: Path) -> list[Path]:
    """The files of a page, as the page gives them."""
    found = [(folder / file, text) for file, _, text in blocks(TUTORIALS / f"{name}.md") if file is not None]
    for path, text in found:
        path.write_text(text)
    return [path for path, _ in found]


def filled(line: str, folder: Path) -> str:
    """A command with its patterns replaced by the paths that they match."""
    words = [
        [str(path.relative_to(folder)) for path in sorted(folder.glob(word))] if "*" in word else [word]
        for word in line.partition(" #")[0].split(" ")
    ]
    return " ".join(word for group in words for word in group)


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Does what a page says; gives what each command printed."""

    def followed(name: str) -> list[str]:
        write_files(name, tmp_path)
        lines = [
            line
            for file, language, text in blocks(TUTORIALS / f"{name}.md")
            if file is None and language == "bash"
            for line in text.splitlines()
        ]
        assert lines, f"{name}.md has no commands"
        return [run(filled(line, tmp_path), tmp_path) for line in lines]

    monkeypatch.chdir(tmp_path)
    return followed


def last(name: str, metric: str) -> float:
    """The last value of a metric of a run in the current folder."""
    return [row[metric] for row in palestra.open_run(name).metrics() if metric in row][-1]


def first(name: str, metric: str) -> float:
    return next(row[metric] for row in palestra.open_run(name).metrics() if metric in row)


def test_every_tutorial_has_a_test_and_ends_in_the_readers_own_task() -> None:
    assert sorted(path.stem for path in TUTORIALS.glob("*.md")) == NAMES
    for name in NAMES:
        text = (TUTORIALS / f"{name}.md").read_text()
        assert f"def test_{name}_followed" in Path(__file__).read_text()
        assert "## Your turn" in text or "## 5. Your own" in text


@pytest.mark.parametrize("name", NAMES)
def test_specs_of_tutorial_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    specs = [path for path in write_files(name, tmp_path) if path.suffix == ".yaml"]
    assert specs
    for path in specs:
        check(path.name)


@minutes
def test_control_followed_solves_the_readers_environment(follow: Callable[[str], list[str]]) -> None:
    said = follow("control")
    assert first("ppo_cartpole_fast", "return") < 100 < 400 < last("ppo_cartpole_fast", "eval/return")
    assert last("thermostat", "eval/return") > 50  # random actions: 12
    situations = said[-1].splitlines()
    assert situations[0].endswith("on")
    assert situations[2].endswith("off")
    assert Path("cartpole.gif").exists()


@minutes
def test_language_model_followed_answers_its_questions(follow: Callable[[str], list[str]]) -> None:
    said = follow("language_model")
    assert last("zoo", "eval/loss") < 1 < first("zoo", "loss")
    written, *answers = said[-1].splitlines()
    assert "fish" in written
    assert [answer.split("? ")[1].strip() for answer in answers] == ["bamboo", "honey"]


@minutes
def test_posttrain_followed_learns_the_readers_task_from_rewards_alone(follow: Callable[[str], list[str]]) -> None:
    follow("posttrain")
    assert first("larger_grpo", "eval/accuracy") < 0.65
    assert last("larger_grpo", "eval/accuracy") > 0.8
    assert last("larger_control", "eval/accuracy") < 0.65


@minutes
def test_evaluation_followed_scores_the_readers_questions(follow: Callable[[str], list[str]]) -> None:
    said = follow("evaluation")
    assert "of 100 are wrong, such as" in said[4]
    row: dict[str, Any] = palestra.open_run("mine").metrics()[-1]
    assert row["eval/my_sums/pass@8"] >= row["eval/my_sums/pass@1"]
    assert 0 <= row["eval/my_choices/accuracy"] <= 1
    assert "model.init" in said[-1]


@minutes
def test_pipeline_followed_repeats_only_what_has_changed(follow: Callable[[str], list[str]]) -> None:
    follow("pipeline")
    made = [path.name.rsplit("-", 1)[0] for path in Path("outputs").iterdir() if (path / "status.json").exists()]
    assert sorted(made) == ["clean", "loud", "model", "model", "tokens", "unique", "vocabulary"]
    (clean,) = Path("outputs").glob("clean-*")
    rows = [json.loads(line) for path in clean.rglob("docs*.jsonl") for line in path.read_text().splitlines()]
    assert rows
    assert not [row for row in rows if len(row["text"].split()) < 10]


@minutes
def test_search_followed_confirms_on_fresh_seeds(follow: Callable[[str], list[str]]) -> None:
    said = follow("search")
    (search,) = Path("runs/tune").glob("*/trials.csv")
    assert len(search.read_text().splitlines()) == 7
    confirmed = next(text for text in said if text.startswith("tuned"))
    assert [line.split()[0] for line in confirmed.splitlines()] == ["tuned", "untuned"]
    assert palestra.open_run("tuned").seeds == [1000, 1001]
    assert len([run for run in palestra.list_runs() if run.path.parent.name == "grid"]) == 4
