"""Schedules at their ends, in the middle, upwards, downwards, to zero, and inside a window."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.rl.schedules import value

REACHING = ["linear", "cosine", "periodic"]
NUMBERS = st.floats(-1e6, 1e6)


@pytest.mark.parametrize("shape", REACHING)
@given(start=NUMBERS, end=NUMBERS)
def test_value_at_both_ends_is_exact(shape, start: float, end: float):
    assert value(shape, 0.0, start, end) == start
    assert value(shape, 1.0, start, end) == end


@pytest.mark.parametrize("shape", [*REACHING, "rate"])
@given(progress=st.floats(0, 1), start=NUMBERS, end=NUMBERS, period=st.floats(0.01, 2))
def test_value_never_leaves_the_range(shape, progress: float, start: float, end: float, period: float):
    slack = 1e-9 * max(abs(start), abs(end))
    low, high = min(start, end) - slack, max(start, end) + slack
    assert low <= value(shape, progress, start, end, period=period) <= high


@pytest.mark.parametrize(
    ("shape", "progress", "start", "end", "expected"),
    [
        ("constant", 0.7, 0.2, 0.0, 0.2),
        ("linear", 0.25, 1.0, 0.0, 0.75),
        ("linear", 0.25, 0.0, 1.0, 0.25),
        ("linear", 0.5, 2.0, 1.0, 1.5),
        ("cosine", 0.5, 1.0, 0.0, 0.5),
        ("cosine", 0.25, 1.0, 0.0, 0.5 + math.sqrt(2) / 4),
        ("cosine", 0.25, 0.0, 1.0, 0.5 - math.sqrt(2) / 4),
        ("rate", 0.0, 1.0, 0.0, 1.0),
        ("rate", 0.049, 1.0, 0.0, 1.0),
        ("rate", 0.05, 1.0, 0.0, 0.9),
        ("rate", 0.5, 1.0, 0.0, 0.9**10),
        ("rate", 1.0, 1.0, 0.0, 0.9**20),
        ("rate", 0.15, 0.0, 1.0, 1 - 0.9**3),
        ("periodic", 0.05, 1.0, 0.0, 0.95),
        ("periodic", 0.025, 1.0, 0.0, 0.975 + 0.025 * 0.975),
        ("periodic", 0.575, 1.0, 0.0, 0.425 - 0.575 * 0.425),
    ],
)
def test_value_by_shape_equals_table(shape, progress: float, start: float, end: float, expected: float):
    assert value(shape, progress, start, end) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("stair", range(20))
def test_value_rate_stairs_start_on_time(stair: int):
    assert value("rate", stair / 20, 1.0, 0.0, rate=0.5) == 0.5**stair


@pytest.mark.parametrize("shape", [*REACHING, "rate"])
def test_value_in_a_window_holds_before_and_after(shape):
    window = {"begin": 0.2, "finish": 0.6}
    assert value(shape, 0.1, 1.0, 0.0, **window) == 1.0
    assert value(shape, 0.9, 1.0, 0.0, **window) == value(shape, 1.0, 1.0, 0.0)
    assert value(shape, 0.4, 1.0, 0.0, **window) == pytest.approx(value(shape, 0.5, 1.0, 0.0))


def test_value_window_reversed_or_shape_unknown_raises():
    with pytest.raises(ValueError, match="finish after it begins"):
        value("linear", 0.5, 1.0, 0.0, begin=0.6, finish=0.2)
    with pytest.raises(ValueError, match="'triangle'"):
        value("triangle", 0.5, 1.0, 0.0)
