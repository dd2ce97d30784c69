"""Examples: a token store cut into the sequences that a model is trained on, by index."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from palestra.data.store import TokenStore
from palestra.errors import UsageError

OverLong = Literal["truncate", "drop", "split", "error"]


@dataclass(frozen=True)
class Example:
    """One sequence of tokens, of one or several documents."""

    tokens: np.ndarray
    """(T) int32"""
    segments: np.ndarray
    """(S) int64, the lengths of the pieces of documents in it; they add up to T. Attention may stay inside them."""
    loss: np.ndarray | None = None
    """(T) bool, which tokens are trained on; None where all are."""


class Windows:
    """The documents end to end, cut every `length` tokens; what is left at the end is not used."""

    def __init__(self, store: TokenStore, length: int) -> None:
        if length < 2:
            raise UsageError(f"a window of {length} tokens has nothing to predict; it needs at least 2")
        self.store, self.length = store, length

    def __len__(self) -> int:
        return self.store.num_tokens // self.length

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start, stop = index * self.length, (index + 1) * self.length
        ends = self.store.ends
        first, last = np.searchsorted(ends, [start, stop], side="right")
        # Unique: a document may end with the window, and one without tokens where the last one did.
        bounds = np.unique(np.concatenate([[start], ends[first:last], [stop]]))
        return _example(self.store, start, stop, np.diff(bounds))


class Documents:
    """One document an example; what is longer than `max_length` is cut, left out, split into several or refused.

    Cutting keeps the beginning. Documents without tokens are left out.
    """

    def __init__(self, store: TokenStore, max_length: int, over_long: OverLong = "truncate") -> None:
        if over_long not in get_args(OverLong):
            raise UsageError(f"over_long is {over_long!r}; it can be {', '.join(get_args(OverLong))}")
        if max_length < 1:
            raise UsageError(f"documents of at most {max_length} tokens are empty")
        self.store = store
        stops = np.asarray(store.ends)
        starts = np.concatenate([[0], stops[:-1]])
        long = np.flatnonzero(stops - starts > max_length)
        if over_long == "error" and long.size:
            raise UsageError(
                f"{long.size} of {len(store)} documents of {store.folder} have more than {max_length} tokens, first "
                f"document {long[0]} with {stops[long[0]] - starts[long[0]]}; truncate, drop or split them"
            )
        if over_long == "truncate":
            stops = np.minimum(stops, starts + max_length)
        elif over_long == "drop":
            starts, stops = np.delete(starts, long), np.delete(stops, long)
        elif over_long == "split":
            starts, stops = _pieces(starts, stops, max_length)
        some = stops > starts
        self._starts, self._stops = starts[some], stops[some]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, for packing."""
        return self._stops - self._starts

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        start, stop = int(self._starts[index]), int(self._stops[index])
        return _example(self.store, start, stop, np.array([stop - start]))


def _example(store: TokenStore, start: int, stop: int, segments: np.ndarray) -> Example:
    loss = None if store.loss is None else np.array(store.loss[start:stop])
    return Example(store.tokens[start:stop].astype(np.int32), segments, loss)


def _pieces(starts: np.ndarray, stops: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Each stretch in pieces of `max_length`, the last one shorter."""
    counts = -(-(stops - starts) // max_length)
    whose = np.repeat(np.arange(len(starts)), counts)
    nth = np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)
    cut = starts[whose] + nth * max_length
    return cut, np.minimum(cut + max_length, stops[whose])
