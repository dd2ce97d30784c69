"""MinHash and its locality-sensitive hashing: which texts are likely to have most of their shingles in common.

Under a random permutation of all hashes, two sets have the same smallest element with a probability that is their
Jaccard similarity s (Broder, "On the resemblance and containment of documents", 1997). The signature of a text has one
such minimum for each permutation. Signatures are cut into bands of rows; texts are candidates where all rows of a band
agree, which has the probability 1 − (1 − s^rows)^bands: a step that grows steeper with the rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.data.shingles import Hashes
from palestra.data.shuffle import Indices, Keys, fold, stream_key
from palestra.errors import UsageError

Floats = np.ndarray[Any, np.dtype[np.float64]]

BLOCK = 1 << 15  # shingles worked on at once: 128 KiB of hashes, which stay in the processor's cache


@dataclass(frozen=True)
class MinHash:
    """`bands` × `rows` permutations of the 32-bit numbers, drawn by the seed."""

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

        Multiplying by an odd number modulo 2³² permutes the 32-bit numbers. It says nothing new of numbers that have
        a pattern; hashes have none.
        """
        drawn = fold(stream_key(self.seed, "permutations"), np.arange(self.permutations))
        factors = (drawn >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        found = np.full((len(starts), self.permutations), np.iinfo(np.uint32).max, np.uint32)
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
            np.minimum(found[first:last], smallest.T, out=found[first:last])
        return found

    def keys(self, signatures: Hashes) -> Keys:
        """A 64-bit key for each band of each signature, (texts, bands); equal keys are equal rows."""
        rows = signatures.reshape(len(signatures), self.bands, self.rows)
        base = np.uint64(stream_key(self.seed, "bands") | 1)
        folded = np.zeros(rows.shape[:2], np.uint64)
        for row in range(self.rows):
            folded = folded * base + rows[:, :, row]
        return fold(stream_key(self.seed, "band keys"), folded.view(np.int64))

    def found(self, similarity: Floats | float) -> Floats | float:
        """The probability that texts of a Jaccard similarity become candidates."""
        return 1 - (1 - similarity**self.rows) ** self.bands
