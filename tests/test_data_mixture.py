import numpy as np
import pytest
from conftest import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data.mixture import Mixture
from palestra.errors import UsageError

ONES, TENS, HUNDREDS = [1, 2, 3, 4, 5], [10, 20, 30, 40, 50], [100, 200, 300, 400, 500]
THREE = {"ones": ONES, "tens": TENS, "hundreds": HUNDREDS}
WEIGHTS = {"ones": 0.5, "tens": 0.3, "hundreds": 0.2}


def plain(weights=None, datasets=None, **options) -> Mixture[int]:
    """The small mixture of the goldens: blocks of ten, nothing shuffled."""
    options = {"block_size": 10, "shuffle": False, "shuffle_blocks": False, "seed": 0} | options
    return Mixture(THREE if datasets is None else datasets, WEIGHTS if weights is None else weights, **options)


def values(mixture: Mixture[int], positions) -> list[int]:
    return mixture.examples(np.fromiter(positions, np.int64))


def counts(mixture: Mixture[int], positions) -> list[int]:
    components, _ = mixture.lookup(np.fromiter(positions, np.int64))
    return np.bincount(components, minlength=len(mixture.names)).tolist()


def at(mixture: Mixture[int], position: int) -> tuple[str, int]:
    (component,), (index,) = mixture.lookup(np.array([position]))
    return mixture.names[component], int(index)


# Goldens: the numbers of the reference's tests.


def test_first_exhausted_unshuffled_ends_with_the_first_dataset():
    mixture = plain(stop="first_exhausted")
    assert len(mixture) == 5
    assert values(mixture, range(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(IndexError, match="5 examples"):
        at(mixture, 5)


def test_all_exhausted_unshuffled_ends_with_the_last_dataset_and_wraps_the_others():
    mixture = plain(stop="all_exhausted")
    assert len(mixture) == 29
    assert values(mixture, [10, 28]) == [1, 500]


def test_all_exhausted_reached_before_the_last_stage_ends_there():
    stages = [(0, {"ones": 0.5, "tens": 0.5}), (20, {"ones": 1.0, "tens": 0.0})]
    assert len(plain(stages, stop="all_exhausted")) == 10


def test_first_exhausted_before_the_last_stage_ends_there():
    stages = [(0, {"ones": 1.0, "tens": 0.0}), (10, {"ones": 0.0, "tens": 1.0})]
    mixture = plain(stages, stop="first_exhausted")
    assert len(mixture) == 5
    assert values(mixture, range(5)) == ONES


def test_restart_has_no_length_and_wraps_around():
    mixture = plain(stop="restart")
    assert mixture.endless
    with pytest.raises(TypeError, match="restart"):
        len(mixture)
    assert values(mixture, [4, 10, 11]) == [5, 1, 2]


def test_all_exhausted_that_a_dropped_dataset_never_reaches_is_endless():
    stages = [(0, {"ones": 1, "tens": 1}), (10, {"ones": 1})]
    assert plain(stages, {"ones": ONES, "tens": list(range(6))}, stop="all_exhausted").endless
    assert not plain(stages, {"ones": ONES, "tens": list(range(6))}, stop="first_exhausted").endless


def test_counts_of_the_published_eleven_dataset_mixture_in_a_block_of_2048():
    nemotron = {
        "hq_actual": 0.91351,
        "hq_synth": 2.72,
        "medium_high": 0.82471,
        "medium": 3.38,
        "medium_low": 1.54,
        "low_actual": 0.70123,
        "low_synth": 0.62771,
    }
    dclm = {"dclm_baseline": 3.8, "starcoder": 0.25, "proofpile_2": 0.055}
    weights = {name: 0.4 * weight / sum(nemotron.values()) for name, weight in nemotron.items()}
    weights |= {name: 0.5 * weight / sum(dclm.values()) for name, weight in dclm.items()}
    weights["fineweb"] = 0.1
    mixture = Mixture(dict.fromkeys(weights, range(10**6)), weights, seed=0)
    assert dict(zip(mixture.names, counts(mixture, range(2048)), strict=True)) == {
        "dclm_baseline": 953,
        "medium": 258,
        "hq_synth": 208,
        "fineweb": 204,
        "medium_low": 117,
        "hq_actual": 69,
        "medium_high": 63,
        "starcoder": 62,
        "low_actual": 53,
        "low_synth": 48,
        "proofpile_2": 13,
    }


# Stages and weights.


def test_stages_change_at_their_block_and_count_on_within_a_dataset():
    stages = [(0, {"ones": 0.8, "tens": 0.2}), (20, {"ones": 0.2, "tens": 0.6, "hundreds": 0.2}), (40, {"tens": 1})]
    mixture = plain(stages, shuffle_blocks=True)
    assert [counts(mixture, range(start, start + 10)) for start in (0, 10, 20, 30, 40, 900)] == [
        [8, 2, 0],
        [8, 2, 0],
        [2, 6, 2],
        [2, 6, 2],
        [0, 10, 0],
        [0, 10, 0],
    ]
    # Unshuffled within a dataset: its examples go round in order, over all the stages.
    tens = [value for value in values(mixture, range(100)) if 10 <= value < 100]
    assert tens == [TENS[i % 5] for i in range(len(tens))]


def test_weights_are_relative_and_zero_weight_is_for_validation_only():
    mixture = plain({"ones": 0, "tens": 7, "hundreds": 7})
    assert mixture.names == ("tens", "hundreds")
    assert mixture.datasets["ones"] is ONES
    assert counts(mixture, range(1000)) == [500, 500]
    assert plain({"tens": 1}).names == ("tens",)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([(10, WEIGHTS)], "expected 0 first"),
        ([], "expected 0 first"),
        ([(0, WEIGHTS), (15, WEIGHTS)], "multiples of the block size 10"),
        ([(0, WEIGHTS), (20, WEIGHTS), (10, WEIGHTS)], "rising multiples"),
        ([(0, WEIGHTS), (20, WEIGHTS), (20, WEIGHTS)], "rising multiples"),
        ([(0, {"ones": 1, "twos": 1})], "name twos; the datasets are ones, tens, hundreds"),
        ([(0, {"ones": -1, "tens": 2})], "'ones' -1"),
        ([(0, {"ones": float("nan")})], "nan"),
        ([(0, {"ones": 0.0})], "all 0"),
    ],
)
def test_stages_that_do_not_fit_are_refused_by_name(stages, message):
    with pytest.raises(UsageError, match=message):
        plain(stages)


