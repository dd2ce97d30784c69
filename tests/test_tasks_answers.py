"""Questions of the user's own: columns as they are, three ways to compare, worked examples, errors with rows."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from palestra.errors import MissingExtra, UsageError
from palestra.spec.tasks import TaskUse
from palestra.tasks.sets import questions
from palestra.tasks.task import Completion, Status, make_task

SVAMP = [
    {"ID": "chal-1", "Body": "There are 87 oranges.", "Question": "How many oranges?", "Answer": 87.0},
    {"ID": "chal-2", "Body": "He has 3 and eats 4.", "Question": "How many are left?", "Answer": -1.0},
]
COLUMNS = {"question": ["Body", "Question"], "answer": "Answer", "id": "ID"}


@pytest.fixture
def svamp(tmp_path: Path) -> str:
    (tmp_path / "svamp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SVAMP))
    return str(tmp_path / "svamp.jsonl")


def answers(source: str, **args):
    return make_task("answers", {"source": source, **args}, "mine")


def test_problems_put_columns_together_and_take_their_ids(svamp):
    task = answers(svamp, format="plain", **COLUMNS)
    first, second = task.problems("test")
    assert (first.id, second.id) == ("mine/test/chal-1", "mine/test/chal-2")
    assert first.prompt == "Q: There are 87 oranges. How many oranges?\nA:"
    assert task.verify(first, Completion(" 87\n\nQ: 3?")).status == Status.CORRECT
    assert task.verify(second, Completion("The answer is 1.")).status == Status.WRONG
    assert task.verify(second, Completion("The answer is -1.")).parts == {"strict": 1.0, "flexible": 1.0}


def test_problems_of_parquet_with_columns_inside_columns(tmp_path):
    row = {
        "prompt": [{"role": "user", "content": "How many?"}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    columns = {"question": ["prompt.0.content"], "answer": "reward_model.ground_truth"}
    (problem,) = answers(str(tmp_path / "rows.parquet"), **columns).problems("train")
    assert problem.row["answer"] == "34"
    assert problem.prompt[0]["content"].startswith("How many?")
    with pytest.raises(UsageError, match=r"mine, split train, row 1: there is no 'prompt.1.content'"):
        answers(str(tmp_path / "rows.parquet"), **{**columns, "question": ["prompt.1.content"]}).problems("train")


def test_problems_with_shots_show_solutions_or_answers(tmp_path):
    for split, start in (("train", 0), ("test", 10)):
        rows = [{"question": f"{n}?", "answer": str(n), "how": f"It is {n}."} for n in range(start, start + 3)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = answers(str(tmp_path), format="plain", shots=2).problems("test")[0]
    assert first.prompt == "Q: 0?\nA: The answer is 0.\n\nQ: 1?\nA: The answer is 1.\n\nQ: 10?\nA:"
    told = answers(str(tmp_path), format="plain", shots=1, solution="how", system="Count.").problems("train")
    assert told[0].prompt == "Count.\n\nQ: 1?\nA: It is 1.\nThe answer is 1.\n\nQ: 0?\nA:"


def test_problems_are_put_as_the_template_says(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "0?", "answer": "0"}\n{"question": "1?", "answer": "1"}\n')
    own = answers(str(tmp_path)).problems("train")[0].prompt
    assert "\\boxed{}" in own[-1]["content"]
    told = answers(str(tmp_path), template="Say {question} Now {}!", shots=1).problems("train")[0].prompt
    assert [message["content"] for message in told] == ["Say 1? Now {}!", "The answer is \\boxed{1}.", "Say 0? Now {}!"]
    plain = answers(str(tmp_path), template="<{question}>", format="plain").problems("train")[0].prompt
    assert plain == "<0?>"
    use = TaskUse.model_validate({"task": "answers", "args": {"source": "x", "template": "no place for it"}})
    assert use.all_conflicts()[0].path == ("args", "template")
    assert "{question" in use.all_conflicts()[0].reason.replace("\\", "")


@pytest.mark.parametrize(
    ("compare", "answer", "right", "wrong"),
    [
        ("number", "1/2", ["0.5", r"\boxed{\frac12}", "The answer is 2/4."], ["-0.5", "2", "half"]),
        ("math", r"x^2-1", [r"\boxed{(x-1)(x+1)}", "The answer is $x^2 - 1$."], [r"\boxed{x^2+1}", "1"]),
        (
            "words",
            "New York",
            ["The answer is New York.", "It is here:\nnew york", r"\boxed{\text{New York}}"],
            ["York"],
        ),
        ("words", "दिन", ["दिन।", r"\boxed{दिन}"], ["दान", "दीन"]),  # vowels after the first are marks
        ("words", "São Paulo", ["SA\u0303O PAULO"], ["Sao Paulo"]),
    ],
)
def test_judge_compares_as_it_is_told(tmp_path, compare, answer, right, wrong):
    if compare == "math":
        pytest.importorskip("math_verify", reason="needs the extra eval")
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "?", "answer": answer}) + "\n")
    task = answers(str(tmp_path), compare=compare)
    (problem,) = task.problems("test")
    assert [task.verify(problem, Completion(text)).status for text in right] == [Status.CORRECT] * len(right)
    assert Status.CORRECT not in [task.verify(problem, Completion(text)).status for text in wrong]
    assert task.verify(problem, Completion("")).status == Status.UNPARSABLE
    assert task.verify(problem, Completion(problem.row["solution"])).parts == {"strict": 1.0, "flexible": 1.0}


def test_problems_that_do_not_fit_are_errors_with_what_to_do(tmp_path, svamp):
    with pytest.raises(UsageError, match="row 1: there is no 'question'; the row has ID, Body, Question, Answer"):
        answers(svamp).problems("test")
    (tmp_path / "same.jsonl").write_text('{"question": "?", "answer": 1, "Kind": "a"}\n' * 2)
    with pytest.raises(UsageError, match="two rows have the same 'Kind'"):
        answers(str(tmp_path / "same.jsonl"), id="Kind").problems("test")
    (tmp_path / "blue.jsonl").write_text('{"question": "?", "answer": "blue"}\n')
    with pytest.raises(UsageError, match="the answer 'blue' is not a number; `compare` can be math or words"):
        answers(str(tmp_path / "blue.jsonl")).problems("test")
    (tmp_path / "sign.jsonl").write_text('{"question": "?", "answer": "+"}\n')
    with pytest.raises(UsageError, match="the answer '\\+' has no letters and no digits"):
        answers(str(tmp_path / "sign.jsonl"), compare="words").problems("test")
    with pytest.raises(ValidationError, match="source"):
        make_task("answers")
    (conflict,) = TaskUse(task="answers", args={"source": svamp, "colum": "x"}).all_conflicts()
    assert conflict.path == ("args", "colum")
    assert "it has stop, format" in conflict.reason


def test_answers_of_mathematics_without_math_verify_name_the_extra(svamp, monkeypatch):
    monkeypatch.setattr(questions, "find_spec", lambda name: None)
    assert answers(svamp, **COLUMNS).problems("test")
    with pytest.raises(MissingExtra, match=r"palestra\[eval\]"):
        answers(svamp, compare="math", **COLUMNS)
