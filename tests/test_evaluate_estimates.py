"""pass@k against enumeration, and intervals against what they are made of."""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.evaluate.records import estimate, pass_at_k


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_every_small_case_equals_enumeration_of_all_subsets(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            hits = sum(any(answer < c for answer in subset) for subset in subsets)
            assert pass_at_k(n, c, k) == hits / len(subsets)


@given(st.integers(1, 40), st.data())
def test_pass_at_k_mean_over_draws_is_the_chance_of_k_fresh_answers(n, data):
    k = data.draw(st.integers(1, n))
    p = Fraction(data.draw(st.integers(0, 20)), 20)
    # Exactly unbiased: the expectation over c ~ Binomial(n, p) of the exact fraction is 1 − (1 − p)^k.
    expected = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * (1 - Fraction(math.comb(n - c, k), math.comb(n, k)))
        for c in range(n + 1)
    )
    assert expected == 1 - (1 - p) ** k
    found = math.fsum(float(math.comb(n, c) * p**c * (1 - p) ** (n - c)) * pass_at_k(n, c, k) for c in range(n + 1))
    assert found == pytest.approx(float(expected), abs=1e-12)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_grows_with_k_and_with_right_answers_and_is_exact_at_the_ends(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, c, k)
    assert value == float(1 - Fraction(math.comb(n - c, k), math.comb(n, k)))
    assert pass_at_k(n, c, 1) == c / n
    assert pass_at_k(n, c, n) == float(c > 0)
    if k < n:
        assert pass_at_k(n, c, k + 1) >= value
    if c < n:
        assert pass_at_k(n, c + 1, k) >= value


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_of_impossible_counts_is_an_error(n, c, k):
    with pytest.raises(ValueError, match="expected"):
        pass_at_k(n, c, k)


def test_estimate_of_zeros_and_ones_has_the_binomial_error_and_wilsons_interval():
    found = estimate([1.0] * 8 + [0.0] * 2)
    assert found.mean == 0.8
    assert found.error == pytest.approx(math.sqrt(0.8 * 0.2 / 9))
    assert found.interval == pytest.approx((0.4901625, 0.9433178), abs=1e-7)  # as tabulated for 8 of 10
    certain = estimate([1.0] * 5).interval
    assert certain is not None
    assert certain[0] == pytest.approx(0.5655, abs=1e-4)
    assert certain[1] == pytest.approx(1.0)


def test_estimate_of_shares_has_the_interval_of_resampled_problems():
    values = [0.0, 0.25, 0.25, 0.5, 1.0, 1.0, 0.75, 0.1, 0.3, 0.9] * 4
    found = estimate(values)
    assert found.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)))
    means = np.random.default_rng(1).choice(values, (20_000, len(values))).mean(1)
    assert found.interval == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.01)
    assert estimate(values) == found


def test_estimate_of_one_problem_claims_no_interval():
    found = estimate([1.0])
    assert (found.mean, found.error, found.interval) == (1.0, None, None)
    with pytest.raises(ValueError, match="no problems"):
        estimate([])
