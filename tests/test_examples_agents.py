"""The agents of the examples: three programs against three APIs train on the same tokens, and learn to use a tool."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_specs import ROOT

import palestra
from palestra.rollout.records import FILE, read

AGENTS = ("chat", "responses", "messages")
SMALL = ["train.steps=1", "train.prompts_per_step=2", "rollout.group=2", "eval.problems=2"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to train in, from which the examples can be imported."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    subprocess.run([sys.executable, "examples/agents/lessons.py"], check=True, env={**os.environ})
    return tmp_path


def trained(agent: str, *overrides: str) -> Any:
    return palestra.run(f"examples/agents/{agent}.yaml", overrides=["seed=1000", *overrides], quiet=True)


def completions(run: Any) -> list[Any]:
    groups = read(run.sessions[0].path / FILE)
    return [[(one.tokens, one.loss_mask, one.logprobs) for one in group.trajectories] for group in groups]


def test_agents_of_three_apis_train_on_the_same_tokens(folder):
    trained("sft", "train.steps=2")
    first, *others = [completions(trained(agent, *SMALL)) for agent in AGENTS]
    assert first
    assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_agents_learn_to_use_their_calculator(folder):
    trained("sft")
    for agent in AGENTS:
        rows = trained(agent).metrics(1000)
        curve = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
        assert curve[-1] >= 0.9 > curve[0]
        assert max(row.get("part/retokenized", 0) + row.get("part/forks", 0) for row in rows) == 0
