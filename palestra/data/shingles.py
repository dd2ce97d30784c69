"""Shingles: a text as the set of all runs of a few characters or words in it, each as a 32-bit hash.

All texts of a batch are hashed together, as arrays. Two texts share a shingle where both have the run, wherever it
stands and however often. A text that is shorter than a shingle is one shingle, whole.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from palestra.data.shuffle import Indices, Keys, fold, stream_key
from palestra.errors import UsageError

Hashes = np.ndarray[Any, np.dtype[np.uint32]]
Unit = Literal["characters", "words"]

SPACE = 32
LONGEST = 1 << 20  # characters that are hashed at once: more would take some 60 bytes of memory each


def normalised(text: str) -> str:
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
        """The hashes of the shingles of normalised texts, one text after the other, and where each text begins."""
        joined = (" " if self.unit == "words" else "").join(texts)
        # A lone surrogate is no Unicode, but JSON has a way to write it.
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
        """A normalised text in pieces that are not too long and overlap, so that together they have its shingles."""
        if len(text) <= LONGEST:
            return [text]
        shared = self.size - 1
        if self.unit == "characters":
            return [text[at : at + LONGEST + shared] for at in range(0, max(1, len(text) - shared), LONGEST)]
        words, each = text.split(" "), max(1, LONGEST // 8)
        return [" ".join(words[at : at + each + shared]) for at in range(0, max(1, len(words) - shared), each)]

    def set(self, text: str) -> Hashes:
        """The shingles of a normalised text, each once, in rising order."""
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
