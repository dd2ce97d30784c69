"""The tasks `mbpp` and `humaneval`: prompts, splits and verdicts, on rows of their form and on the real ones."""

import asyncio
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import UsageError
from palestra.spec.tasks import TaskUse
from palestra.tasks.sets.code import CodeArgs, shared_sandbox
from palestra.tasks.task import Completion, Problem, Status, Task, Verdict, make_task
from palestra.tasks.verify.workers import Verifiers

DATA = Path(__file__).parents[1] / os.environ.get("PALESTRA_DATA", "../shared/data")
LONG = 60.0  # seconds for right programs, on a busy machine
ADD = {
    "task_id": 602,
    "text": "Write a function that adds one.",
    "code": "import math\r\ndef add_one(a):\r\n  return math.floor(a) + 1",
    "test_setup_code": "",
    "test_list": ["assert add_one(1) == 2", "assert add_one(-1) == math.floor(0.5)", "assert add_one(5) == 6"],
    "challenge_test_list": [],
}
NODES = {
    "task_id": 603,
    "text": "Write a function that reads a node.",
    "code": "class Node:\n  def __init__(self, v): self.v = v\ndef read(n): return n.v",
    "test_setup_code": "node = Node(3)",
    "test_list": ["assert read(node) == 3"],
    "challenge_test_list": [],
}
SHOWN = [{**ADD, "task_id": number, "text": f"Task {number}."} for number in (2, 3, 4)]
HALVE = {
    "task_id": "HumanEval/7",
    "prompt": 'def twice(x):\n    return 2 * x\n\n\ndef halve(x):\n    """ Half of an even number.\n    """\n',
    "canonical_solution": "    return x // 2\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    for n in range(5):\n        assert candidate(twice(n)) == n\n",
    "entry_point": "halve",
}


