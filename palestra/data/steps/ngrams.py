"""Words and hashes of word n-grams, as arrays: what decontamination compares and the classifier counts."""

import hashlib
import re

import numpy as np

from palestra.data.shuffle import Keys

WORD = re.compile(r"\w+")
BASE = 0x9E3779B97F4A7C15  # odd, so that multiplying loses nothing
KNOWN_WORDS = 1 << 20
_known: dict[str, int] = {}


def word_hashes(text: str) -> Keys:
    """A 64-bit hash of each word, in lower case and without punctuation; the same on every machine."""
    if len(_known) > KNOWN_WORDS:  # bounded, whatever is read
        _known.clear()
    words = WORD.findall(text.lower())
    return np.fromiter((_known.get(word) or _hash(word) for word in words), np.uint64, len(words))


def ngram_hashes(words: Keys, n: int) -> Keys:
    """A hash of each n words that follow one another: (words − n + 1), empty where there are fewer."""
    count = len(words) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    found = np.zeros(count, np.uint64)
    for i in range(n):
        found = found * np.uint64(BASE) + words[i : i + count]
    found ^= found >> np.uint64(32)  # the low bits depend on the low bits of words alone
    return found * np.uint64(BASE | 1)


def _hash(word: str) -> int:
    value = int.from_bytes(hashlib.blake2b(word.encode(errors="replace"), digest_size=8).digest(), "little") or 1
    _known[word] = value
    return value
