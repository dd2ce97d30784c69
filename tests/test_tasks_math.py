"""The tasks `math` and `aime`: rows, prompts, and judging that neither hangs nor swells."""

import asyncio
import json
from pathlib import Path

import pytest

from palestra.errors import MissingExtra, UsageError
from palestra.spec.tasks import TaskUse
from palestra.tasks.sets import questions
from palestra.tasks.task import Completion, Problem, Status, make_task
from palestra.tasks.verify.workers import Verifiers

pytest.importorskip("math_verify", reason="needs the extra eval")

ROWS = [
    {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{2}$."},
    {"problem": "2+1?", "level": "Level 5", "type": "Algebra", "solution": r"It is $\boxed{3}$."},
    {"problem": "odds?", "level": "Level 5", "type": "Counting & Probability", "solution": r"$\boxed{\frac12}$"},
    {"problem": "3+1?", "level": "Level ?", "type": "Algebra", "solution": r"It is \fbox{4}."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def math_task(folder: Path, **args):
    return make_task("math", {"source": str(folder), **args})


def test_math_problems_have_ids_that_do_not_depend_on_filters(folder):
    every = {problem.id: problem for problem in math_task(folder).problems("train")}
    assert list(every) == [
        "math/train/algebra/0",
        "math/train/algebra/1",
        "math/train/counting_and_probability/0",
        "math/train/algebra/2",
    ]
    hard = math_task(folder, levels=[5]).problems("train")
    assert [problem.id for problem in hard] == ["math/train/algebra/1", "math/train/counting_and_probability/0"]
    odds = math_task(folder, subjects=["counting_and_probability"]).problems("train")
    assert [problem.id for problem in odds] == ["math/train/counting_and_probability/0"]
    assert [every[problem.id] for problem in (*hard, *odds)] == [*hard, *odds]
    with pytest.raises(UsageError, match="no subject algebr; there is algebra, counting_and_probability"):
        math_task(folder, subjects=["algebr"]).problems("train")


def test_math_problems_in_both_formats_ask_and_stop_as_they_should(folder):
    (asked, *_) = math_task(folder, system="Be brief.").problems("test")
    assert [message["role"] for message in asked.prompt] == ["system", "user"]
    assert asked.prompt[1]["content"].startswith("1+1?")
    assert r"\boxed{}" in asked.prompt[1]["content"]
    assert math_task(folder).stops == ()
    plain = math_task(folder, format="plain", shots=1)
    first, second = plain.problems("test")
    assert second.prompt == "Problem:\n1+1?\n\nSolution: It is $\\boxed{2}$.\n\nProblem:\n2+1?\n\nSolution:"
    assert "3+1" not in first.prompt
    assert first.prompt.startswith("Problem:\n2+1?")  # not its own example
    assert "Problem:" in plain.stops
    assert first.row == {
        "problem": "1+1?", "answer": "2", "solution": r"It is $\boxed{2}$.", "level": 1, "subject": "algebra"
    }  # fmt: skip


def test_math_row_without_an_answer_is_an_error_with_its_number(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"problem": "?", "solution": "who knows"}) + "\n")
    with pytest.raises(UsageError, match="math, split train, row 1: there is no 'answer'"):
        math_task(tmp_path).problems("train")


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (r"\boxed{\frac{1}{2}}", True, True),
        ("The answer is 1/2", True, True),
        ("The answer is 0.5.\n\nProblem:\nWhat is 7?", True, True),
        ("so we get $x = 0.5$", False, True),
        ("I get 1/2", False, True),
        ("The answer is that it is 1/2 of them", True, True),
        (r"\boxed{-\frac{1}{2}}", False, False),
        ("Final Answer: The final answer is $-1/2$. I hope it is correct.", False, False),
        (r"\boxed{\frac{1}{2}", False, True),  # cut off, so no box, but a number
        ("no idea", False, False),
        ("", False, False),
    ],
)
def test_math_judge_by_both_rules(folder, text, strict, flexible):
    for extraction, right in (("strict", strict), ("flexible", flexible)):
        task = math_task(folder, format="plain", extraction=extraction)
        problem = task.problems("train")[2]
        verdict = task.verify(problem, Completion(text))
        assert verdict.parts == {"strict": float(strict), "flexible": float(flexible)}
        assert (verdict.score, verdict.status == Status.CORRECT) == (float(right), right)
    assert (verdict.status == Status.UNPARSABLE) == (text in ("no idea", ""))


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("5", r"\boxed{5\text{ or }6}"),
        ("6", r"\boxed{5\text{ or }6}"),
        ("17", "The answer is 17 and 18."),
        ("18", r"\boxed{17=18}"),
        ("18", r"\boxed{17} or \boxed{18}"),
        ("18", r"\boxed{not 18}"),
        ("18", "the answer is not 18"),
        ("18", "The answer isn't 18."),
        ("5", "The answer is $5$ or $6$"),
    ],
)
def test_math_judge_of_a_hedge_or_a_denial_is_wrong(folder, gold, text):
    assert math_task(folder).verify(Problem("math/test/0", "", {"answer": gold}), Completion(text)).score == 0.0


