"""Tasksets of the package verifiers, played by another interpreter through the gateway, in real runs."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from posttrain_lab import Lab, rows_of
from test_rollout_agent import children, completions

from palestra.errors import PalestraError, UsageError
from palestra.tasks.task import make_task

PLAY = "palestra.rollout.agents.taskset:play"
TASKSET = """
import verifiers.v1 as vf

class WordData(vf.TaskData):
    word: str

class WordTask(vf.Task[WordData]):
    @vf.reward(weight=1.0)
    async def half_if_it_answers(self, trace: vf.Trace) -> float:
        return 0.5 if self.data.word in ("a", "b") else 0.0

class WordsConfig(vf.TasksetConfig):
    num_tasks: int = 20

class WordsTaskset(vf.Taskset[WordTask, WordsConfig]):
    def load(self):
        for n in range(self.config.num_tasks):
            yield WordTask(WordData(prompt="ab"[n % 2], word="ab"[n % 2]), self.config.task)

__all__ = ["WordsTaskset"]
"""
STAND_IN = """
import json, os, urllib.request
from types import SimpleNamespace as Of

class Taskset:
    def take(self, size):
        return [Of(data=Of(prompt="ab"[n % 2])) for n in range(min(size, 20))]

class Environment:
    taskset = Taskset()
    def serving(self):
        return self
    async def __aenter__(self):
        print("this is printed by an environment")
    async def __aexit__(self, *_):
        pass
    def slots(self, task):
        return [task]
    async def run_slot(self, task, context):
        if task.data.prompt == "b" and os.environ.get("FAILING"):
            return Of(ok=False, errors=[Of(type="EnvError", message="b is bad")], traces=[])
        client = context.client
        headers = {"Authorization": f"Bearer {os.environ[client.api_key_var]}", "Content-Type": "application/json"}
        body = {"model": context.model, "messages": [{"role": "user", "content": task.data.prompt}]}
        request = urllib.request.Request(client.base_url + "/chat/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request).close()
        return Of(ok=True, errors=[], traces=[Of(reward=0.5, errors=[], agent=Of(trainable=True))])

def resolve_env_config(block):
    assert block["taskset"]["id"] == "words", block
    return block

def load_environment(config):
    return Environment()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is used of verifiers 0.4, under its names: the package itself does not go beside ours."""
    files = {"utils/loaders.py": STAND_IN, "types.py": "SamplingConfig = dict\n", "clients.py": ""}
    files["clients.py"] = "from types import SimpleNamespace as EvalClientConfig, SimpleNamespace as ModelContext\n"
    for name, text in files.items():
        path = tmp_path / "verifiers" / "v1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), before])))
    return tmp_path


def played(lab: Lab, args: dict[str, Any], **settings: Any) -> Any:
    """A run of a step on the taskset."""
    workflow = {"name": "agent", "function": PLAY, "reward": "program", **settings}
    tasks = {"train": [{"task": "verifiers:words", "args": args}]}
    return lab.run(tasks=tasks, rollout__workflow=workflow, rollout__group=2, train__steps=1)


def test_taskset_is_listed_with_every_tenth_task_held_out(stand_in: Path) -> None:
    task = make_task("verifiers:words", {"size": 12})
    train, test = task.problems("train"), task.problems("test")
    assert [problem.id for problem in test] == ["verifiers:words/test/9"]
    assert len(train) == 11
    assert [problem.prompt for problem in train[:3]] == ["a", "b", "a"]


def test_taskset_is_played_through_the_gateway_with_its_own_rewards(stand_in: Path, tmp_path: Path) -> None:
    before = children()
    run = played(Lab(tmp_path), {})
    made = completions(run)
    assert {one.reward for one in made} == {0.5}
    assert all(one.sampled > 0 for one in made)
    assert max(row.get("mismatch", 0.0) for row in rows_of(run)) < 1e-6
    assert not children() - before


def test_episode_that_fails_over_there_is_an_error_and_not_a_score(stand_in, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FAILING", "1")
    with pytest.raises(PalestraError, match="the agent raised PlayerFailed: RuntimeError: EnvError: b is bad"):
        played(Lab(tmp_path), {})


def test_interpreter_without_the_package_is_the_users_error() -> None:
    with pytest.raises(UsageError, match=r"the tasks cannot be listed by .*No module named 'verifiers'"):
        make_task("verifiers:words", {"python": sys.executable, "size": 7}).problems("train")
    with pytest.raises(UsageError, match="cannot start /no/python"):
        make_task("verifiers:words", {"python": "/no/python"}).problems("train")


@pytest.mark.slow
@pytest.mark.skipif("VERIFIERS_PYTHON" not in os.environ, reason="VERIFIERS_PYTHON names no interpreter with verifiers")
def test_real_package_plays_a_taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment of its own, whose Python VERIFIERS_PYTHON names: their package pins many others."""
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "__init__.py").write_text(TASKSET)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), before])))
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    args = {"python": os.environ["VERIFIERS_PYTHON"], "config": {"agent": agent}}
    made = completions(played(Lab(tmp_path), args, idle_seconds=280.0, running=4))
    assert {one.verdict.note for one in made if one.verdict.status == "error"} == set()
    assert {one.reward for one in made} == {0.5}
    assert all(one.sampled > 0 for one in made)
