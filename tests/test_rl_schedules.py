"""Schedules at their ends, in the middle, upwards, downwards, to zero, inside a window, and after a warm-up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.rl.schedules import value

REACHING = ["linear", "cosine", "periodic", "wsd"]
SHAPES = ["constant", *REACHING, "rate", "inverse_sqrt"]
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
        ("wsd", 0.25, 1.0, 0.0, 0.5),
        ("wsd", 0.64, 1.0, 0.5, 0.6),
        ("wsd", 0.04, 0.0, 1.0, 0.2),
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


@pytest.mark.parametrize("shape", SHAPES)
@given(progress=st.floats(0, 1), start=NUMBERS, warmup=st.floats(0.01, 0.5))
def test_value_warms_up_in_a_straight_line(shape, progress: float, start: float, warmup: float):
    found = value(shape, progress * warmup, start, 0.0, warmup=warmup)
    assert found == pytest.approx(start * progress, rel=1e-9, abs=1e-300)
    assert value(shape, warmup, start, 0.0, warmup=warmup) == start


@pytest.mark.parametrize("shape", [*REACHING, "rate"])
@given(progress=st.floats(0, 1))
def test_value_after_the_warmup_is_that_of_a_shorter_run(shape, progress: float):
    assert value(shape, 0.25 + 0.75 * progress, 1.0, 0.1, warmup=0.25) == pytest.approx(
        value(shape, progress, 1.0, 0.1),
        abs=0.1 if shape == "rate" else 1e-7,  # a stair may come a rounding earlier
    )


@pytest.mark.parametrize(
    ("progress", "expected"), [(0.05, 0.5), (0.1, 1.0), (0.5, 1.0), (0.8, 1.0), (0.85, 0.5), (1, 0)]
)
def test_value_wsd_warms_up_stays_and_decays(progress: float, expected: float):
    assert value("wsd", progress, 1.0, 0.0, warmup=0.1, begin=0.8) == pytest.approx(expected, abs=1e-12)


@given(step=st.integers(1, 1000), warmup=st.integers(1, 500))
def test_value_inverse_sqrt_equals_that_of_the_transformer(step: int, warmup: int):
    # Vaswani et al. 2017, equation 3, without the width; it peaks at warmup^-0.5.
    expected = min(step**-0.5, step * warmup**-1.5)
    assert value("inverse_sqrt", step / 1000, warmup**-0.5, 0.0, warmup=warmup / 1000) == pytest.approx(expected)


def test_value_inverse_sqrt_nears_its_end_and_holds_after_finish():
    found = [value("inverse_sqrt", p, 1.0, 0.2, begin=0.01, finish=0.25) for p in (0.0, 0.01, 0.04, 0.25, 1.0)]
    assert found == pytest.approx([1.0, 1.0, 0.6, 0.36, 0.36])
    with pytest.raises(ValueError, match="after 0"):
        value("inverse_sqrt", 0.5, 1.0, 0.0)


def test_value_warmup_as_long_as_the_schedule_raises():
    with pytest.raises(ValueError, match="finish after it begins"):
        value("linear", 0.7, 1.0, 0.0, warmup=0.6, finish=0.6)
