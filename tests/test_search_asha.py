"""Asynchronous successive halving against algorithm 2 of Li et al. 2020, written out plainly."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.search.study import TrialRecord
from palestra.search.study import promotion as promote


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


def promotion(results: dict[int, list[float]], reduction: int, failed: tuple[int, ...] = ()) -> tuple[int, int] | None:
    """The same of records; where a lower score is better, scores of the other sign give the same."""
    found = []
    for sign in (1, -1):
        records = []
        for trial, scores in results.items():
            signed = {rung: sign * score for rung, score in enumerate(scores)}
            state = "failed" if trial in failed else "running"
            records.append(TrialRecord(trial, {}, len(scores) - 1, signed, state, signed[len(scores) - 1]))
        found.append(promote(records, reduction, maximize=sign == 1))
    assert found[0] == found[1]
    return found[0]


@given(
    st.dictionaries(st.integers(0, 40), st.lists(st.integers(0, 6).map(float), min_size=1, max_size=4), max_size=30),
    st.integers(2, 5),
)
def test_promotion_of_any_scores_is_that_of_the_paper(results, reduction):
    assert promotion(results, reduction) == paper(results, reduction)


def test_promotion_before_a_rung_has_eta_trials_is_none():
    assert promotion({0: [5.0], 1: [9.0], 2: [7.0]}, 4) is None
    assert promotion({0: [5.0], 1: [9.0], 2: [7.0], 3: [1.0]}, 4) == (1, 1)
    assert promotion({0: [5.0], 1: [9.0, 9.0], 2: [7.0], 3: [1.0]}, 4) is None  # the best has gone on already
    assert promotion({0: [5.0], 1: [9.0], 2: [7.0], 3: [1.0]}, 4, failed=(3,)) is None  # it does not count


def test_promotion_prefers_the_highest_rung():
    low = {trial: [float(trial)] for trial in range(6)}
    assert promotion({**low, 6: [6.0, 2.0], 7: [7.0, 1.0]}, 2) == (6, 2)


def test_promotion_of_equals_takes_the_earlier_one():
    assert promotion({3: [1.0], 1: [1.0], 2: [1.0], 0: [0.0]}, 4) == (1, 1)


@pytest.mark.parametrize(("trials", "reduction"), [(16, 4), (27, 3), (8, 2), (16, 2)])
def test_one_worker_with_trials_that_get_worse_ends_with_the_brackets_of_successive_halving(trials, reduction):
    """When no later trial is better than an earlier one, nothing is promoted in error."""
    results: dict[int, list[float]] = {}
    new = 0
    while True:
        sent = promotion(results, reduction)
        if sent is not None:
            results[sent[0]].append(-float(sent[0]))
        elif new < trials:
            results[new] = [-float(new)]
            new += 1
        else:
            break
    sizes = [sum(len(scores) > k for scores in results.values()) for k in range(max(map(len, results.values())))]
    expected = [trials]
    while expected[-1] // reduction:
        expected.append(expected[-1] // reduction)
    assert sizes == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(2, 4))
def test_one_worker_with_any_scores_ends_with_every_rung_having_sent_on_its_best(seed, trials, reduction):
    draw = random.Random(seed)
    results: dict[int, list[float]] = {}
    while (sent := promotion(results, reduction)) is not None or len(results) < trials:
        if sent is not None:
            results[sent[0]].append(draw.random())
        else:
            results[len(results)] = [draw.random()]
    for k in range(max(map(len, results.values()))):
        reached = sorted((trial for trial in results if len(results[trial]) > k), key=lambda trial: -results[trial][k])
        assert all(len(results[trial]) > k + 1 for trial in reached[: len(reached) // reduction])


def test_promotion_by_one_takes_the_best_that_waits_at_the_highest_rung():
    assert promotion({0: [1.0, 3.0], 1: [2.0, 1.0], 2: [9.0]}, 1) == (0, 2)
    assert promotion({0: [1.0], 1: [2.0, 3.0]}, 1, failed=(1,)) == (0, 1)
    assert promotion({}, 1) is None
