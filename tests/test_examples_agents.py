"""The agents of the examples: three programs against three APIs, one that searches, one with two tools; all learn."""

import asyncio
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from example_specs import ROOT
from hypothesis import given
from hypothesis import strategies as st

import palestra
from examples.agents.search.bm25 import K1, B, Index, words
from examples.agents.search.library import people, texts
from palestra.rollout.records import FILE, read
from palestra.rollout.tools import make_tools
from palestra.tasks.task import make_task

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


@given(st.lists(st.text("ab c", max_size=12), min_size=1, max_size=6), st.text("abc ", max_size=8))
def test_bm25_ranks_as_its_formula_does(documents, query):
    mean = sum(len(words(text)) for text in documents) / len(documents) or 1.0

    def score(text: str) -> float:
        total = 0.0
        for word in words(query):
            having = sum(word in words(other) for other in documents)
            rarity = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            often, length = words(text).count(word), len(words(text))
            total += rarity * often * (K1 + 1) / (often + K1 * (1 - B + B * length / mean)) if often else 0.0
        return total

    found = Index(documents).search(query, count=10)
    scores = [score(text) for text in found]
    assert all(one > 0 for one in scores)
    assert scores == pytest.approx(sorted((one for text in documents if (one := score(text))), reverse=True))


def test_every_question_is_answered_by_one_search_or_two():
    index = Index(texts())
    for somebody in people():
        about, town = (next(iter(index.search(query))) for query in (somebody.name, somebody.town))
        assert about.endswith(f" in {somebody.questions[0][1]}.")
        assert town.endswith(f" of {somebody.questions[1][1]}.")
        assert somebody.land not in about


def test_people_of_held_out_questions_are_not_trained_on():
    task = make_task("examples.agents.search.task:Questions")
    train, test = ({str(problem.prompt) for problem in task.problems(split)} for split in ("train", "test"))
    assert (len(train), len(test)) == (640, 160)
    assert train.isdisjoint(test)


def test_calls_of_the_tool_lessons_give_their_results(folder):
    subprocess.run([sys.executable, "examples/agents/tools/lessons.py"], check=True, env={**os.environ})
    tools, called = make_tools(["calculator", "python"]), set()
    for line in Path("data/agents/tools.jsonl").read_text().splitlines()[:12]:
        lesson = json.loads(line)["completion"]
        for name in tools:
            call, tag, rest = lesson.partition(f"</{name}>")
            if tag:
                called.add(name)
                result = asyncio.run(tools[name](call.removeprefix(f"<{name}>")))  # type: ignore[arg-type]
                assert rest == f"<result>{result}</result>{result}"
    assert called == set(tools)


def train_small(kind: str) -> Any:
    subprocess.run([sys.executable, f"examples/agents/{kind}/lessons.py"], check=True, env={**os.environ})
    started = palestra.run(f"examples/agents/{kind}/sft.yaml", overrides=["train.steps=2"], quiet=True)
    init = f"model.init={started.path}"
    return palestra.run(f"examples/agents/{kind}/rl.yaml", overrides=[init, *SMALL], quiet=True)


@pytest.mark.parametrize("kind", ["search", "tools"])
def test_other_agents_train(folder, monkeypatch, kind):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert [row["step"] for row in train_small(kind).metrics() if "reward" in row] == [1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["search", "tools"])
def test_other_agents_learn_and_with_shuffled_rewards_do_not(folder, monkeypatch, kind):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subprocess.run([sys.executable, f"examples/agents/{kind}/lessons.py"], check=True, env={**os.environ})
    start = palestra.run(f"examples/agents/{kind}/sft.yaml", overrides=["seed=1000"], quiet=True)
    curves = []
    for control in ("null", "shuffled_rewards"):
        changes = [f"model.init={start.path}", "seed=1001", f"control={control}", f"name=control_{control}"]
        rows = palestra.run(f"examples/agents/{kind}/rl.yaml", overrides=changes, quiet=True).metrics(1001)
        curves.append([row["eval/accuracy"] for row in rows if "eval/accuracy" in row])
    learned, control = curves
    assert learned[-1] >= 0.9 > 0.7 > learned[0]
    assert control[-1] < 0.9  # a random walk
