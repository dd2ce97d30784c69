"""The trial metrics against numbers computed by hand and their formulas."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.control.trial_metrics import consistency, score, session_metrics, trial_metrics

numbers = st.floats(-1e3, 1e3)


def test_session_metrics_of_four_points_equal_the_numbers_by_hand():
    """Strengths 1, 3, 2, 4 over a random return of 10, at frames 1, 2, 4, 8 and 10, 20, 30, 40 updates."""
    metrics = session_metrics([11, 13, 12, 14], [1, 2, 4, 8], [10, 20, 30, 40], 10)
    assert metrics.total_reward_ma == 14  # of frames 1, 2, 4 and 8 only the last lies in the last quarter, (6, 8]
    assert metrics.strength == 2.5
    assert metrics.max_strength == 4
    assert metrics.final_strength == 4
    assert metrics.sample_efficiency == pytest.approx((1 + 1.5 + 0.5 + 0.5) / 1.875)
    assert metrics.training_efficiency == pytest.approx((12 + 18 + 8 + 12) / (12 + 6 + 4 + 3))
    assert metrics.stability == pytest.approx(1 - 1 / 6)  # fell by 1 once; 1 + 3 + 2 = 6


def test_total_reward_ma_at_slm_labs_budget_is_the_mean_of_its_last_hundred_log_points():
    frames = list(range(500, 200_001, 500))  # CartPole: 2e5 frames, a log point every 500
    metrics = session_metrics(list(range(400)), frames, frames, 0)
    assert metrics.total_reward_ma == np.mean(range(300, 400))
    assert metrics.stability == 1  # never fell


@given(st.integers(1, 2000), st.integers(1, 300))
def test_score_any_log_frequency_covers_the_last_quarter_of_the_frames(every, points):
    frames = [every * (i + 1) for i in range(points)]
    inside = [f for f in frames if f > 0.75 * frames[-1]]
    assert score(frames, frames) == pytest.approx(math.fsum(inside) / len(inside))


def test_score_with_a_window_takes_the_points_in_its_frames_alone():
    assert score([1, 2, 3, 4], [10, 20, 30, 40], window=20) == 3.5
    assert score([1, 2, 3, 4], [10, 20, 30, 40], window=1e9) == 2.5
    assert score([1, 2, 3, 4], [10, 20, 30, 40], window=1) == 4


@given(st.lists(numbers, min_size=2, max_size=30), numbers, st.integers(1, 1000))
def test_session_metrics_any_returns_equal_the_formulas(returns, random_return, cost):
    frames = [cost * (i + 1) for i in range(len(returns))]
    s = [r - random_return for r in returns]
    metrics = session_metrics(returns, frames, frames, random_return)
    assert metrics.strength == pytest.approx(math.fsum(s) / len(s), abs=1e-9)
    weighted = math.fsum(x / f for x, f in zip(s, frames, strict=True)) / math.fsum(1 / f for f in frames)
    assert metrics.sample_efficiency == pytest.approx(weighted, abs=1e-9)
    assert min(s) - 1e-9 <= metrics.sample_efficiency <= max(s) + 1e-9
    fell, base = math.fsum(min(b - a, 0) for a, b in pairwise(s)), math.fsum(s[:-1])
    if abs(base) > 1e-3:
        assert metrics.stability == pytest.approx(1 - abs(fell / base), rel=1e-6)


def test_sample_efficiency_does_not_depend_on_the_unit_and_favours_early_strength():
    early, late = [5, 5, 1, 1], [1, 1, 5, 5]
    frames = [100, 200, 300, 400]
    of = lambda returns, scale=1: session_metrics(returns, [scale * f for f in frames], frames, 0).sample_efficiency  # noqa: E731
    assert of(early) > of(late)
    assert of(early, 1000) == pytest.approx(of(early))


def test_stability_of_one_point_or_no_strength_is_not_a_number():
    assert math.isnan(session_metrics([3], [1], [1], 0).stability)
    assert math.isnan(session_metrics([0, 0, 1], [1, 2, 3], [1, 2, 3], 0).stability)


def test_consistency_of_two_sessions_equals_the_number_by_hand():
    """Strengths (0, 2), then (1, 5): sample stds √2 and √8, means 1 and 3."""
    value = consistency([[1, 2], [3, 6]], 1)
    assert value == pytest.approx(1 - 2 * (math.sqrt(2) + math.sqrt(8)) / (1 + 3))


def test_consistency_equal_sessions_is_one_and_of_one_session_is_not_a_number():
    assert consistency([[5, 6, 7], [5, 6, 7]], 1) == 1
    assert math.isnan(consistency([[5, 6, 7]], 1))


def test_consistency_sessions_of_different_lengths_compares_what_both_have():
    assert consistency([[5, 6, 7, 100], [6, 7, 8]], 1) == consistency([[5, 6, 7], [6, 7, 8]], 1)


def test_trial_metrics_are_means_over_sessions_with_the_spread_of_the_score():
    sessions = [session_metrics([r, r + 1], [1, 2], [1, 2], 0) for r in (1, 2, 6)]
    metrics = trial_metrics(sessions)
    assert metrics["strength"] == pytest.approx(3.5)
    assert metrics["total_reward_ma"] == pytest.approx(4)  # the second point alone lies in the last quarter
    assert metrics["total_reward_ma_std"] == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert math.isnan(trial_metrics(sessions[:1])["total_reward_ma_std"])
