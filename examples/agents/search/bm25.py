"""Okapi BM25 (Robertson and Zaragoza, 2009): the texts that share the rarest words with a query, the best first."""

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.2, 0.75
"""How soon more of a word counts less, and how much longer texts are discounted."""


def words(text: str) -> list[str]:
    """In lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


class Index:
    """Texts to search in."""

    def __init__(self, texts: Sequence[str]):
        self.texts = texts
        self._counts = [Counter(words(text)) for text in texts]
        lengths = [counts.total() for counts in self._counts]
        mean = sum(lengths) / max(1, len(lengths)) or 1.0  # of empty texts
        self._damping = [K1 * (1 - B + B * length / mean) for length in lengths]
        self._places: dict[str, list[int]] = {}
        for place, counts in enumerate(self._counts):
            for word in counts:
                self._places.setdefault(word, []).append(place)

    def search(self, query: str, count: int = 1) -> list[str]:
        """The best texts; those with the same score in the order of the index. None where no word occurs."""
        scores: Counter[int] = Counter()
        for word in words(query):
            places = self._places.get(word, ())
            rarity = math.log(1 + (len(self.texts) - len(places) + 0.5) / (len(places) + 0.5))
            for place in places:
                often = self._counts[place][word]
                scores[place] += rarity * often * (K1 + 1) / (often + self._damping[place])  # type: ignore[assignment]
        return [self.texts[place] for place, _ in sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:count]]
