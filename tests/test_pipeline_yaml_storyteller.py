"""The example `examples/pipelines/storyteller.yaml`: from text to a model that has learned from rewards."""

import json
from pathlib import Path

import pytest
import zygote
from conftest import Scratch

from palestra.pipeline.form import load_pipeline
from palestra.pipeline.graph import Graph
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.runner import run
from palestra.runs.run import open_run

STORYTELLER = str(Path(__file__).parent.parent / "examples" / "pipelines" / "storyteller.yaml")
ALL = {"books", "clean", "dedup", "vocabulary", "tokens", "pretrain", "lessons", "sft", "grpo", "before", "after"}


def addresses(*overrides: str) -> dict[str, str]:
    return {
        node.step.name: node.address
        for node in Graph(load_pipeline(STORYTELLER, overrides=overrides).steps).nodes.values()
    }


@pytest.fixture
def without_books(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_DATA", str(tmp_path / "nothing"))


def test_change_of_one_learning_rate_changes_only_the_steps_after_it(without_books):
    plain = addresses()
    assert set(plain) == ALL
    for override, after in (
        ("steps.pretrain.spec.optim.lr.start=0.01", {"pretrain", "sft", "grpo", "before", "after"}),
        ("steps.sft.spec.optim.lr.start=0.01", {"sft", "grpo", "before", "after"}),
        ("steps.grpo.spec.optim.lr.start=1e-4", {"grpo", "after"}),
    ):
        changed = addresses(override)
        assert {name for name in ALL if plain[name] != changed[name]} == after


def test_made_up_stories_are_cleaned_and_lose_their_duplicates(without_books, tmp_path):
    pipeline = load_pipeline(
        STORYTELLER,
        overrides={"steps.books.with.stories": 300, "steps.clean.with.workers": 1, "steps.dedup.with.workers": 1},
    )
    outputs, graph = Outputs(tmp_path / "out"), Graph(pipeline.steps)
    run(pipeline.steps, outputs, only=["dedup", "lessons"])
    found = {node.step.name: outputs.path(node.address) for node in graph.nodes.values()}
    cleaned, unique = (json.loads((found[name] / "counts.json").read_text()) for name in ("clean", "dedup"))
    stories = [json.loads(line)["text"] for line in (found["books"] / "docs" / "docs-00000.jsonl").open()]
    real = {text for text in stories if not text.startswith("CHAPTER")}
    assert (cleaned["rows_in"], cleaned["rows_out"]) == (300, sum(text in real for text in stories))
    assert unique["rows_in"] == cleaned["rows_out"]
    assert 0.9 * len(real) <= unique["rows_out"] <= len(real)
    lessons = [json.loads(line) for line in (found["lessons"] / "lessons.jsonl").open()]
    right = sum(eval(one["prompt"].removesuffix("=")) == int(one["completion"]) for one in lessons)
    assert 0.4 < right / len(lessons) < 0.8  # sums without a carry are always right


def test_books_are_known_by_their_names_and_sizes_not_by_where_they_lie(tmp_path, monkeypatch):
    found = []
    for place in ("here", "there"):
        folder = tmp_path / place / "gutenberg"
        folder.mkdir(parents=True)
        (folder / "one.txt").write_text("A book.\n\nIt is short.\n")
        monkeypatch.setenv("PALESTRA_DATA", str(tmp_path / place))
        found.append(addresses())
    (folder / "one.txt").write_text("Another book.\n\nIt is longer.\n")
    assert found[0] == found[1] != addresses()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_storyteller_learns_from_rewards_and_the_second_run_does_nothing(scratch: Scratch):
    nothing = str(scratch.path / "nothing")
    first = scratch.start("pipeline", "run", STORYTELLER, PALESTRA_DATA=nothing, **{zygote.PICTURES: "1"})
    _, said = first.communicate(timeout=1200)
    assert first.returncode == 0, said
    scores = {}
    for name in ("before", "after"):
        (folder,) = (scratch.path / "outputs").glob(f"{name}-*")
        scores[name] = open_run(folder).summary()["eval/accuracy"]
    assert scores["after"] > scores["before"] + 0.1
    second = scratch("pipeline", "run", STORYTELLER, PALESTRA_DATA=nothing)
    assert second.stdout.count("done before") == len(ALL)
    page = (scratch.path / "outputs" / "report-storyteller.html").read_text()
    assert page.count("data:image/png;base64,") >= 3