def test_math_judge_of_an_echo_of_the_question_is_wrong(tmp_path):
    rows = [{"problem": "What is $3^4+2^5$?", "answer": "113"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"question": ["problem"], "compare": "math"}
    for task in (
        math_task(tmp_path),
        make_task("aime", {"source": str(tmp_path)}),
        make_task("answers", {"source": str(tmp_path), **columns}),
    ):
        (problem,) = task.problems("test")
        assert task.verify(problem, Completion(r"\boxed{3^4+2^5}")).status == Status.WRONG
        assert task.verify(problem, Completion(r"\boxed{3^4+2^5=113}")).status == Status.CORRECT
        assert task.verify(problem, Completion(r"\boxed{81+32}")).status == Status.CORRECT


SWELLS = (r"5+2^{10^{11}}-2^{10^{11}}", r"\sqrt{" * 25 + "5" + "}" * 25, "{" * 999)


@pytest.mark.parametrize("hangs", [r"9^{9^{9^9}}", pytest.param(r"\prod_{k=1}^{10^{9}} k", marks=pytest.mark.slow)])
def test_math_judge_of_answers_that_hang_or_swell_is_wrong_or_late_and_others_are_served(hangs):
    bad = (hangs, *SWELLS)
    texts = [rf"\boxed{{{text}}}" for text in bad for text in (text, "2+3")]
    problem = Problem("math/test/0", "", {"answer": "5"})

    async def all_at_once(judges: Verifiers):
        return await asyncio.gather(*(judges.verify(problem, Completion(text)) for text in texts))

    with Verifiers([TaskUse(task="math")], workers=2, timeout=2.0) as judges:
        verdicts = asyncio.run(all_at_once(judges))  # 2+3 takes a fiftieth of the limit
    assert [verdict.status for verdict in verdicts[1::2]] == [Status.CORRECT] * len(bad)
    assert {verdict.status for verdict in verdicts[::2]} <= {Status.WRONG, Status.TIMEOUT, Status.UNPARSABLE}
    assert {verdict.score for verdict in verdicts[::2]} == {0.0}


def test_math_without_math_verify_names_the_extra(monkeypatch):
    monkeypatch.setattr(questions, "find_spec", lambda name: None)
    for task in ("math", "aime"):
        with pytest.raises(MissingExtra, match=r"palestra\[eval\]"):
            make_task(task)


def test_aime_has_a_test_split_alone(tmp_path):
    rows = [{"id": 60, "problem": "How many?", "answer": "033"}, {"id": 61, "problem": "And now?", "answer": 204}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = make_task("aime", {"source": str(tmp_path)})
    assert task.splits == ("test",)
    first, second = task.problems("test")
    assert (first.id, second.id) == ("aime/test/60", "aime/test/61")
    assert task.verify(first, Completion(r"\boxed{33}")).status == Status.CORRECT
    assert task.verify(second, Completion(r"\boxed{\frac{408}{2}}")).status == Status.CORRECT
    assert task.verify(second, Completion(r"\boxed{-204}")).status == Status.WRONG
    with pytest.raises(UsageError, match="no train split"):
        make_task("aime", {"shots": 2})
