"""Asynchronous successive halving against algorithm 2 of Li et al. 2020, written out plainly."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.search.study import last_promotion, level, promotion, top


def paper(results: dict[int, list[float]], reduction: int) -> tuple[int, int] | None:
    """`get_job` of the paper: `results[trial]` are a trial's scores at rung 0, 1, …; it waits at its last one."""
    highest = max((len(scores) for scores in results.values()), default=0)
    for k in range(highest - 1, -1, -1):
        arrived = [(scores[k], -trial) for trial, scores in results.items() if len(scores) > k]
        candidates = sorted(arrived, reverse=True)[: len(arrived) // reduction]
        promotable = [-trial for _, trial in candidates if len(results[-trial]) == k + 1]
        if promotable:
            return promotable[0], k + 1
    return None


def as_rungs(results: dict[int, list[float]]) -> tuple[list[dict[int, float]], list[set[int]]]:
    highest = max((len(scores) for scores in results.values()), default=0)
    rungs = [{trial: scores[k] for trial, scores in results.items() if len(scores) > k} for k in range(highest)]
    moved = [{trial for trial, scores in results.items() if len(scores) > k + 1} for k in range(highest)]
    return rungs, moved


@given(
    st.dictionaries(st.integers(0, 40), st.lists(st.integers(0, 6).map(float), min_size=1, max_size=4), max_size=30),
    st.integers(2, 5),
)
def test_promotion_of_any_scores_is_that_of_the_paper(results, reduction):
    assert promotion(*as_rungs(results), reduction) == paper(results, reduction)


def test_promotion_before_a_rung_has_eta_trials_is_none():
    assert promotion([{0: 5.0, 1: 9.0, 2: 7.0}], [set()], 4) is None
    assert promotion([{0: 5.0, 1: 9.0, 2: 7.0, 3: 1.0}], [set()], 4) == (1, 1)
    assert promotion([{0: 5.0, 1: 9.0, 2: 7.0, 3: 1.0}], [{1}], 4) is None  # the best has gone on already


def test_promotion_prefers_the_highest_rung():
    low = {trial: float(trial) for trial in range(8)}
    assert promotion([low, {7: 1.0, 6: 2.0}], [{7, 6}, set()], 2) == (6, 2)


def test_promotion_of_equals_takes_the_earlier_one():
    assert promotion([{3: 1.0, 1: 1.0, 2: 1.0, 0: 0.0}], [set()], 4) == (1, 1)
    assert top({3: 1.0, 1: 1.0, 0: 2.0}, 2) == [0, 1]


@pytest.mark.parametrize(("trials", "reduction"), [(16, 4), (27, 3), (8, 2), (16, 2)])
def test_one_worker_with_trials_that_get_worse_ends_with_the_brackets_of_successive_halving(trials, reduction):
    """When no later trial is better than an earlier one, nothing is promoted in error."""
    results: dict[int, list[float]] = {}
    new = 0
    while True:
        sent = promotion(*as_rungs(results), reduction)
        if sent is not None:
            results[sent[0]].append(-float(sent[0]))
        elif new < trials:
            results[new] = [-float(new)]
            new += 1
        else:
            break
    sizes = [len(rung) for rung in as_rungs(results)[0]]
    expected = [trials]
    while expected[-1] // reduction:
        expected.append(expected[-1] // reduction)
    assert sizes == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 4))
def test_one_worker_with_any_scores_ends_with_every_rung_having_sent_on_its_best(seed, trials, reduction):
    draw = random.Random(seed)
    results: dict[int, list[float]] = {}
    while (sent := promotion(*as_rungs(results), reduction)) is not None or len(results) < trials:
        if sent is not None:
            results[sent[0]].append(draw.random())
        else:
            results[len(results)] = [draw.random()]
    rungs, moved = as_rungs(results)
    for rung, gone in zip(rungs, moved, strict=True):
        assert set(top(rung, len(rung) // reduction)) <= gone


def test_last_promotion_takes_the_best_that_waits_at_the_highest_rung():
    assert last_promotion([{0: 1.0, 1: 2.0, 2: 9.0}, {0: 3.0, 1: 1.0}], [{0, 1}, set()]) == (0, 2)
    assert last_promotion([{0: 1.0, 1: 2.0}, {1: 3.0}], [{1}, {1}]) == (0, 1)  # that of the higher rung has failed
    assert last_promotion([], []) is None


def test_levels_grow_by_the_reduction():
    assert [level(512, 4, rung) for rung in range(4)] == [512, 2048, 8192, 32768]
