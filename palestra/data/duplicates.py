"""Shingles, word n-grams, MinHash with LSH and union-find: which texts are the same, or nearly so.

All texts of a batch are hashed together, as arrays. Two texts share a shingle where both contain it, at any place and
however often. A text that is shorter than a shingle is one shingle.

Under a random permutation of all hashes, two sets have the same smallest element with a probability that is their
Jaccard similarity s (Broder, "On the resemblance and containment of documents", 1997). The signature of a text has one
such minimum for each permutation. Signatures are cut into bands of rows; texts are candidates where all rows of a band
agree, which has the probability 1 − (1 − s^rows)^bands: a step that grows steeper with the rows.
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from palestra.data.mixture import Indices, Keys, fold, stream_key
from palestra.errors import UsageError

Hashes = np.ndarray[Any, np.dtype[np.uint32]]
Unit = Literal["characters", "words"]

SPACE = 32
LONGEST = 1 << 20  # characters that are hashed at once: more would take some 60 bytes of memory each


def normalized(text: str) -> str:
    """The text in which differences of case, white space and Unicode composition are gone."""
    return " ".join(unicodedata.normalize("NFC", text).lower().split())


@dataclass(frozen=True)
class Shingles:
    """How texts are cut: `size` characters or words each, hashed by a key of the seed."""

    size: int = 5
    unit: Unit = "characters"
    seed: int = 42

    def __post_init__(self) -> None:
        if self.size < 1 or self.unit not in get_args(Unit):
            raise UsageError(
                f"shingles of {self.size} {self.unit}: give a size of at least 1, and {' or '.join(get_args(Unit))}"
            )

    def __call__(self, texts: Sequence[str]) -> tuple[Hashes, Indices]:
        """The hashes of the shingles of normalized texts, one text after the other, and where each text begins."""
        joined = (" " if self.unit == "words" else "").join(texts)
        # A lone surrogate is not Unicode, but JSON has a way to write it.
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        base = np.uint64(stream_key(self.seed, "shingles") | 1)
        if self.unit == "words":
            lengths = np.array([text.count(" ") + 1 for text in texts], np.int64)
            items = _words(codes, base)
        else:
            lengths = np.array([len(text) for text in texts], np.int64)
            items = codes + np.uint64(1)  # 0 fills up short texts
        items, lengths = _filled_up(items, lengths, self.size)
        values = items[: len(items) - self.size + 1].copy()
        for place in range(1, self.size):  # a polynomial in the base, modulo 2⁶⁴
            values *= base
            values += items[place : place + len(values)]
        ends = np.cumsum(lengths)
        inside = np.ones(len(values), bool)  # no windows that begin in one text and end in another
        if self.size > 1:
            inside[(ends[:-1, None] - np.arange(1, self.size)).ravel()] = False
        key = stream_key(self.seed, "shingle hashes")
        hashes = (fold(key, values[inside].view(np.int64)) >> np.uint64(32)).astype(np.uint32)
        counts = lengths - (self.size - 1)
        return hashes, np.cumsum(counts) - counts

    def pieces(self, text: str) -> list[str]:
        """A normalized text in pieces that are not too long and overlap, so that together they have its shingles."""
        if len(text) <= LONGEST:
            return [text]
        shared = self.size - 1
        if self.unit == "characters":
            return [text[at : at + LONGEST + shared] for at in range(0, max(1, len(text) - shared), LONGEST)]
        words, each = text.split(" "), max(1, LONGEST // 8)
        return [" ".join(words[at : at + each + shared]) for at in range(0, max(1, len(words) - shared), each)]

    def set(self, text: str) -> Hashes:
        """The shingles of a normalized text, each once, in rising order."""
        return np.unique(np.concatenate([self([piece])[0] for piece in self.pieces(text)]))


def jaccard(left: Hashes, right: Hashes) -> float:
    """The share of two sets that they have in common: |A ∩ B| / |A ∪ B|."""
    both = np.intersect1d(left, right, assume_unique=True).size
    return both / (left.size + right.size - both)


def _words(codes: Keys, base: np.uint64) -> Keys:
    """A hash for each word of texts that were joined by spaces, which does not depend on where the word stands.

    With sums of code · baseⁱ up to each place, a word is a difference of two sums, moved back to place 0 by the
    inverse of the base, which an odd number has modulo 2⁶⁴.
    """
    powers = _powers(base, len(codes))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((codes + np.uint64(1)) * powers, dtype=np.uint64)])
    spaces = np.flatnonzero(codes == SPACE)
    starts, ends = np.concatenate([[0], spaces + 1]), np.concatenate([spaces, [len(codes)]])
    back = _powers(np.uint64(pow(int(base), -1, 2**64)), len(codes) + 1)
    return (sums[ends] - sums[starts]) * back[starts] + np.uint64(1)


def _powers(base: np.uint64, count: int) -> Keys:
    powers = np.full(count, base)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


def _filled_up(items: Keys, lengths: Indices, size: int) -> tuple[Keys, Indices]:
    """The items of each text, those that have fewer than `size` filled up with zeros."""
    wide = np.maximum(lengths, size)
    if (wide == lengths).all():
        return items, lengths
    moved = (np.cumsum(wide) - wide) - (np.cumsum(lengths) - lengths)
    filled = np.zeros(wide.sum(), np.uint64)
    filled[np.arange(len(items)) + np.repeat(moved, lengths)] = items
    return filled, wide


BLOCK = 1 << 15  # shingles worked on at once: 128 KiB of hashes, which stay in the processor's cache


@dataclass(frozen=True)
class MinHash:
    """`bands` × `rows` permutations of the 32-bit numbers, sampled by the seed."""

    bands: int = 26
    rows: int = 11
    seed: int = 42

    def __post_init__(self) -> None:
        if self.bands < 1 or self.rows < 1:
            raise UsageError(f"MinHash with {self.bands} bands of {self.rows} rows: give at least 1 of each")

    @property
    def permutations(self) -> int:
        """Numbers in a signature."""
        return self.bands * self.rows

    def signatures(self, hashes: Hashes, starts: Indices) -> Hashes:
        """The signature of each text, (texts, permutations), of shingles as `Shingles` gives them.

        Multiplying by an odd number modulo 2³² permutes the 32-bit numbers. It would not mix numbers that have a
        pattern; hashes have none.
        """
        sampled = fold(stream_key(self.seed, "permutations"), np.arange(self.permutations))
        factors = (sampled >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        minima = np.full((len(starts), self.permutations), np.iinfo(np.uint32).max, np.uint32)
        product = np.empty(min(BLOCK, len(hashes)), np.uint32)
        for low in range(0, len(hashes), BLOCK):
            block = hashes[low : low + BLOCK]
            first = int(np.searchsorted(starts, low, "right")) - 1
            last = int(np.searchsorted(starts, low + len(block), "left"))
            begins = np.maximum(starts[first:last] - low, 0)
            smallest = np.empty((self.permutations, last - first), np.uint32)
            for number, factor in enumerate(factors):
                np.multiply(block, factor, out=product[: len(block)])
                np.minimum.reduceat(product[: len(block)], begins, out=smallest[number])
            np.minimum(minima[first:last], smallest.T, out=minima[first:last])
        return minima

    def keys(self, signatures: Hashes) -> Keys:
        """A 64-bit key for each band of each signature, (texts, bands); equal keys are equal rows."""
        rows = signatures.reshape(len(signatures), self.bands, self.rows)
        base = np.uint64(stream_key(self.seed, "bands") | 1)
        folded = np.zeros(rows.shape[:2], np.uint64)
        for row in range(self.rows):
            folded = folded * base + rows[:, :, row]
        return fold(stream_key(self.seed, "band keys"), folded.view(np.int64))


def connected(roots: Indices, left: Indices, right: Indices) -> Indices:
    """Union-find: the roots of all nodes with an edge from each of `left` to the one of `right` at the same index.

    The smallest node of a component is its root.
    """
    while (apart := roots[left] != roots[right]).any():
        left, right = left[apart], right[apart]
        ends = np.stack([roots[left], roots[right]])
        roots = roots.copy()
        # Each larger root goes under the smallest of its neighbors: no cycles, since that is always downwards.
        np.minimum.at(roots, ends.max(0), ends.min(0))
        while not np.array_equal(above := roots[roots], roots):
            roots = above
    return roots


AT_ONCE = 1 << 24  # digests that are sorted together: some 0.8 GB
NEIGHBORS = 64
"""With how many others of a bucket a document is compared. Beyond that, texts that share a band by chance (a common
beginning, a licence) would be compared with each other in their square."""


def first_of_equal(read: Callable[[], Iterable[Keys]], count: int, first: Indices) -> None:
    """Fill `first` with the number of the first text that has the same digest; of most texts that is their own.

    `read` gives the digests of all `count` texts in order, in chunks of (texts, 2), 128 bits each. They are sorted in
    as many parts as they need, and read as often; equal ones are always in one part.
    """
    parts = np.uint64(max(1, -(-count // AT_ONCE)))
    for part in range(int(parts)):
        digests, numbers, begin = [], [], 0
        for chunk in read():
            chosen = np.flatnonzero(chunk[:, 0] % parts == part)
            digests.append(chunk[chosen])
            numbers.append(chosen + begin)
            begin += len(chunk)
        if not digests:
            return
        ours, number = np.concatenate(digests), np.concatenate(numbers)
        order = np.lexsort((ours[:, 1], ours[:, 0]))  # stable: of equal ones the earlier comes first
        ours, number = ours[order], number[order]
        new = np.ones(len(ours), bool)
        new[1:] = (ours[1:] != ours[:-1]).any(axis=1)
        first[number] = number[new][np.cumsum(new) - 1]


def candidates(keys: Keys) -> np.ndarray:
    """Which documents share a band with another one; `keys` is (bands, documents)."""
    shared = np.zeros(keys.shape[1], bool)
    for band in keys:
        order, same = _sorted(band, 1)
        shared[order[:-1][same]] = shared[order[1:][same]] = True
    return shared


def first_of_similar(
    keys: Keys, similarity: Callable[[int, int], float] | None, threshold: float
) -> tuple[Indices, int]:
    """The first document of the component of each, and how many pairs were compared; `keys` is (bands, documents).

    Documents are linked where they share a band and, with a `similarity`, where this is at least the threshold. Two
    that are connected already are not compared: it would change nothing. So the components are those of the graph of
    all candidate pairs, in whatever order these come, up to `NEIGHBORS`.
    """
    roots, compared = np.arange(keys.shape[1]), 0
    for number, band in enumerate(keys):
        for distance in range(1, 2 if similarity is None else NEIGHBORS + 1):
            order, same = _sorted(band, distance)
            if not same.any():
                break
            left, right = order[:-distance][same], order[distance:][same]
            if similarity is not None:
                apart = roots[left] != roots[right]
                left, right = left[apart], right[apart]
                new = ~np.any([earlier[left] == earlier[right] for earlier in keys[:number]], axis=0)
                left, right = (left[new], right[new]) if number else (left, right)
                compared += len(left)
                pairs = zip(left.tolist(), right.tolist(), strict=True)
                alike = np.fromiter((similarity(*pair) >= threshold for pair in pairs), bool, len(left))
                left, right = left[alike], right[alike]
            roots = connected(roots, left, right)
    return roots, compared


def _sorted(band: Keys, distance: int) -> tuple[Indices, np.ndarray]:
    """The documents in the order of their keys, and which have the same key as the one `distance` places further."""
    order = np.argsort(band, kind="stable")
    ordered = band[order]
    return order, ordered[:-distance] == ordered[distance:]


WORD = re.compile(r"\w+")
BASE = 0x9E3779B97F4A7C15  # odd, so that multiplying loses nothing


@lru_cache(maxsize=1 << 20)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(errors="replace"), digest_size=8).digest(), "little") or 1


def word_hashes(text: str) -> Keys:
    """A 64-bit hash of each word, in lower case and without punctuation; the same on every machine."""
    words = WORD.findall(text.lower())
    return np.fromiter(map(_word_hash, words), np.uint64, len(words))


def ngram_hashes(words: Keys, n: int) -> Keys:
    """A hash of each n words that follow one another: (words − n + 1), empty where there are fewer."""
    count = len(words) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    for i in range(n):
        hashes = hashes * np.uint64(BASE) + words[i : i + count]
    hashes ^= hashes >> np.uint64(32)  # the low bits depend on the low bits of words alone
    return hashes * np.uint64(BASE | 1)
