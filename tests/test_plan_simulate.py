"""The simulated loop against closed forms: sums, slowest parts, one server, failures; and what more staleness does."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.plan.simulate import Loop, lengths, simulate

EVEN = Loop(
    **{"prompts": 8, "group": 4, "staleness": 0, "train": 2.0, "publish": 0.25, "fetch": 0.25, "generators": 1},
    **{"slots": 10_000, "base": 0.01, "each": 0.001, "start": 0.0, "mean": 50.0, "spread": 0.0, "longest": 100},
)


def test_synchronous_loop_takes_the_sum_of_its_phases():
    decode = 50 * (0.01 + 32 * 0.001)
    assert simulate(EVEN).step == pytest.approx(decode + 2.0 + 0.25)


def test_prompts_and_verdicts_add_to_a_synchronous_step():
    loop = replace(EVEN, start=0.1, verify=0.3, verifiers=32, complete=0.01)
    decode = 50 * (0.01 + 32 * 0.001)
    assert simulate(loop).step == pytest.approx(8 * 0.1 + decode + 0.3 + 32 * 0.01 + 2.25)


def test_slots_make_rows_wait_for_each_other():
    loop = replace(EVEN, slots=8)
    assert simulate(loop).step == pytest.approx(4 * 50 * (0.01 + 8 * 0.001) + 2.25)


def test_a_slow_trainer_is_all_that_counts_with_staleness():
    loop = replace(EVEN, staleness=2, train=20.0)
    outcome = simulate(loop)
    assert outcome.step == pytest.approx(20.25, rel=1e-3)
    assert outcome.trainer == pytest.approx(20 / 20.25, rel=1e-3)
    assert outcome.age == pytest.approx(2.0)


def test_slow_generators_are_all_that_counts_with_much_staleness():
    loop = replace(EVEN, staleness=6, train=0.01, publish=0.0, fetch=0.0, slots=16, group=4)
    seconds = 32 / 16 * 50 * (0.01 + 16 * 0.001)  # a full batch of rows, always
    assert simulate(loop, 40).step == pytest.approx(seconds, rel=0.03)


def test_verifiers_that_are_too_few_are_the_single_server():
    loop = replace(EVEN, staleness=4, train=0.1, publish=0.0, fetch=0.0, verify=0.5, verifiers=1)
    outcome = simulate(loop, 20)
    assert outcome.step == pytest.approx(32 * 0.5, rel=0.01)
    assert outcome.verifiers == pytest.approx(1.0, rel=0.01)


def test_shared_device_takes_turns():
    apart = simulate(replace(EVEN, staleness=4), 20)
    together = simulate(replace(EVEN, staleness=4, together=True), 20)
    assert together.step >= 2.25 + 0.001 * 32 * 50  # training, and each token's own share of decoding
    assert apart.step < together.step


def test_failures_of_the_trainer_cost_restart_and_half_a_checkpoint():
    loop = replace(EVEN, trainer_mtbf=400.0, restart=10.0, checkpoint=40.0)
    plain, failing = simulate(EVEN).step, simulate(loop, 1500)
    lost = (10.0 + 20.0) / 400.0  # renewals: of all time, so much
    assert failing.lost == pytest.approx(lost, rel=0.2)
    assert failing.step == pytest.approx(plain / (1 - lost), rel=0.04)


def test_a_generator_that_fails_delays_its_groups_and_loses_none():
    loop = replace(EVEN, generators=4, generator_mtbf=30.0, restart=5.0)
    outcome = simulate(loop, 60)
    assert outcome.step > simulate(replace(EVEN, generators=4), 60).step
    assert outcome.age == 0.0  # every group was trained on in its own step


def test_uneven_generators_make_a_synchronous_step_wait_for_the_slowest():
    even, uneven = (simulate(replace(EVEN, generators=8, unevenness=x)).step for x in (0.0, 0.2))
    assert uneven > even


def test_lengths_have_their_mean_and_belong_to_the_group():
    loop = replace(EVEN, mean=200.0, spread=0.5, longest=100_000, group=1000)
    values = lengths(loop, 3)
    assert sum(values) / len(values) == pytest.approx(200, rel=0.06)
    assert values == lengths(replace(loop, generators=7, staleness=3), 3)
    assert values != lengths(loop, 4)
    assert max(lengths(replace(loop, longest=210), 3)) == 210


@given(
    st.floats(0.1, 10),
    st.integers(1, 4),
    st.floats(0.0, 1.0),
    st.integers(0, 3),
    st.booleans(),
)
def test_staleness_never_hurts_throughput(train, generators, spread, staleness, together):
    loop = replace(EVEN, train=train, generators=generators, spread=spread, staleness=staleness, together=together)
    less, more = simulate(loop, 12), simulate(replace(loop, staleness=staleness + 1), 12)
    assert more.step <= 1.02 * less.step


def test_same_seed_gives_the_same_outcome_and_another_one_another():
    loop = replace(EVEN, spread=0.7, generators=3, staleness=1)
    assert simulate(loop) == simulate(loop)
    assert simulate(loop) != simulate(replace(loop, seed=1))
