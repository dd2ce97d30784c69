import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.store import balanced, first_fit_decreasing, micro_batches
from palestra.errors import UsageError

lengths_up_to_60 = st.lists(st.integers(1, 60), max_size=80)
few = st.lists(st.integers(1, 12), min_size=1, max_size=7)


def sums(lengths, bins) -> list[int]:
    return [sum(lengths[i] for i in indices) for indices in bins]


def assert_partition(lengths, bins) -> None:
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(list(indices) == sorted(indices) for indices in bins)


def partitions(lengths) -> Iterator[tuple[int, ...]]:
    """The sums of the bins, for every way to put the items into bins."""
    if not lengths:
        yield ()
        return
    for rest in partitions(lengths[1:]):
        yield (lengths[0], *rest)
        for place in range(len(rest)):
            yield (*rest[:place], rest[place] + lengths[0], *rest[place + 1 :])


def best_makespan(lengths, bins) -> int:
    return min(max(way) for way in partitions(lengths) if len(way) <= bins)


def fewest_bins(lengths, capacity) -> int:
    return min(len(way) for way in partitions(lengths) if max(way) <= capacity)


def first_fit_by_hand(lengths, capacity) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for indices in bins:
            if sum(lengths[i] for i in indices) + lengths[index] <= capacity:
                indices.append(index)
                break
        else:
            bins.append([index])
    return [sorted(indices) for indices in bins]


def test_first_fit_decreasing_packs_a_small_case_as_by_hand():
    # 7 + 3, 6 + 4, 5 + 2 of ten.
    assert first_fit_decreasing([3, 7, 2, 6, 5, 4], 10) == [[0, 1], [3, 5], [2, 4]]


@settings(deadline=None)
@given(lengths_up_to_60, st.integers(60, 200))
def test_first_fit_decreasing_equals_the_quadratic_loop(lengths, capacity):
    bins = first_fit_decreasing(lengths, capacity)
    assert bins == first_fit_by_hand(lengths, capacity)
    assert_partition(lengths, bins)
    assert all(0 < total <= capacity for total in sums(lengths, bins))


@settings(deadline=None)
@given(few, st.integers(12, 24))
def test_first_fit_decreasing_keeps_its_bound_against_brute_force(lengths, capacity):
    assert len(first_fit_decreasing(lengths, capacity)) <= 11 / 9 * fewest_bins(lengths, capacity) + 6 / 9


def test_first_fit_decreasing_over_long_sequence_is_refused_by_index():
    with pytest.raises(UsageError, match="sequence 1 has 11 tokens, more than the 10"):
        first_fit_decreasing([3, 11], 10)


@settings(deadline=None)
@given(lengths_up_to_60, st.integers(1, 12))
def test_balanced_is_a_partition_into_as_many_bins_with_none_empty(lengths, number):
    bins = balanced(lengths, number)
    assert len(bins) == number
    assert_partition(lengths, bins)
    assert sum(bool(indices) for indices in bins) == min(number, len(lengths))
    assert bins == balanced(list(lengths), number)
    if lengths:
        # No two bins differ by more than the longest sequence: else one could be moved.
        assert max(sums(lengths, bins)) - min(sums(lengths, bins)) <= max(lengths)


@settings(deadline=None)
@given(few, st.integers(1, 4))
def test_balanced_keeps_its_bound_against_brute_force(lengths, number):
    assert max(sums(lengths, balanced(lengths, number))) <= (4 / 3 - 1 / (3 * number)) * best_makespan(lengths, number)


def test_balanced_of_many_sequences_is_nearly_equal():
    lengths = np.random.default_rng(0).integers(1, 2000, 500).tolist()
    totals = sums(lengths, balanced(lengths, 8))
    assert max(totals) - min(totals) <= 5


@pytest.mark.parametrize("bins", [1, 2, 16])
def test_balanced_of_very_many_documents_is_equal(bins):
    lengths = np.random.default_rng(0).integers(1, 2000, 20_000).tolist()
    totals = sums(lengths, balanced(lengths, bins))
    assert max(totals) - min(totals) <= 1


def test_balanced_into_no_bins_is_refused():
    with pytest.raises(ValueError, match="0 bins"):
        balanced([1], 0)


@pytest.mark.parametrize("pack", [lambda x: first_fit_decreasing(x, 9), lambda x: balanced(x, 2)])
def test_packing_empty_sequence_is_refused_by_index(pack):
    with pytest.raises(ValueError, match="sequence 1 has 0"):
        pack([4, 0])


@settings(deadline=None)
@given(lengths_up_to_60, st.integers(60, 200))
def test_micro_batches_are_a_partition_that_fits_with_no_more_bins_than_first_fit(lengths, limit):
    bins = micro_batches(lengths, limit)
    assert_partition(lengths, bins)
    assert all(0 < total <= limit for total in sums(lengths, bins))
    assert len(bins) == len(first_fit_decreasing(lengths, limit))


def test_micro_batches_are_evened_out_where_that_fits():
    # First fit fills the first to 100 and leaves 20.
    assert sums([50, 50, 10, 10], first_fit_decreasing([50, 50, 10, 10], 100)) == [100, 20]
    assert sums([50, 50, 10, 10], micro_batches([50, 50, 10, 10], 100)) == [60, 60]


def test_micro_batches_that_only_first_fit_finds_are_kept():
    lengths = [12, 5, 8, 9, 10]
    assert max(sums(lengths, balanced(lengths, 2))) > 22
    assert sums(lengths, micro_batches(lengths, 22)) == [22, 22]


def test_micro_batches_of_nothing_are_none():
    assert micro_batches([], 10) == []


def test_packing_work_grows_no_faster_than_n_log_n():
    lengths = np.random.default_rng(1).integers(1, 4096, 4_000).tolist()

    def lines(n: int) -> int:
        return lines_run(lambda: first_fit_decreasing(lengths[:n], 4096))

    assert lines(4_000) < 20 * lines(400)  # quadratic would be 100 times
