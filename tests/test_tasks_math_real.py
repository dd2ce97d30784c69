"""The judges of GSM8K and MATH on all reference solutions: their own answers are right, others' of one type are not."""

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from palestra.spec.tasks import TaskUse
from palestra.tasks.task import Completion, Problem, Status, Verdict, make_task
from palestra.tasks.verify.latex.compare import same_answer
from palestra.tasks.verify.latex.extract import formulas
from palestra.tasks.verify.latex.normalize import Form, form
from palestra.tasks.verify.workers import Verifiers

DATA = Path(__file__).parents[1] / os.environ.get("PALESTRA_DATA", "../shared/data")
SEVERAL = 4  # answers of others that each answer is compared with, where that is not only a comparison of numbers

pytest.importorskip("math_verify", reason="needs the extra eval")


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gsm8k", "math", "math500", "math_eval", "dapo_math_17k"):
        if not (DATA / name).is_dir():
            pytest.skip(f"needs {name} under PALESTRA_DATA")
    monkeypatch.setenv("PALESTRA_DATA", str(DATA))


def problems(task: str, every: int, **args) -> list[Problem]:
    """Each so many-th of all splits."""
    made = make_task(task, args)
    return [problem for split in made.splits for problem in made.problems(split)][::every]


def of_others(asked: Sequence[Problem], several: int) -> Iterator[tuple[Problem, Problem]]:
    """Pairs of problems whose answers are of one type and differ in normal form."""
    draw, by_kind = random.Random(7), defaultdict(list)
    for problem in asked:
        by_kind[form(problem.row["answer"]).kind].append(problem)
    for kind, alike in by_kind.items():
        for problem in alike:
            for other in draw.choices(alike, k=1 if kind == "number" else several):
                if str(form(problem.row["answer"])) != str(form(other.row["answer"])):
                    yield problem, other


def judged(task: str, pairs: Sequence[tuple[Problem, str]]) -> list[Verdict]:
    """Verdicts on answers, from a pool where the task needs one."""

    async def all_of_them(judges: Verifiers) -> list[Verdict]:
        return await asyncio.gather(*(judges.verify(problem, Completion(text)) for problem, text in pairs))

    few = 1 if len(pairs) < 1000 else None  # a process takes two seconds to import sympy
    with Verifiers([TaskUse(task=task)], workers=few) as judges:
        return asyncio.run(all_of_them(judges))


def check_both_halves(task: str, every: int) -> None:
    asked = problems(task, every)
    own = judged(task, [(problem, problem.row["solution"]) for problem in asked])
    missed = [problem for problem, verdict in zip(asked, own, strict=True) if verdict.status != Status.CORRECT]
    print(f"{task}: {len(asked) - len(missed)} of {len(asked)} solutions right", [problem.id for problem in missed])
    assert len(missed) <= 0.005 * len(asked)
    assert all(problem.row["answer"] == "" for problem in missed)  # rows that have an empty box
    pairs = list(of_others(asked, SEVERAL))
    swapped = judged(task, [(problem, rf"\boxed{{{other.row['answer']}}}") for problem, other in pairs])
    taken = [
        (problem.id, other.id)
        for (problem, other), verdict in zip(pairs, swapped, strict=True)
        if verdict.status == Status.CORRECT
    ]
    print(f"{task}: {len(taken)} of {len(pairs)} answers of others taken", taken)
    assert len(pairs) > 0.9 * len(asked)
    assert len(taken) <= 0.001 * len(pairs)
    assert {verdict.status for verdict in swapped} <= {Status.CORRECT, Status.WRONG, Status.UNPARSABLE}


@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_solutions_of_a_part_are_right_and_those_of_others_wrong(task):
    check_both_halves(task, every=120)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("task", "count"), [("gsm8k", 7473 + 1319), ("math", 12500)])
def test_solutions_of_all_rows_are_right_and_those_of_others_wrong(task, count):
    assert len(problems(task, 1)) == count
    check_both_halves(task, every=1)


def leaves(one: Form) -> Iterator[Form]:
    if not one.parts:
        yield one
    for part in one.parts:
        yield from leaves(part)


def check_expressions(every: int) -> None:
    """What has the same form is the same without sympy, so here each expression is written otherwise, and missed."""
    parts = (leaf for problem in problems("math", 1) for leaf in leaves(form(problem.row["answer"])))
    found = sorted({str(leaf.value) for leaf in parts if leaf.kind == "expression" and leaf.value})[::every]
    missed = [latex for latex in found if not same_answer(latex, rf"0+1\cdot({latex})")]
    print(f"{len(found) - len(missed)} of {len(found)} expressions are what they are", missed)
    assert len(missed) <= 0.005 * len(found)
    near = [(latex, miss) for latex in found for miss in (f"-({latex})", f"{latex}+1") if same_answer(latex, miss)]
    print(f"{len(near)} of {2 * len(found)} near misses taken", near)
    assert {latex for latex, _ in near} <= {r"\infty", r"-\infty"}  # which stay what they are plus 1


def test_expressions_of_a_part_are_the_same_written_otherwise_and_not_when_changed():
    check_expressions(every=80)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_expressions_of_all_answers_are_the_same_written_otherwise_and_not_when_changed():
    check_expressions(every=1)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_echo_of_the_last_formula_scores_only_where_it_is_the_reference(every):
    asked = [
        (problem, formulas(problem.row["problem"])[-1])
        for problem in make_task("math", {"source": "math500"}).problems("test")
    ]
    same = [problem.row["answer"] == formula for problem, formula in asked]
    asked = [pair for index, pair in enumerate(asked) if same[index] or index % every == 0]
    verdicts = judged("math", [(problem, rf"\boxed{{{formula}}}") for problem, formula in asked])
    right = [
        (problem.row["answer"], formula)
        for (problem, formula), verdict in zip(asked, verdicts, strict=True)
        if verdict.score
    ]
    assert right == [(r"\sqrt{53}", r"\sqrt{53}"), ("6", "6")]
    assert {verdict.status for verdict in verdicts} <= {Status.CORRECT, Status.WRONG, Status.UNPARSABLE}


def test_rows_of_math500_aime_and_dapo_are_read():
    task = make_task("math", {"source": "math500"})
    asked = task.problems("test")
    assert len(asked) == len({problem.id for problem in asked}) == 500
    assert {problem.row["level"] for problem in asked} == {1, 2, 3, 4, 5}
    wrong = [problem.id for problem in asked if not task.verify(problem, Completion(problem.row["solution"])).score]
    assert wrong == []
    aime = make_task("aime").problems("test")
    assert len(aime) == 30
    assert all(0 <= int(problem.row["answer"]) <= 999 for problem in aime)
    columns = {"question": ["prompt.0.content"], "answer": "reward_model.ground_truth"}
    dapo = make_task("answers", {"source": "dapo_math_17k/dapo_math_17k.parquet", **columns})
    assert len(dapo.problems("train")) == 17917
