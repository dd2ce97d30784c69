"""Countdown: every puzzle has a solution, any solution counts, and nothing else does."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.tasks.sets.countdown import parse
from palestra.tasks.task import Completion, Problem, Status, Verdict, make_task

PUZZLE = Problem("countdown/train/2,5,7=39", "2,5,7=39:", {"numbers": [2, 5, 7], "target": 39})


def judged(text: str, problem: Problem = PUZZLE, **args: object) -> Verdict:
    return make_task("countdown", args).verify(problem, Completion(text))


def reachable(numbers: tuple[Fraction, ...], signs: str) -> set[Fraction]:
    """Every value of an expression of some of the numbers, by trying all."""
    found = set(numbers)
    for one in range(len(numbers)):
        for other in range(len(numbers)):
            if one == other:
                continue
            rest = tuple(n for at, n in enumerate(numbers) if at not in (one, other))
            a, b = numbers[one], numbers[other]
            values = [value for sign, value in (("+", a + b), ("-", a - b), ("*", a * b)) if sign in signs]
            if "/" in signs and b:
                values.append(a / b)
            for value in values:
                found |= reachable((value, *rest), signs)
    return found


@pytest.mark.parametrize("signs", ["+-", "+-*", "+-*/"])
@pytest.mark.parametrize("use_all", [False, True])
def test_problems_have_solutions_and_are_not_trivial(signs: str, use_all: bool) -> None:
    args = {"operations": list(signs), "use_all": use_all, "size": 200}
    task = make_task("countdown", args)
    problems = task.problems("train")
    assert len(problems) == len({problem.id for problem in problems}) == 200
    for problem in problems:
        numbers, target = problem.row["numbers"], problem.row["target"]
        verdict = task.verify(problem, Completion(problem.row["solution"]))
        assert (verdict.score, verdict.status) == (1.0, Status.CORRECT)
        assert Fraction(target) in reachable(tuple(map(Fraction, numbers)), signs)
        assert 1 <= target <= 99
        assert use_all or target not in numbers
        assert problem.prompt == f"{','.join(map(str, numbers))}={target}:"


def test_problems_are_the_first_of_a_larger_size_and_stay_with_other_scores() -> None:
    few = make_task("countdown", {"size": 50, "partial": True, "stop": ["x"]}).problems("train")
    assert few == make_task("countdown", {"size": 80}).problems("train")[:50]


def test_problems_few_numbers_are_fewer_and_honest_about_it() -> None:
    task = make_task("countdown", {"numbers": 2, "largest": 4})
    train, test = task.problems("train"), task.problems("test")
    # Sums, differences above 0 and products of two numbers up to 4 that are neither number.
    everything = {
        (a, b, target)
        for a in range(1, 5)
        for b in range(a, 5)
        for target in (a + b, b - a, a * b)
        if target > 0 and target not in (a, b)
    }
    found = [(*problem.row["numbers"], problem.row["target"]) for problem in [*train, *test]]
    assert sorted(found) == sorted(everything)


@pytest.mark.parametrize("text", ["5*7+2*2", "39", "(2+5)*7", "2*5*7", "7*5", "41-2", "5*(7+2", "39-0"])
def test_judge_wrong_value_or_numbers_is_not_correct(text: str) -> None:
    assert judged(text).status in (Status.WRONG, Status.UNPARSABLE)
    assert judged(text).score == 0.0


@pytest.mark.parametrize("text", ["(7-2)*5+14", "2*7+5*5", "2+37", "2+2+35"])
def test_judge_number_not_given_or_used_twice_is_wrong(text: str) -> None:
    verdict = judged(text)
    assert (verdict.status, verdict.parts) == (Status.WRONG, {"valid": 0.0})


@pytest.mark.parametrize("text", ["2+7*5", " 5*7+2 ", "(5)*(7)+2"])
def test_judge_any_solution_counts(text: str) -> None:
    puzzle = Problem("countdown/train/x", "", {"numbers": [2, 5, 7], "target": 37})
    assert judged(text, puzzle).status == Status.CORRECT


def test_judge_fractions_on_the_way_are_exact() -> None:
    puzzle = Problem("countdown/train/x", "", {"numbers": [1, 3, 9], "target": 3})
    assert judged("1/3*9", puzzle, operations=["*", "/"]).status == Status.CORRECT


def test_judge_use_all_wants_every_number() -> None:
    puzzle = Problem("countdown/train/x", "", {"numbers": [2, 5, 7], "target": 35})
    assert judged("5*7", puzzle).status == Status.CORRECT
    assert judged("5*7", puzzle, use_all=True).status == Status.WRONG
    assert judged("7*5*2/2", puzzle, use_all=True, operations=["*", "/"]).status == Status.WRONG


def test_judge_operation_not_allowed_is_wrong() -> None:
    puzzle = Problem("countdown/train/x", "", {"numbers": [2, 5, 7], "target": 35})
    assert judged("5*7", puzzle, operations=["+", "-"]).status == Status.WRONG


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "x", "()", "2+", "2 5", "-2", "2--5", "+2", "2**5", "9**9**9**9", "7//2", "02+5", "2.0+5", "2e9",
        "5(7)", "__import__('os').system('true')", "lambda:39", "True", "39 if 1 else 0", "2\x00", "２+５", "2,5",
        "[39]", "37==37", "2:=3", "2+\n5", "(" * 150 + "2" + ")" * 150, "2+" * 5000 + "5",
    ],
)  # fmt: skip
def test_judge_what_is_no_expression_is_unparsable(text: str) -> None:
    verdict = judged(text)
    assert (verdict.status, verdict.score) == (Status.UNPARSABLE, 0.0)


def test_judge_deep_brackets_do_not_break_the_parser() -> None:
    assert judged("(" * 99 + "2" + ")" * 99).status == Status.WRONG


def test_judge_division_by_zero_is_wrong() -> None:
    assert judged("5/(7-7)").status == Status.WRONG
    assert judged("7/0").status == Status.WRONG


def test_judge_partial_pays_a_little_for_the_right_numbers() -> None:
    assert judged("2+5+7", partial=True).score == 0.1
    assert judged("2+2", partial=True).score == 0.0
    assert judged("2+5+7").score == 0.0


@pytest.mark.parametrize("text", ["5*7+2", "I try.\nIt is 5*7+2", "The expression is: 5*7+2 = 37", "5*7+2=37."])
def test_judge_chat_takes_the_expression_of_the_last_line(text: str) -> None:
    puzzle = Problem("countdown/train/x", "", {"numbers": [2, 5, 7], "target": 37})
    assert judged(text, puzzle, format="chat").status == Status.CORRECT


@given(st.text("0123456789+-*/() ", max_size=30))
def test_parse_agrees_with_python(text: str) -> None:
    parsed = parse(text)
    if parsed is None or parsed[0] is None:
        return
    value, numbers = parsed
    if "/" not in text:
        assert value == eval(text.strip())
    assert numbers == Counter(map(int, "".join(c if c.isdigit() else " " for c in text).split()))
