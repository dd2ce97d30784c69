"""The pipeline of all data steps, from pages to a model: what each leaves out, its record, a second run of nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, Scratch

from palestra.runs.run import open_run

CORPUS = str(Path(__file__).parents[1] / "examples" / "pipelines" / "corpus.yaml")
SMALL = ["steps.web.with.pages=300", "steps.pretrain.spec.train.steps=5", "steps.vocabulary.with.vocab_size=300"]
AGAIN = """
import sys
from palestra.cli import main
try:
    main()
finally:
    print("heavy:", *sorted({"torch", "tokenizers", "matplotlib", "pandas"} & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = Scratch(tmp_path_factory.mktemp("corpus"))
    ran = scratch("pipeline", "run", CORPUS, *SMALL, PALESTRA_CACHE=str(scratch.path / "cache"))
    assert ran.returncode == 0, ran.stderr
    return scratch.path


def folder(done: Path, name: str) -> Path:
    (found,) = done.glob(f"outputs/{name}-*")
    return found


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for file in sorted(path.glob("*.jsonl")) for line in file.open()]


def test_corpus_has_the_stories_once_and_neither_advertisements_nor_what_is_held_out(done):
    pages, corpus = texts(folder(done, "web") / "pages"), texts(folder(done, "corpus") / "docs")
    held_out = texts(folder(done, "web") / "held_out")
    assert len(pages) == 300 + 30 + 30 + 20
    assert len(set(corpus)) == len(corpus) > 100
    assert not any("euros!" in text for text in corpus)
    assert sum("euros!" in page for page in pages) > 50
    assert set(corpus).isdisjoint(held_out)
    assert all(any(text in page for page in pages) for text in corpus)
    dropped = {
        name: sum(json.loads((folder(done, name) / "counts.json").read_text())["dropped"].values())
        for name in ("exact", "fuzzy", "clean", "corpus")
    }
    assert dropped["exact"] == 30
    assert dropped["fuzzy"] >= 20
    assert dropped["clean"] >= 20
    assert dropped["corpus"] > 50


def test_model_of_the_corpus_is_evaluated_on_what_was_held_out(done):
    assert 0 < open_run(folder(done, "evaluate")).summary()["eval/bits_per_byte"] < 8


def test_record_of_the_run_has_every_step_with_all_that_its_address_is_made_of(done):
    record = json.loads((done / "outputs" / "report-corpus.json").read_text())
    steps = {step["name"]: step for step in record["steps"]}
    assert len(steps) == 13
    for step in steps.values():
        status = json.loads((Path(step["output"]) / "status.json").read_text())
        assert (step["state"], step["identity"]) == ("ran", status["identity"])
        assert all(Path(record["prefix"], needed).is_dir() for needed in step["inputs"])
    assert steps["judged"]["inputs"] == [steps["tidy"]["address"], steps["judge"]["address"]]


def test_second_run_loads_nothing_heavy(done):
    again = subprocess.run(
        [sys.executable, "-c", AGAIN, "pipeline", "run", CORPUS, *SMALL],
        cwd=done, env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert again.stdout.count("done before") == 13, again.stderr
    assert again.stdout.splitlines()[-1].split() == ["heavy:"]
