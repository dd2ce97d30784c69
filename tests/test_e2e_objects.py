"""Python objects in place of names in a spec: rewards, hooks, tasks and rows; how a notebook shows a run."""

import functools
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import Scratch
from posttrain_lab import Lab

import palestra
from palestra.errors import PalestraError, UsageError
from palestra.runs.recorder import HookContext
from palestra.tasks.rewards.rewards import reward
from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict

CONTROL: dict[str, Any] = {
    "kind": "control",
    "name": "tiny",
    "env": "CartPole-v1",
    "algorithm": {"name": "ppo", "horizon": 32, "minibatch": 32, "epochs": 2},
    "net": {"hidden": [8]},
    "train": {"frames": 64},
    "eval": {"episodes": 2, "num_envs": 2},
}
SFT: dict[str, Any] = {
    "kind": "sft",
    "name": "digits",
    "model": {"tokenizer": "characters", "shape": {"layers": 1, "width": 16, "heads": 2, "mlp": 32, "context": 16}},
    "data": {"context": 12, "format": "plain"},
    "train": {"steps": 2, "batch": 4, "precision": "fp32"},
    "optim": {"name": "adamw", "lr": 1e-3},
    "every": {"eval": None},
    "threads": 1,
}
run = functools.partial(palestra.run, quiet=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


# ---- rewards


def test_local_reward_verifies_completions_in_worker_processes(lab):
    offset = 0.25

    def length(completion: str) -> float:
        return offset + len(completion)

    done = run(lab.spec(), root=lab.root, reward=length, train__steps=1, name="length")
    assert done.spec["tasks"]["train"][0]["reward"]["function"] == "object:length"
    assert done.metrics()[-1]["reward"] >= offset
    assert done.metrics()[-1]["status/error"] == 0


def test_reward_that_no_process_can_be_sent_is_refused_before_there_is_a_folder(lab, tmp_path):
    lock = threading.Lock()

    def locked(completion: str) -> float:
        with lock:
            return 0.0

    with pytest.raises(PalestraError, match=r"Cannot send .*object:locked.* to another process: cannot pickle"):
        run(lab.spec(), root=tmp_path, reward=locked)
    assert not list(tmp_path.iterdir())
    here = reward(isolated=False)(locked)  # runs in this process, which needs no pickle
    assert run(lab.spec(), root=tmp_path, reward=here, train__steps=1).state == "done"


def test_run_with_a_reward_resumes_with_it_and_says_so_without(lab):
    def short(completion: str) -> float:
        return -len(completion)

    first = run(lab.spec(), root=lab.root, reward=short, train__steps=1, name="short")
    told = Scratch(lab.path)("train", "--resume", str(first.path), "train.steps=2", "--allow", "train.steps")
    assert told.returncode == UsageError.exit_code
    assert "Python object short" in told.stderr
    assert "palestra.run(resume=…, reward=…)" in told.stderr
    more = run(resume=first, root=lab.root, reward=short, train__steps=2, allow=["train.steps"])
    assert more.path == first.path
    assert more.metrics()[-1]["step"] == 2


def test_reward_of_a_kind_without_tasks_is_refused(tmp_path):
    with pytest.raises(UsageError, match="reward: kind control has no training tasks"):
        run(CONTROL, root=tmp_path, reward=len)


# ---- tasks


class Echo(Task[TaskArgs]):
    Args = TaskArgs
    isolated = True

    def problems(self, split: str) -> list[Problem]:
        return [Problem(self.id(split, number), f"{number}=", {"answer": str(number)}) for number in range(4)]

    def verify(self, problem: Problem, answer: Completion) -> Verdict:
        return Verdict(0.5, Status.WRONG, note=problem.row["answer"])


def test_task_given_as_a_class_trains_and_evaluates(lab):
    class Local(Echo):
        pass

    done = run(lab.spec(), root=lab.root, tasks={"train": [{"task": Local}], "eval": [{"task": Echo}]}, train__steps=1)
    assert done.spec["tasks"]["train"][0]["task"] == "object:Local"
    assert done.metrics()[-1]["reward"] == 0.5
    with pytest.raises(UsageError, match=r"Python object Local.*resume=…, tasks__train=…"):
        run(resume=done, root=lab.root)


# ---- hooks


def test_hooks_given_as_functions_are_called_after_those_of_the_spec(tmp_path):
    seen: list[int] = []

    def note(moment: HookContext) -> dict[str, float]:
        seen.append(moment.step)
        return {"noted": moment.metrics["doubled"]}

    spec = {**CONTROL, "hooks": [lambda moment: {"doubled": 2.0 * moment.step}]}
    done = run(spec, root=tmp_path, hooks=[note])
    assert done.spec["hooks"] == ["object:_lambda_", "object:note"]
    assert [row["noted"] for row in done.metrics()] == [2.0 * step for step in seen]
    with pytest.raises(UsageError, match=r"hooks: .*Python object _lambda_.*resume=…, hooks=…"):
        run(resume=done, root=tmp_path, train__frames=128, allow=["train.frames"])


def test_hooks_travel_to_the_processes_of_two_seeds_or_are_refused(tmp_path):
    two = [lambda moment: {"one": 1.0}, lambda moment: {"two": 2.0}]
    done = run(CONTROL, root=tmp_path, hooks=two, max_session=2)
    assert {(row["seed"], row["one"], row["two"]) for row in done.metrics()} == {(0, 1.0, 2.0), (1, 1.0, 2.0)}
    lock = threading.Lock()
    with pytest.raises(PalestraError, match=r"Cannot send .*_lambda_.* to another process"):
        run(CONTROL, root=tmp_path / "none", hooks=[lambda moment: lock.locked() or None], max_session=2)
    assert not (tmp_path / "none").exists()


# ---- rows


def test_rows_train_as_their_file_does_and_need_no_object_to_resume(tmp_path):
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(20)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_file = run(SFT, root=tmp_path, data__train={"rows": {"path": str(file)}})
    given = run(SFT, root=tmp_path, data=iter(rows))
    assert [row["loss"] for row in given.metrics()] == [row["loss"] for row in from_file.metrics()]
    path = Path(given.spec["data"]["train"]["rows"]["path"])
    assert path.parent == tmp_path / ".data"
    more = run(resume=given, root=tmp_path, train__steps=3, allow=["train.steps"])
    assert more.metrics()[-1]["step"] == 3
    assert [one.name for one in palestra.list_runs(tmp_path)] == ["digits", "digits"]


def test_rows_of_post_training_are_prompts_and_columns_of_the_reward(lab):
    def wants(completion: str, letter: str, prompt: str) -> float:
        return float(letter == prompt[0]) * 3

    rows = [{"prompt": f"{letter}=", "letter": letter} for letter in "abcd"]
    spec = lab.spec(train__steps=1)
    spec["tasks"] = {"train": [{"args": {"format": "plain"}}]}
    done = run(spec, root=lab.root, data=rows, reward=wants, name="rows")
    assert done.metrics()[-1]["reward"] == 3.0
    with pytest.raises(PalestraError, match="`answer` is null: without the right answers"):
        run(spec, root=lab.root, data=rows, name="rows")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "data: there are no rows"),
        ([{"prompt": "1", "completion": "2"}, "text"], "data: row 2 is of type str"),
        ([{"prompt": object()}], "data: row 1 cannot be written as JSON"),
    ],
)
def test_rows_that_are_none_are_refused(tmp_path, rows, told):
    with pytest.raises(UsageError, match=told):
        run(SFT, root=tmp_path, data=rows)
    with pytest.raises(UsageError, match="kind control does not train on rows"):
        run(CONTROL, root=tmp_path, data=[{"prompt": "1"}])
    assert not list(tmp_path.iterdir())


# ---- what a notebook shows


def test_run_shows_itself_as_html_with_its_curve(tmp_path, pictures):
    html = run({**CONTROL, "name": "shown"}, root=tmp_path)._repr_html_()
    assert "<th>state</th><td>done</td>" in html
    assert 'src="data:image/png;base64,iVBOR' in html


def test_dataframe_has_the_rows_of_all_seeds(tmp_path):
    pandas = pytest.importorskip("pandas")
    done = run({**CONTROL, "max_session": 2}, root=tmp_path)
    frame = done.dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.groupby("seed").size().to_dict() == {0: 1, 1: 1}
    assert list(done.dataframe(seed=1)["seed"]) == [1]


def test_dataframe_without_pandas_says_what_to_do(tmp_path, monkeypatch):
    done = run(CONTROL, root=tmp_path)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        done.dataframe()
