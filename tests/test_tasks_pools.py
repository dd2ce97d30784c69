"""Pools: solved prompts are dropped, those between are favored, and nothing goes on for ever."""

import json
import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from listed_task import draw, prompts

from palestra.errors import PalestraError, UsageError
from palestra.spec.tasks import PoolSpec
from palestra.tasks.curriculum import LARGEST, PromptPool, pass_rate
from palestra.tasks.stream import Prompts

KINDS = ("unseen", "hard", "between", "easy", "dropped")


def answered(made: Prompts, rates: dict[str, float], numbers: range) -> list[str]:
    """Draw prompts and tell of each that it is solved as often as `rates` says."""
    drawn = []
    for number in numbers:
        problem = made.sample(number)
        drawn.append(problem.id.replace("/train/", ""))
        solved = round(100 * rates[drawn[-1]])
        made.observe(problem, [1.0] * solved + [0.0] * (100 - solved))
    return drawn


def test_pass_rate_counts_answers_that_are_more_right_than_wrong() -> None:
    assert pass_rate([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert pass_rate([1.0, -1.0]) == 0.5
    assert pass_rate([0.3, 0.2, 0.9, 0.4]) == 0.25  # partial scores are no passes


def test_chances_follow_from_the_latest_rates() -> None:
    pool = PromptPool(PoolSpec(low=0.2, high=0.8, outside=0.25, drop=1.0), 8, "it")
    for index, rate in enumerate([0.0, 0.19, 0.2, 0.5, 0.8, 0.81, 1.0]):
        pool.observe(index, rate)
    assert pool.chances(np.arange(8)).tolist() == [0.25, 0.25, 1, 1, 1, 0.25, 0, 1]
    pool.observe(3, 0.9)
    pool.observe(0, 0.4)
    assert pool.chances(np.array([3, 0])).tolist() == [0.25, 1]
    assert pool.metrics() == {"unseen": 1, "hard": 1, "between": 3, "easy": 2, "dropped": 1}


def test_chances_without_any_prompt_between_are_relative_to_the_largest() -> None:
    """Else a weight of a millionth would mean a million looks for each draw."""
    pool = PromptPool(PoolSpec(outside=1e-6), 3, "it")
    for index, rate in enumerate([0.0, 0.1, 1.0]):
        pool.observe(index, rate)
    assert pool.chances(np.arange(3)).tolist() == [1, 1, 0]


def test_observe_dropped_prompt_stays_dropped() -> None:
    pool = PromptPool(PoolSpec(), 2, "it")
    pool.observe(0, 1.0)
    pool.observe(0, 0.0)  # of answers that were under way
    assert pool.chances(np.arange(2)).tolist() == [0, 1]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), max_size=60),
    st.floats(0, 1),
    st.one_of(st.none(), st.floats(0.5, 1)),
)
def test_state_comes_back_and_counts_agree_with_all_rates(
    seen: list[tuple[int, float]], outside: float, drop: float | None
) -> None:
    spec = PoolSpec(outside=outside, drop=drop)
    pool, again = PromptPool(spec, 10, "it"), PromptPool(spec, 10, "it")
    known: dict[int, float] = {}
    for index, rate in seen:
        pool.observe(index, rate)
        if drop is None or known.get(index, 0.0) < drop:
            known[index] = rate
    kinds = Counter(
        "dropped"
        if drop is not None and rate >= drop
        else "hard"
        if rate < 0.2
        else "easy"
        if rate > 0.8
        else "between"
        for rate in known.values()
    )
    kinds["unseen"] = 10 - len(known)
    assert pool.metrics() == {kind: kinds[kind] for kind in KINDS}
    again.load_state(json.loads(json.dumps(pool.state())))
    assert again.metrics() == pool.metrics()
    assert again.chances(np.arange(10)).tolist() == pool.chances(np.arange(10)).tolist()
    assert pool.left == bool(pool.chances(np.arange(10)).any())


def test_draw_first_pass_takes_all_then_solved_ones_are_gone() -> None:
    rates = {f"a{row}": 1.0 if row < 4 else 0.5 for row in range(10)}
    drawn = answered(prompts([{"name": "a"}], pool={}), rates, range(10 + 6 * 5))
    assert sorted(drawn[:10]) == sorted(rates)
    kept = sorted(id for id in rates if rates[id] < 1)
    assert all(sorted(drawn[start : start + 6]) == kept for start in range(10, 40, 6))


