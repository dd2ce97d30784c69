"""The simulated loop against closed forms: sums, slowest parts, one server, failures; and what more staleness does."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.plan.simulate import TRAINER, Loop, lengths, simulate

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
    together = simulate(replace(EVEN, staleness=4, devices=1, trainers=1), 20)
    assert together.step >= 2.25 + 0.001 * 32 * 50  # training, and each token's own share of decoding
    assert apart.step < together.step


def test_failures_of_the_trainer_cost_restart_and_what_is_repeated():
    loop, random, now, times = replace(EVEN, restart=10.0, repeat=20.0), Random(0), 0.0, []
    while now < 10_000:
        now += random.expovariate(1 / 400)
        times.append((now, TRAINER))
    plain, failing = simulate(EVEN).step, simulate(loop, 1500, times).step
    happened = sum(when < 1500 * failing for when, _ in times)
    assert 1500 * (failing - plain) == pytest.approx(30.0 * happened, rel=0.1)


def test_a_failure_of_the_trainer_is_hidden_by_nothing_but_generators_that_are_slower():
    fast = replace(EVEN, staleness=2, train=20.0, restart=60.0)
    assert 8 * (simulate(fast, 8, [(90.0, TRAINER)]).step - simulate(fast, 8).step) == pytest.approx(60.0, rel=0.01)
    slow = replace(fast, train=0.5, base=0.5, slots=32)  # they go on meanwhile, as far as staleness allows
    assert 0 < 30 * (simulate(slow, 30, [(200.0, TRAINER)]).step - simulate(slow, 30).step) < 20.0


def test_a_generator_that_fails_delays_its_groups_and_loses_none():
    loop = replace(EVEN, generators=4, restart=5.0)
    outcome = simulate(loop, 60, [(7.3 * number, number % 4) for number in range(1, 20)])
    assert outcome.step > simulate(loop, 60).step
    assert outcome.age == 0.0  # every group was trained on in its own step


def test_rows_end_with_their_burst():
    assert simulate(replace(EVEN, burst=16)).step == pytest.approx(64 * (0.01 + 32 * 0.001) + 2.25)


def test_generators_share_the_cores_that_training_leaves():
    alone = replace(EVEN, staleness=6, train=20.0, generators=2, base=1.0, slots=16)
    shared = simulate(replace(alone, devices=2, trainers=1), 20).step  # half of their speed while it trains
    assert shared == pytest.approx(simulate(alone, 20).step + 20.0 / 2, rel=0.01)
    assert simulate(replace(alone, devices=3, trainers=1), 20).step == pytest.approx(simulate(alone, 20).step)


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


@pytest.mark.parametrize(("mean", "spread", "longest"), [(25.0, 0.5, 30), (6000.0, 0.7, 16384), (29.9, 1.0, 30)])
def test_lengths_have_their_mean_after_they_are_cut(mean, spread, longest):
    values = lengths(replace(EVEN, mean=mean, spread=spread, longest=longest, group=4000), 0)
    assert max(values) <= longest
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.03)


@given(
    st.floats(0.1, 10),
    st.integers(1, 4),
    st.floats(0.0, 1.0),
    st.integers(0, 3),
    st.booleans(),
)
def test_staleness_never_hurts_throughput(train, generators, spread, staleness, together):
    loop = replace(EVEN, train=train, generators=generators, spread=spread, staleness=staleness)
    loop = replace(loop, devices=generators, trainers=generators) if together else loop
    less, more = simulate(loop, 12), simulate(replace(loop, staleness=staleness + 1), 12)
    assert more.step <= 1.02 * less.step


def test_same_seed_gives_the_same_outcome_and_another_one_another():
    loop = replace(EVEN, spread=0.7, generators=3, staleness=1)
    assert simulate(loop) == simulate(loop)
    assert simulate(loop) != simulate(replace(loop, seed=1))
