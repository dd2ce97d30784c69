import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.mixture import Epochs, fold, permutation, permute, stream_key


def deviation(counts: np.ndarray) -> float:
    """How many standard deviations Pearson's statistic of counts that should be equal lies above its mean."""
    expected, freedom = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def linear(indices: np.ndarray, length: int, seed: int) -> np.ndarray:
    """The cheap shuffle that the tests of quality must refuse: x → a·x + c modulo the length, bijective for odd a."""
    rng = np.random.default_rng(seed)
    return (indices * (2 * rng.integers(length // 2) + 1) + rng.integers(length)) % length


def key(seed: int) -> np.ndarray:
    return np.array(stream_key(seed, "permutation"), np.uint64)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_permutation_of_any_length_is_a_bijection_with_its_inverse(length, seed):
    every, moved = np.arange(length), permutation(length, seed)
    assert np.array_equal(np.sort(moved), every)
    assert np.array_equal(permute(moved, length, key(seed), inverse=True), every)
    assert np.array_equal(permutation(length, seed, length // 2), moved[: length // 2])


@settings(deadline=None)
@given(st.integers(1, 2**40), st.data())
def test_permute_in_a_huge_length_stays_inside_and_goes_back(length, data):
    index = np.array(data.draw(st.integers(0, length - 1)))
    moved = permute(index, length, key(7))
    assert 0 <= moved < length
    assert permute(moved, length, key(7), inverse=True) == index


def test_permute_of_some_indices_equals_the_whole_in_any_shape():
    shape = np.array([[5, 900], [5, 0]])
    assert np.array_equal(permute(shape, 1000, key(3)), permutation(1000, 3)[shape])


@pytest.mark.filterwarnings("error")
def test_permutation_values_are_these_on_every_machine():
    # A change of these numbers changes the data order of every run that is resumed.
    assert permutation(10, 0).tolist() == [3, 7, 9, 5, 8, 2, 1, 6, 4, 0]
    assert permutation(2**40, 0, 3).tolist() == [601760777770, 1031429355461, 477817588632]
    assert Epochs(5, 0)(np.arange(10)).tolist() == [1, 2, 3, 0, 4, 1, 2, 3, 4, 0]


def test_permutation_of_one_item_is_the_identity():
    assert permutation(1, 123).tolist() == [0]


@pytest.mark.parametrize("index", [-1, 10])
@pytest.mark.parametrize("inverse", [False, True])
def test_permute_of_an_index_outside_is_refused(index, inverse):
    with pytest.raises(IndexError, match="outside"):
        permute(np.array([3, index]), 10, key(0), inverse)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_permutation_small_lengths_every_order_comes_out_equally_often(length):
    keys = fold(stream_key(0), np.arange(60_000))
    columns = [permute(np.full(60_000, i), length, keys) for i in range(length)]
    codes = sum(column * length**i for i, column in enumerate(columns))
    orders = [sum(p * length**i for i, p in enumerate(order)) for order in itertools.permutations(range(length))]
    assert deviation(np.array([(codes == order).sum() for order in orders])) < 5


@pytest.mark.parametrize("length", [64, 130, 1000])
def test_permutation_over_seeds_sends_an_index_everywhere_equally_often(length):
    keys = fold(stream_key(1), np.arange(100_000))
    for index in (0, 1, length - 1):
        assert deviation(np.bincount(permute(np.full(100_000, index), length, keys), minlength=length)) < 5


def test_permutation_over_seeds_sends_neighbours_to_independent_places():
    length, count = 130, 400_000
    keys = fold(stream_key(2), np.arange(count))
    first, second = (permute(np.full(count, index), length, keys) for index in (0, 1))
    pairs = np.bincount(first * length + second, minlength=length**2).reshape(length, length)
    assert np.diag(pairs).sum() == 0
    assert deviation(pairs[~np.eye(length, dtype=bool)]) < 5


def lag_deviation(order: np.ndarray, lag: int) -> float:
    """Whether the step from p(i) to p(i + lag), modulo the length and in 64 bins, is spread as in a random order."""
    steps = (order[lag:] - order[:-lag]) % len(order)
    return deviation(np.bincount(steps * 64 // len(order), minlength=64))


@pytest.mark.parametrize("seed", [0, 1])
def test_permutation_steps_at_a_fixed_lag_are_spread_and_those_of_a_linear_shuffle_are_not(seed):
    length = 2**15
    every = np.arange(length)
    ours = permutation(length, seed)
    theirs = linear(every, length, seed)
    assert np.array_equal(np.sort(theirs), every)  # a bijection too, and yet no shuffle
    for lag in (1, 2, 7, 64, 182, 1024):  # 182: a row of the network's square
        assert lag_deviation(ours, lag) < 5
        assert lag_deviation(theirs, lag) > 1000


def test_permutation_has_no_phase_shift_between_epoch_and_source_order():
    # The share of the source's first quarter in each 64th of the order: a linear shuffle drifts in and out of phase.
    length = 2**15
    ours = (permutation(length, 0) < length // 4).reshape(64, -1).sum(axis=1)
    assert abs(ours - 128).max() < 5 * np.sqrt(512 * 0.25 * 0.75)


def test_epochs_each_hold_every_example_once_in_another_order():
    epochs = Epochs(50, seed=4)
    orders = [epochs(np.arange(50 * e, 50 * (e + 1))) for e in range(20)]
    assert all(np.array_equal(np.sort(order), np.arange(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 20


def test_epochs_unshuffled_repeat_the_order():
    assert Epochs(3, seed=0, shuffle=False)(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_at_any_position_equal_those_read_from_the_start():
    epochs = Epochs(130, seed=9)
    whole = epochs(np.arange(1000))
    assert Epochs(130, seed=9)(np.arange(700, 800)).tolist() == whole[700:800].tolist()


def test_epochs_of_other_seeds_are_unrelated():
    first, second = (Epochs(1000, seed=seed)(np.arange(1000)) for seed in (0, 1))
    assert (first == second).sum() < 10  # Poisson with mean 1
    # Nor is the second epoch of one seed the first of another.
    later = Epochs(1000, seed=0)(np.arange(1000, 2000))
    assert (later == second).sum() < 10