def rows(path: Path, *given: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return str(path)


def mbpp(tmp_path: Path, **args: Any) -> Task:
    return make_task("mbpp", {"source": rows(tmp_path / "mbpp.jsonl", *SHOWN, ADD, NODES), "timeout": LONG, **args})


def humaneval(tmp_path: Path, **args: Any) -> Task:
    return make_task("humaneval", {"source": rows(tmp_path / "he.jsonl", HALVE), "timeout": LONG, **args})


def judged(task: Task, problem: Problem, text: str) -> Verdict:
    return task.verify(problem, Completion(text))


def test_mbpp_prompt_is_that_of_lm_eval(tmp_path: Path):
    (problem,) = mbpp(tmp_path).problems("train")
    question = (
        "You are an expert Python programmer, and here is your task: {} Your code should pass these tests:\n\n"
        "assert add_one(1) == 2\nassert add_one(-1) == math.floor(0.5)\nassert add_one(5) == 6\n[BEGIN]\n"
    )
    assert problem.id == "mbpp/train/602"
    assert problem.prompt == question.format(ADD["text"])
    task = mbpp(tmp_path, few_shot=2)
    shown = "".join(f"{question.format(f'Task {n}.')}{ADD['code']}\n[DONE]\n\n" for n in (2, 3))
    assert task.problems("train")[0].prompt == shown + question.format(ADD["text"])
    assert task.stops == ("[DONE]",)
    assert mbpp(tmp_path, stop=[]).stops == ()


def test_mbpp_in_a_conversation_shown_problems_are_turns(tmp_path: Path):
    prompt = mbpp(tmp_path, few_shot=1, format="chat").problems("train")[0].prompt
    assert [message["role"] for message in prompt] == ["user", "assistant", "user"]
    assert prompt[1]["content"] == f"```python\n{ADD['code']}\n```"
    assert "[BEGIN]" not in prompt[2]["content"]


def test_mbpp_weak_rows_are_left_out_of_training_unless_asked_for(tmp_path: Path):
    assert [problem.id for problem in mbpp(tmp_path).problems("train")] == ["mbpp/train/602"]
    task = mbpp(tmp_path, weak=True)
    problem = task.problems("train")[1]
    assert "Node" in problem.row["weak"]
    verdict = judged(task, problem, NODES["code"])
    assert (verdict.status, verdict.sandbox) == (Status.CORRECT, "weak")
    assert judged(task, problem, "import os; os._exit(0)").status == Status.WRONG


@pytest.mark.parametrize(
    ("text", "status", "tests"),
    [
        ("def add_one(a):\n    return a + 1\n", Status.CORRECT, 1.0),
        (
            "```python\ndef add_one(a):\n    return helper(a)\n\ndef helper(a):\n    return a + 1\n```",
            Status.CORRECT,
            1.0,
        ),
        ("def add_one(a):\n    return 2\n", Status.WRONG, 1 / 3),
        ("def other(a):\n    return a + 1\n", Status.WRONG, 0.0),
        ("import sys\nsys.exit(0)", Status.WRONG, 0.0),
        ("class A:\n    def __eq__(self, o): return True\ndef add_one(a): return A()", Status.WRONG, 0.0),
        ("I do not know.", Status.UNPARSABLE, 0.0),
        ("", Status.UNPARSABLE, 0.0),
    ],
)
def test_mbpp_answer_is_judged_by_its_tests(tmp_path: Path, text: str, status: Status, tests: float):
    task = mbpp(tmp_path)
    verdict = judged(task, task.problems("train")[0], text)
    assert (verdict.status, verdict.parts["tests"]) == (status, pytest.approx(tests))
    assert verdict.score == (1.0 if status is Status.CORRECT else 0.0)
    assert verdict.sandbox == (None if status is Status.UNPARSABLE else shared_sandbox("strict").start())


def test_mbpp_answer_hangs_it_is_a_timeout(tmp_path: Path):
    task = mbpp(tmp_path, timeout=0.5)
    verdict = judged(task, task.problems("train")[0], "def add_one(a):\n    while True: pass")
    assert (verdict.status, verdict.score) == (Status.TIMEOUT, 0.0)
    assert verdict.seconds >= 0.5


def test_tests_of_a_row_are_at_fault_the_verdict_is_error(tmp_path: Path):
    broken = {**ADD, "test_list": ["assert add_one(1) == undefined_by_anyone_1()"], "code": "def add_one(a): return a"}
    source = rows(tmp_path / "a.jsonl", {**broken, "code": "", "test_list": ["import nosuchmodule\nassert add_one(1)"]})
    task = make_task("mbpp", {"source": source, "timeout": LONG})
    assert judged(task, task.problems("train")[0], "def add_one(a): return 1").status == Status.ERROR


def test_mbpp_sanitised_rows_are_read(tmp_path: Path):
    given = {
        "source_file": "a",
        "task_id": 11,
        "prompt": "Do.",
        "code": "def g(a): return a",
        "test_imports": ["import math"],
    }
    (tmp_path / "sanitized-mbpp.json").write_text(
        json.dumps([{**given, "test_list": ["assert math.isclose(g(2), 2)"]}])
    )
    task = make_task("mbpp", {"source": str(tmp_path), "timeout": LONG})
    (problem,) = task.problems("test")
    assert problem.row["entry_points"] == ["g"]
    assert judged(task, problem, "def g(a): return a").status == Status.CORRECT


def test_rows_of_another_form_are_refused_with_their_number(tmp_path: Path):
    source = rows(tmp_path / "a.jsonl", ADD, {"question": "a", "answer": "b"})
    with pytest.raises(UsageError, match="row 2"):
        make_task("mbpp", {"source": source}).problems("train")
    source = rows(tmp_path / "b.jsonl", {**ADD, "test_list": ["assert ("]})
    with pytest.raises(UsageError, match="not Python"):
        make_task("mbpp", {"source": source}).problems("train")
    source = rows(tmp_path / "c.jsonl", ADD)
    with pytest.raises(UsageError, match="few_shot"):
        make_task("mbpp", {"source": source, "few_shot": 1}).problems("train")
    source = rows(tmp_path / "d.jsonl", {**ADD, "test_list": []})
    with pytest.raises(UsageError, match="test_list"):
        make_task("mbpp", {"source": source}).problems("train")
    source = rows(tmp_path / "e.jsonl", {"task_id": "a"})
    with pytest.raises(UsageError, match="prompt"):
        make_task("humaneval", {"source": source}).problems("test")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("    return x // 2\n", Status.CORRECT),
        ("def halve(x):\n    return x // 2\n", Status.CORRECT),
        ("```python\ndef halve(x):\n    return x // 2\n```", Status.CORRECT),
        ("    return x\n", Status.WRONG),
        ("    raise SystemExit\n", Status.WRONG),
        ("    pass\nimport os\nos._exit(0)\n", Status.WRONG),
        ("    return x\ndef twice(n):\n    return n\n", Status.WRONG),  # the tests have the prompt's own
        ("", Status.UNPARSABLE),
    ],
)
def test_humaneval_answer_is_judged_by_the_check(tmp_path: Path, text: str, status: Status):
    task = humaneval(tmp_path)
    (problem,) = task.problems("test")
    assert problem.id == "humaneval/test/HumanEval/7"
    assert problem.prompt == HALVE["prompt"]
    assert judged(task, problem, text).status == status


