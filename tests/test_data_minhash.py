"""Shingles, MinHash, its bands and components against exact sets, closed forms and brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data import duplicates as shingles_module
from palestra.data.duplicates import (
    BLOCK,
    MinHash,
    Shingles,
    candidates,
    connected,
    first_of_equal,
    first_of_similar,
    jaccard,
    normalized,
)
from palestra.errors import UsageError

TEXTS = st.lists(st.text(alphabet="ab cé漢", max_size=40).map(normalized), min_size=1, max_size=12)


def exact_shingles(text: str, size: int, unit: str) -> set[object]:
    items = tuple(text.split(" ")) if unit == "words" else tuple(text)
    return {items[i : i + size] for i in range(max(1, len(items) - size + 1))}


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(1, 6), st.sampled_from(["characters", "words"]))
def test_shingles_of_a_batch_are_those_of_each_text_alone(texts, size, unit):
    cut = Shingles(size, unit)
    hashes, starts = cut(texts)
    parts = np.split(hashes, starts[1:])
    names: dict[object, int] = {}
    for text, part in zip(texts, parts, strict=True):
        exact = exact_shingles(text, size, unit)
        assert len(set(part.tolist())) == len(exact)
        assert np.array_equal(cut.set(text), np.unique(part))
        # The same run has the same hash in every text, and another one another.
        for shingle, value in zip(_runs(text, size, unit), part.tolist(), strict=True):
            assert names.setdefault(shingle, value) == value
    assert len(set(names.values())) == len(names)


def _runs(text: str, size: int, unit: str) -> list[object]:
    items = tuple(text.split(" ")) if unit == "words" else tuple(text)
    return [items[i : i + size] for i in range(max(1, len(items) - size + 1))]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab c", max_size=80).map(normalized), st.integers(1, 5), st.integers(1, 30))
@pytest.mark.parametrize("unit", ["characters", "words"])
def test_pieces_of_a_long_text_have_its_shingles(unit, text, size, longest):
    cut = Shingles(size, unit)
    whole = cut.set(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shingles_module, "LONGEST", longest)
        assert max(map(len, cut.pieces(text))) <= len(text)
        assert np.array_equal(cut.set(text), whole)


def test_normalized_case_space_and_composition_make_no_difference():
    assert normalized("  Caf\u00e9\n\n AU\tlait ") == normalized("cafe\u0301 au lait") == "caf\u00e9 au lait"


def test_shingles_of_size_zero_are_refused():
    with pytest.raises(UsageError, match="at least 1"):
        Shingles(0)
    with pytest.raises(UsageError, match="at least 1"):
        MinHash(bands=0)


def pairs_of(similarity: float, union: int, pairs: int, minhash: MinHash) -> tuple[np.ndarray, np.ndarray, float]:
    """The signatures of pairs of sets of random hashes, and the similarity that each pair has."""
    rng = np.random.default_rng(7)
    common = round(similarity * union)
    alone = (union - common) // 2
    sets = []
    for hashes in rng.integers(0, 2**32, (pairs, union), dtype=np.uint32):
        sets += [hashes[: common + alone], np.concatenate([hashes[:common], hashes[common + alone :]])]
    lengths = np.array([len(one) for one in sets])
    signatures = minhash.signatures(np.concatenate(sets), np.cumsum(lengths) - lengths)
    assert jaccard(np.unique(sets[0]), np.unique(sets[1])) == common / union
    return signatures[::2], signatures[1::2], common / union


@pytest.mark.parametrize("union", [20, 200, 1000])
@pytest.mark.parametrize("similarity", [0.2, 0.5, 0.8, 0.95])
def test_estimate_over_many_pairs_is_unbiased_and_has_the_binomial_error(similarity, union):
    minhash, pairs = MinHash(), 300
    left, right, true = pairs_of(similarity, union, pairs, minhash)
    errors = np.mean(left == right, axis=-1) - true
    deviation = np.sqrt(true * (1 - true) / minhash.permutations)
    assert abs(np.mean(errors)) < 4 * deviation / np.sqrt(pairs)
    assert 0.8 * deviation < np.std(errors) < 1.25 * deviation


@pytest.mark.parametrize("similarity", [0.55, 0.65, 0.75, 0.85, 0.95])
def test_candidates_by_similarity_follow_the_curve_of_bands_and_rows(similarity):
    minhash, pairs = MinHash(), 2000
    left, right, true = pairs_of(similarity, 200, pairs, minhash)
    found = float(np.mean((minhash.keys(left) == minhash.keys(right)).any(axis=1)))
    expected = 1 - (1 - true**11) ** 26
    assert abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / pairs) + 1 / pairs


def test_signatures_over_block_boundaries_equal_those_of_plain_minima():
    rng, minhash = np.random.default_rng(0), MinHash(3, 2)
    lengths = np.array([1, BLOCK - 2, 5, 2 * BLOCK + 17, 1, 40])
    hashes = rng.integers(0, 2**32, int(lengths.sum()), dtype=np.uint32)
    starts = np.cumsum(lengths) - lengths
    together = minhash.signatures(hashes, starts)
    for row, part in zip(together, np.split(hashes, starts[1:]), strict=True):
        alone = np.min([minhash.signatures(part[i : i + 1000], np.array([0]))[0] for i in range(0, len(part), 1000)], 0)
        assert np.array_equal(row, alone)


def test_signatures_of_two_different_single_shingles_agree_nowhere():
    # Each factor is odd, so it permutes: with an even one the first and the second of these would be the same.
    hashes = np.array([1, 1 + 2**31, 5, 2**32 - 1], np.uint32)
    signatures = MinHash().signatures(hashes, np.arange(4))
    assert all(len(set(column)) == 4 for column in signatures.T.tolist())


def test_keys_of_bands_are_equal_exactly_where_all_rows_are():
    rng, minhash = np.random.default_rng(1), MinHash(5, 3)
    signatures = rng.integers(0, 2, (200, 15)).astype(np.uint32)
    keys = minhash.keys(signatures)
    bands = signatures.reshape(200, 5, 3)
    for band in range(5):
        same = (bands[:, None, band] == bands[None, :, band]).all(-1)
        assert np.array_equal(keys[:, None, band] == keys[None, :, band], same)


def brute_components(count: int, edges: list[tuple[int, int]]) -> list[int]:
    roots = list(range(count))
    changed = True
    while changed:
        changed = False
        for left, right in edges:
            low = min(roots[left], roots[right])
            changed |= roots[left] != low or roots[right] != low
            roots[left] = roots[right] = low
    return roots


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_components_of_any_graph_equal_brute_force(data):
    count = data.draw(st.integers(1, 30))
    edges = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=40))
    roots = np.arange(count)
    cut = data.draw(st.integers(0, len(edges)))
    for some in (edges[:cut], edges[cut:]):
        if some:
            roots = connected(roots, *(np.array(side) for side in zip(*some, strict=True)))
    assert roots.tolist() == brute_components(count, edges)


def test_components_of_long_paths_in_any_order_are_one():
    order = np.random.default_rng(0).permutation(20_000)
    assert not connected(np.arange(len(order)), order[:-1], order[1:]).any()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_similar_documents_by_bands_and_threshold_equal_the_graph_of_all_pairs(data):
    count, bands = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    cells = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    keys = np.array(data.draw(st.lists(cells, min_size=bands, max_size=bands)), np.uint64)
    points = data.draw(st.lists(st.integers(0, 10), min_size=count, max_size=count))
    verified = data.draw(st.booleans())
    seen: list[tuple[int, int]] = []

    def similarity(left: int, right: int) -> float:
        seen.append((min(left, right), max(left, right)))
        return 1 - abs(points[left] - points[right]) / 10

    first, compared = first_of_similar(keys, similarity if verified else None, 0.7)
    pairs = [(i, j) for i in range(count) for j in range(i) if (keys[:, i] == keys[:, j]).any()]
    edges = [(i, j) for i, j in pairs if not verified or abs(points[i] - points[j]) <= 3]
    assert first.tolist() == brute_components(count, edges)
    assert compared == len(seen) == len(set(seen))  # no pair twice
    assert np.flatnonzero(candidates(keys)).tolist() == sorted({each for pair in pairs for each in pair})


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=40), st.integers(1, 7), st.integers(1, 50))
def test_first_of_equal_in_any_parts_equals_a_dictionary(values, chunk, at_once):
    digests = np.array([[value % 3, value] for value in values], np.uint64).reshape(-1, 2)
    first = np.empty(len(values), np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("palestra.data.duplicates.AT_ONCE", at_once)
        first_of_equal(lambda: (digests[i : i + chunk] for i in range(0, len(values), chunk)), len(values), first)
    assert first.tolist() == [values.index(value) for value in values]