def test_weight_that_rounds_to_no_example_is_an_error_that_names_the_block_size():
    weights = {"ones": 0.97, "tens": 0.03}
    with pytest.raises(UsageError, match=r"'tens'.*block_size to at least 34"):
        plain(weights, block_size=33)
    assert counts(plain(weights, block_size=34), range(34)) == [33, 1]


@settings(deadline=None)
@given(st.floats(1e-6, 0.4))
def test_block_size_named_in_the_error_is_the_smallest_that_works(weight):
    weights = {"ones": 1 - weight, "tens": weight}
    with pytest.raises(UsageError, match="at least") as error:
        plain(weights, block_size=1)
    enough = int(str(error.value).split("at least ")[1].split(",")[0])
    plain(weights, block_size=enough)
    with pytest.raises(UsageError):
        plain(weights, block_size=enough - 1)


def test_dataset_with_weight_but_no_examples_is_refused():
    with pytest.raises(UsageError, match="'empty' has a weight but no examples"):
        plain({"empty": 1, "ones": 1}, {"empty": [], "ones": ONES})
    plain({"ones": 1}, {"empty": [], "ones": ONES})


# Properties.

mixtures = st.builds(
    lambda lengths, weights, second, block, seed, cut: Mixture(
        {str(i): range(n) for i, n in enumerate(lengths)},
        [(0, dict(zip("0123", weights, strict=False))), (cut * block, dict(zip("0123", second, strict=False)))],
        block_size=block,
        seed=seed,
    ),
    st.lists(st.integers(1, 30), min_size=4, max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(36, 80),
    st.integers(0, 2**64),
    st.integers(1, 5),
)


@settings(max_examples=15, deadline=None)
@given(mixtures)
def test_every_full_block_has_exactly_the_counts_of_its_stage(mixture):
    size = mixture.block_size
    seen = [counts(mixture, range(block * size, (block + 1) * size)) for block in range(12)]
    for block, row in enumerate(seen):
        stage = mixture._stages[block >= mixture._stages[1].first_block]
        assert row == stage.counts.tolist()
        assert sum(row) == size


@settings(max_examples=15, deadline=None)
@given(mixtures)
def test_each_pass_over_a_dataset_draws_every_example_once(mixture):
    components, indices = mixture.lookup(np.arange(12 * mixture.block_size))
    for number, name in enumerate(mixture.names):
        length = len(mixture.datasets[name])
        drawn = indices[components == number]
        for start in range(0, len(drawn) - length + 1, length):
            assert sorted(drawn[start : start + length]) == list(range(length))


@settings(max_examples=30, deadline=None)
@given(mixtures, st.lists(st.integers(0, 2000), min_size=1, max_size=20))
def test_lookup_of_any_positions_equals_one_at_a_time(mixture, positions):
    components, indices = mixture.lookup(np.array(positions))
    expected = [at(mixture, position) for position in positions]
    assert [(mixture.names[c], i) for c, i in zip(components, indices, strict=True)] == expected


@settings(max_examples=15, deadline=None)
@given(mixtures, st.sampled_from(["first_exhausted", "all_exhausted"]))
def test_end_of_a_shuffled_mixture_is_where_counting_finds_it(mixture, stop):
    weights = [
        (stage.first_block * mixture.block_size, dict(zip(mixture.names, stage.counts.tolist(), strict=True)))
        for stage in mixture._stages
    ]
    ending = Mixture(mixture.datasets, weights, seed=1, block_size=mixture.block_size, stop=stop)
    components, _ = Mixture(mixture.datasets, weights, seed=1, block_size=mixture.block_size).lookup(np.arange(3000))
    ends = []
    for number, name in enumerate(ending.names):
        places = np.flatnonzero(components == number)
        length = len(mixture.datasets[name])
        ends.append(int(places[length - 1]) + 1 if len(places) >= length else None)
    if stop == "all_exhausted" and None in ends:
        assert ending.endless
    else:
        wanted = max if stop == "all_exhausted" else min
        assert len(ending) == wanted(end for end in ends if end is not None)


def test_blocks_are_all_ordered_differently_and_always_the_same():
    mixture = plain(block_size=64, shuffle_blocks=True, seed=5)
    components, _ = mixture.lookup(np.arange(64 * 300))
    assert len({tuple(block) for block in components.reshape(300, 64)}) == 300
    again, _ = plain(block_size=64, shuffle_blocks=True, seed=5).lookup(np.arange(64 * 300))
    assert np.array_equal(components, again)
    other, _ = plain(block_size=64, shuffle_blocks=True, seed=6).lookup(np.arange(64 * 300))
    assert not np.array_equal(components, other)


def test_datasets_of_one_length_are_shuffled_differently():
    mixture = Mixture({"a": range(1000), "b": range(1000)}, {"a": 1, "b": 1}, seed=0, shuffle_blocks=False)
    _, indices = mixture.lookup(np.arange(2048))
    assert (indices[:1000] == indices[1024:2024]).sum() < 10


def test_batches_after_a_resume_equal_those_of_a_run_from_the_start():
    def build() -> Mixture[int]:
        return Mixture(THREE, [(0, WEIGHTS), (320, {"tens": 0.9, "hundreds": 0.1})], block_size=20, seed=3)

    mixture = build()
    stream = [mixture.examples(np.arange(16 * step, 16 * step + 16)) for step in range(60)]
    for step in (0, 19, 20, 29, 30, 59):
        assert build().examples(np.arange(16 * step, 16 * step + 16)) == stream[step]


def test_batch_far_into_the_data_costs_what_the_first_one_does():
    mixture = Mixture({"a": range(10**12), "b": range(3)}, {"a": 0.9, "b": 0.1}, seed=0)

    mixture.lookup(np.arange(8))  # what is imported or made once is no part of a batch

    def lines(start: int) -> int:
        return lines_run(lambda: mixture.lookup(np.arange(start, start + 512)))

    assert lines(10**13) < 10 * lines(0)
    assert at(mixture, 10**13)[0] in {"a", "b"}