def test_humaneval_stops_are_those_of_lm_eval_and_none_in_a_conversation(tmp_path: Path):
    assert humaneval(tmp_path).stops == ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    chat = humaneval(tmp_path, format="chat")
    assert chat.stops == ()
    assert humaneval(tmp_path, format="chat", stop=["a"]).stops == ("a",)
    ((message,),) = (problem.prompt for problem in chat.problems("test"))
    assert HALVE["prompt"].rstrip() in message["content"]


def test_answers_are_judged_in_workers_hangs_and_cheats_do_not_stop_it(tmp_path: Path):
    source = rows(tmp_path / "mbpp.jsonl", ADD)
    use = TaskUse(task="mbpp", args={"source": source, "timeout": 2.0})
    (problem,) = make_task("mbpp", use.args).problems("train")
    texts = [
        "def add_one(a): return a + 1",
        "def add_one(a):\n    import time; time.sleep(1e4)",
        "import os; os._exit(0)",
        "import os; os.kill(-1, 9)",
    ]

    async def main() -> list[Verdict]:
        with Verifiers([use], workers=2, timeout=60.0) as judges:
            return await asyncio.gather(*(judges.verify(problem, Completion(text)) for text in texts * 2))

    found = [verdict.status for verdict in asyncio.run(main())]
    assert found == [Status.CORRECT, Status.TIMEOUT, Status.WRONG, Status.WRONG] * 2


def test_args_of_code_tasks_are_checked():
    assert not TaskUse(task="humaneval", args={"sandbox": "weak"}).all_conflicts()
    assert TaskUse(task="mbpp", args={"sandbox": "none"}).all_conflicts()
    assert TaskUse(task="mbpp", args={"few_shot": 4}).all_conflicts()
    assert TaskUse(task="humaneval", split="train").all_conflicts()
    assert CodeArgs().timeout == 5.0


def real(name: str, **args: Any) -> Task:
    if not (DATA / name).is_dir():
        pytest.skip(f"needs {name} under PALESTRA_DATA")
    return make_task(name, {"source": str(DATA / name), "timeout": LONG, **args})


def all_judged(task: Task, pairs: list[tuple[Problem, str]]) -> list[Verdict]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda pair: judged(task, *pair), pairs))


def test_humaneval_reference_solutions_are_judged_all_pass():
    task = real("humaneval")
    problems = list(task.problems("test"))
    assert len(problems) == 164
    assert not any(problem.row["weak"] for problem in problems)
    verdicts = all_judged(task, [(problem, problem.row["solution"]) for problem in problems])
    assert [p.id for p, verdict in zip(problems, verdicts, strict=True) if verdict.status != Status.CORRECT] == []


def test_mbpp_splits_are_those_of_the_paper():
    task = real("mbpp", weak=True)
    problems = {split: task.problems(split) for split in task.splits}
    assert {split: len(found) for split, found in problems.items()} == {
        "train": 374, "validation": 90, "test": 500, "prompt": 10,
    }  # fmt: skip
    weak = [problem.id for found in problems.values() for problem in found if problem.row["weak"]]
    assert weak == ["mbpp/train/601", "mbpp/train/927", "mbpp/validation/533", "mbpp/test/367"]
    assert len(real("mbpp").problems("train")) == 372
    sanitised = make_task("mbpp", {"source": str(DATA / "mbpp" / "sanitized-mbpp.json"), "weak": True})
    assert sum(len(sanitised.problems(split)) for split in task.splits) == 427


@pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_mbpp_reference_solutions_are_judged_nearly_all_pass(step: int):
    task = real("mbpp", weak=True)
    problems = [problem for split in task.splits for problem in task.problems(split)][::step]
    verdicts = all_judged(task, [(problem, problem.row["solution"]) for problem in problems])
    failed = {p.id: v for p, v in zip(problems, verdicts, strict=True) if v.status != Status.CORRECT}
    assert len(failed) <= 0.01 * len(problems), failed
    # The same solutions against the tests of another problem.
    wrong = all_judged(task, [(one, other.row["solution"]) for one, other in pairwise(problems)])
    counts = Counter(verdict.status for verdict in wrong)
    assert counts[Status.CORRECT] <= 0.01 * len(wrong), counts
    assert counts[Status.ERROR] == 0


@pytest.mark.slow
def test_mbpp_sanitised_reference_solutions_are_judged_nearly_all_pass():
    real("mbpp")
    task = make_task("mbpp", {"source": str(DATA / "mbpp" / "sanitized-mbpp.json"), "timeout": LONG, "weak": True})
    problems = [problem for split in task.splits for problem in task.problems(split)]
    verdicts = all_judged(task, [(problem, problem.row["solution"]) for problem in problems])
    failed = {p.id: v for p, v in zip(problems, verdicts, strict=True) if v.status != Status.CORRECT}
    assert len(failed) <= 0.01 * len(problems), failed
