"""The interquartile mean and its bootstrap interval against closed forms and enumeration."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.bench.results import bootstrap_interval, interquartile_mean

numbers = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([7], 7), ([1, 3], 2), ([0, 1, 5], 2), ([-100, 1, 3, 1000], 2), ([5, 4, 3, 2, 1], 3), (range(8), 3.5)],
)
def test_interquartile_mean_of_few_values_equals_the_number_by_hand(values, expected):
    assert interquartile_mean(list(values)) == pytest.approx(expected)


@given(st.lists(numbers, min_size=1, max_size=20), st.randoms())
def test_interquartile_mean_is_between_the_ends_whatever_the_order(values, random):
    mean = float(interquartile_mean(values))
    assert min(values) - 1e-6 <= mean <= max(values) + 1e-6
    random.shuffle(values)
    assert float(interquartile_mean(values)) == pytest.approx(mean)


@given(st.lists(numbers, min_size=4, max_size=11))
def test_interquartile_mean_does_not_see_one_extreme_of_four_or_more(values):
    ordered = sorted(values)
    assert float(interquartile_mean([*ordered[:-1], ordered[-1] + 1e9])) == pytest.approx(
        float(interquartile_mean(ordered))
    )


def test_bootstrap_interval_of_four_seeds_equals_the_enumeration_of_all_resamples():
    """4⁴ equally likely resamples: the quantiles of their interquartile means, up to the noise of drawing 10,000."""
    values = [0.0, 1.0, 4.0, 9.0]
    means = np.sort([float(interquartile_mean(list(drawn))) for drawn in product(values, repeat=4)])
    low, high = bootstrap_interval(values)
    assert low == pytest.approx(np.quantile(means, 0.025), abs=0.5)
    assert high == pytest.approx(np.quantile(means, 0.975), abs=0.5)
    assert low < interquartile_mean(values) < high


def test_bootstrap_interval_of_many_normal_values_is_near_the_normal_one():
    """The trimmed mean of n normal values has a standard error of about 1.09 / √n."""
    values = np.random.default_rng(1).normal(10, 1, 400)
    low, high = bootstrap_interval(values.tolist())
    assert (high - low) / 2 == pytest.approx(1.96 * 1.09 / 20, rel=0.1)


def test_bootstrap_interval_is_seeded_and_of_one_value_or_equal_ones_a_point():
    assert bootstrap_interval([3.0, 1.0, 2.0, 5.0]) == bootstrap_interval([3.0, 1.0, 2.0, 5.0])
    assert bootstrap_interval([3.0, 1.0, 2.0, 5.0]) != bootstrap_interval([3.0, 1.0, 2.0, 5.5])
    assert bootstrap_interval([500.0] * 4) == (500.0, 500.0)
    assert bootstrap_interval([7.0]) == (7.0, 7.0)