def test_draw_favours_prompts_between_by_the_weight() -> None:
    rates = {f"a{row}": [0.0, 0.9, 0.5, 0.3][row % 4] for row in range(200)}
    made = prompts([{"name": "a", "size": 200}], pool={"outside": 0.2})
    answered(made, rates, range(200))
    drawn = Counter(rates[id] for id in answered(made, rates, range(200, 200 + 120 * 20)))
    # A pass has 100 prompts between and, of 100 outside, 20 on average; 20 passes: 400 ± 18.
    assert drawn[0.5] + drawn[0.3] == pytest.approx(2000, abs=70)
    assert drawn[0.0] + drawn[0.9] == pytest.approx(400, abs=70)
    assert drawn[0.0] == pytest.approx(drawn[0.9], rel=0.3)


def test_draw_outside_none_leaves_only_those_between() -> None:
    rates = {f"a{row}": row / 10 for row in range(10)}
    made = prompts([{"name": "a"}], pool={"outside": 0.0, "drop": None})
    answered(made, rates, range(10))
    assert set(answered(made, rates, range(10, 50))) == {f"a{row}" for row in range(2, 9)}


def test_draw_all_dropped_is_an_error_that_says_what_to_do() -> None:
    rates = {f"a{row}": 1.0 for row in range(10)}
    made = prompts([{"name": "a"}], pool={})
    answered(made, rates, range(10))
    with pytest.raises(PalestraError, match=r"none is left to train on.*harder tasks or set tasks\.pool\.drop to null"):
        made.sample(10)


def test_draw_all_too_hard_without_a_weight_is_an_error_that_says_so() -> None:
    made = prompts([{"name": "a"}], pool={"outside": 0.0, "drop": None})
    answered(made, {f"a{row}": 0.0 for row in range(10)}, range(10))
    with pytest.raises(PalestraError, match=r"too hard where tasks\.pool\.outside is 0.*raise tasks\.pool\.outside"):
        made.sample(10)


@pytest.mark.parametrize("mix", ["weighted", "sequential", "lessons"])
def test_draw_one_task_all_dropped_goes_on_with_the_others_and_says_so(
    mix: str, caplog: pytest.LogCaptureFixture
) -> None:
    rates = {f"a{row}": 1.0 for row in range(5)} | {f"b{row}": 0.5 for row in range(5)}
    made = prompts([{"name": "a", "size": 5}, {"name": "b", "size": 5}], mix=mix, pool={})
    with caplog.at_level(logging.WARNING, "palestra"):
        drawn = answered(made, rates, range(60))
    assert Counter(id[0] for id in drawn) == {"a": 5, "b": 55}
    assert [record.getMessage() for record in caplog.records] == [
        "all prompts of a are dropped or have no weight: its share goes to the other tasks"
    ]


def test_draw_lesson_with_no_prompts_left_opens_those_after_it() -> None:
    """It has too few prompts for a plateau: nothing else could open them."""
    rates = {f"a{row}": 1.0 for row in range(3)} | {f"b{row}": 0.5 for row in range(3)}
    uses = [{"name": "a", "size": 3}, {"name": "b", "size": 3, "after": ["a"]}]
    drawn = answered(prompts(uses, mix="lessons", pool={}), rates, range(10))
    assert "".join(id[0] for id in drawn) == "aaa" + "b" * 7


@given(st.integers(0, 2**32), st.dictionaries(st.integers(0, 9), st.floats(0, 0.9)), st.floats(0.01, 1))
@settings(max_examples=50)
def test_draw_a_pass_has_no_prompt_twice_and_all_of_the_largest_weight(
    seed: int, rates: dict[int, float], outside: float
) -> None:
    made = prompts([{"name": "a"}], seed, pool={"outside": outside, "drop": 0.95})
    problems = {row: made.find(f"a/train/{row}") for row in range(10)}
    for row, rate in rates.items():
        made.observe(problems[row], [1.0] * round(1000 * rate) + [0.0] * (1000 - round(1000 * rate)))
    passes: dict[int, list[str]] = {}
    for number in range(40):
        (id,) = draw(made, range(number, number + 1))
        progress = made.metrics()["prompts/a/passes"]
        passes.setdefault(int(np.ceil(progress)), []).append(id)
    del passes[max(passes)]  # not over yet
    kept = [row for row in range(10) if row not in rates or 0.2 <= round(1000 * rates[row]) / 1000 <= 0.8]
    for drawn in passes.values():
        assert len(set(drawn)) == len(drawn)
        assert {f"a{row}" for row in (kept or range(10))} <= set(drawn)


def test_pool_task_too_large_to_remember_is_an_error_unless_counted() -> None:
    with pytest.raises(UsageError, match=r"at most 1048576 prompts, and a has 1048577.*`count`"):
        PromptPool(PoolSpec(), LARGEST + 1, "a")
    made = prompts([{"name": "a", "size": 20, "count": 4}], pool={})
    assert set(answered(made, {f"a{row}": 0.5 for row in range(4)}, range(12))) == {"a0", "a1", "a2", "a3"}
