"""GSM8K: prompts in both formats, worked examples, strict and flexible extraction, and what must not count."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.errors import UsageError
from palestra.spec.tasks import TaskUse
from palestra.tasks.task import Completion, Problem, Status, Task, make_task

ROWS = [
    {"question": "Two and two?", "answer": "It is 2+2=<<2+2=4>>4 things.\n#### 4"},
    {"question": "A thousand times 2?", "answer": "It is <<1000*2=2000>>2000.\n#### 2,000"},
    {"question": "3 less than 1?", "answer": "1-3 = -2\n#### -2"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "Five?", "answer": "#### 5"}) + "\n")
    return tmp_path


def gsm8k(folder: Path, **args) -> Task:
    return make_task("gsm8k", {"source": str(folder), **args})


def test_problems_in_plain_text_are_questions_to_go_on_from(folder):
    task = gsm8k(folder, format="plain")
    first, second, _ = task.problems("train")
    assert first.id == "gsm8k/train/0"
    assert first.prompt == "Q: Two and two?\nA:"
    assert first.row["answer"] == "4"
    assert second.row["answer"] == "2,000"
    assert first.row["solution"] == "It is 2+2=4 things.\nThe answer is 4."
    assert {"Q:", "Question:"} <= set(task.stops)


def test_problems_in_a_conversation_ask_for_a_box_and_have_no_stops(folder):
    task = gsm8k(folder, system="You are brief.")
    first = task.problems("train")[0]
    assert [message["role"] for message in first.prompt] == ["system", "user"]
    assert first.prompt[1]["content"].startswith("Two and two?")
    assert r"\boxed{}" in first.prompt[1]["content"]
    assert first.row["solution"].endswith(r"The answer is \boxed{4}.")
    assert task.stops == ()
    assert gsm8k(folder, stop=["END"]).stops == ("END",)


def test_part_of_a_split_is_the_rows_that_python_would_slice(folder):
    task = gsm8k(folder, format="plain")
    everything = list(task.problems("train"))
    for split, rows in (
        ("train[:-1]", everything[:-1]),
        ("train[-1:]", everything[-1:]),
        ("train[1:2]", everything[1:2]),
    ):
        assert list(task.part(split)) == rows
    assert list(task.part("train")) == everything
    assert task.part("train[-1:]")[0].id == "gsm8k/train/2"  # as in the whole split


@pytest.mark.parametrize("split", ["dev[:1]", "train[1]", "train[a:]", "train[:1"])
def test_part_of_an_unknown_split_is_refused(split):
    (problem,) = TaskUse(task="gsm8k", split=split).all_conflicts()
    assert "expected one of train, test" in problem.reason


def test_problems_with_shots_never_show_their_own_answer(folder):
    task = gsm8k(folder, format="plain", shots=2)
    (asked,) = task.problems("test")
    shown = "Q: Two and two?\nA: It is 2+2=4 things.\nThe answer is 4.\n\n"
    shown += "Q: A thousand times 2?\nA: It is 2000.\nThe answer is 2,000.\n\n"
    assert asked.prompt == shown + "Q: Five?\nA:"
    for problem in task.problems("train"):
        assert problem.prompt.count(problem.row["question"]) == 1
        assert problem.prompt.count("Q:") == 3
    conversation = gsm8k(folder, shots=1).problems("test")[0].prompt
    assert [message["role"] for message in conversation] == ["user", "assistant", "user"]


def test_problems_with_an_answer_that_is_no_number_name_the_row(folder):
    (folder / "test.jsonl").write_text(json.dumps({"question": "?", "answer": "#### who knows"}) + "\n")
    with pytest.raises(UsageError, match="gsm8k, split test, row 1: the answer 'who knows' is not a number"):
        gsm8k(folder).problems("test")


@pytest.mark.parametrize(
    ("reference", "text", "strict", "flexible"),
    [
        ("18", "The answer is 18.", 1, 1),
        ("18", "She has 9 + 9 = 18.\n#### 18", 1, 1),
        ("18", r"so \boxed{18}.", 1, 1),
        ("18", r"\boxed{18 \text{ dollars}}", 1, 1),
        ("18", r"\boxed{x = 18}", 1, 1),
        ("18", "The answer is $18.00.", 1, 1),
        ("18", "I get 18 as the answer", 0, 1),
        ("18", "9 + 9 = 18", 0, 1),
        ("18", "The answer is 18. It took 3 steps.", 1, 1),
        ("18", "The answer is 17. Or 18?", 0, 0),
        ("18", "The answer is 17. No, the answer is 18.", 1, 1),
        ("18", r"\boxed{17} although 18", 0, 0),
        ("18", r"\boxed{\sqrt{18}}", 0, 0),
        ("18", r"18 of them, \boxed{2^{18}}", 0, 0),
        ("18", r"\boxed{\underline{18}}", 0, 1),
        ("6", "The answer is 6.0", 1, 1),
        ("2,000", "The answer is 2000", 1, 1),
        ("2000", "#### 2,000", 1, 1),
        ("-2", "The answer is -2.", 1, 1),
        ("-2", "The answer is −2.", 1, 1),
        ("-2", "The answer is －2.", 1, 1),
        ("2", r"\boxed{－2}", 0, 0),
        ("-2", "The answer is 2.", 0, 0),  # signs count, both ways
        ("2", "The answer is -2.", 0, 0),
        ("2", "5 - 3 = -2", 0, 0),
        ("15", "It is 10-15", 0, 1),
        ("50", "It rose by 50%.", 0, 1),
        ("18", "The answer is 18\n\nQuestion: What is 3 + 4? The answer is 7.", 1, 1),
        ("7", "The answer is 18\n\nQuestion: What is 3 + 4? The answer is 7.", 0, 0),
        ("18", "It is 18.\n\nQ: 7", 0, 1),
    ],
)
def test_judge_by_both_rules(folder, reference, text, strict, flexible):
    problem = Problem("gsm8k/test/0", "", {"answer": reference})
    for extraction, right in (("strict", strict), ("flexible", flexible)):
        verdict = gsm8k(folder, format="plain", extraction=extraction).verify(problem, Completion(text))
        assert verdict.parts == {"strict": strict, "flexible": flexible}
        assert (verdict.score, verdict.status == Status.CORRECT) == (right, bool(right))


@pytest.mark.parametrize("text", ["", "who knows", r"\boxed{", r"\boxed{}", "The answer is blue."])
def test_judge_without_a_number_is_unparsable(folder, text):
    verdict = gsm8k(folder).verify(Problem("gsm8k/test/0", "", {"answer": "5"}), Completion(text))
    assert (verdict.score, verdict.status) == (0.0, Status.UNPARSABLE)


def test_judge_of_a_number_that_is_only_somewhere_is_unparsable_when_strict(folder):
    task = gsm8k(folder, extraction="strict")
    verdict = task.verify(Problem("gsm8k/test/0", "", {"answer": "5"}), Completion("so 5"))
    assert (verdict.status, verdict.parts) == (Status.UNPARSABLE, {"strict": 0.0, "flexible": 1.0})


def test_task_names_are_of_the_run(folder):
    task = make_task("gsm8k", {"source": str(folder)}, "easy")
    assert task.problems("test")[0].id == "easy/test/0"
    assert not task.isolated


def test_numbers_are_verified_without_the_extras_eval_and_serve():
    code = (
        "import sys; sys.modules |= dict.fromkeys(('sympy', 'math_verify', 'httpx'))\n"
        "import palestra.tasks.rewards.llm_judge\n"
        "from palestra.tasks.task import Completion, Problem, make_task\n"
        "task = make_task('gsm8k')\n"
        "print(task.verify(Problem('gsm8k/test/0', 'Five?', {'answer': '5'}), Completion('The answer is 5.')).status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "correct\n", done.stderr
