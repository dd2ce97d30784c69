"""The recipe for a data set, followed to the letter: files as the page gives them, commands as the page gives them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT
from test_recipes import RECIPES, ROOT, blocks

TRAIN = "palestra train"


def run(commands: str, folder: Path) -> str:
    """Run a block of commands in a folder; what they print."""
    environment = ENVIRONMENT | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PALESTRA_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_data_set_recipe_goes_from_pages_to_tokens_to_a_model(tmp_path: Path, trained: bool) -> None:
    said = {}
    for file, language, text in blocks(RECIPES / "add_dataset.md"):
        if file is not None:
            (tmp_path / file).write_text(text)
        elif language == "bash" and (trained or not text.startswith(TRAIN)):
            said[text] = run(text, tmp_path)
    look, clean, again = list(said.values())[1:4]
    assert "90 rows" in look
    assert len(clean.split()) == 5
    assert "fewer than 20 words" in again
    assert "a token store of 80 documents" in again
    (counts,) = tmp_path.glob("birds/filter-*/counts.json")
    assert json.loads(counts.read_text())["dropped"] == {"fewer than 20 words": 10}
    row = json.loads(next(tmp_path.glob("birds/filter-*/docs/*.jsonl")).read_text().splitlines()[0])
    assert (row["title"], row["place"]) == ("The robin", "river")
    assert row["text"].startswith("# The robin of the river\n\nThe robin lives by the river")
    assert run("python birds.py", tmp_path).strip() == ""
    if trained:
        assert list(tmp_path.glob("runs/birds/*/sessions/0/metrics.jsonl"))
