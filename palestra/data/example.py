"""Examples: a token store cut into the sequences that a model is trained on, by index."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from palestra.data.store import TokenStore
from palestra.errors import UsageError

OverLong = Literal["truncate", "error"]


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
    """One document an example; of one longer than `max_length` the end is cut, or it is refused."""

    def __init__(self, store: TokenStore, max_length: int, over_long: OverLong = "truncate") -> None:
        if max_length < 1:
            raise UsageError(f"documents of at most {max_length} tokens are empty")
        self.store = store
        stops = np.asarray(store.ends)
        self._starts = np.concatenate([[0], stops[:-1]])
        self._stops = np.minimum(stops, self._starts + max_length)
        long = np.flatnonzero(stops > self._stops)
        if over_long == "error" and long.size:
            raise UsageError(
                f"{long.size} of {len(store)} documents of {store.folder} have more than {max_length} tokens, first "
                f"document {long[0]} with {stops[long[0]] - self._starts[long[0]]}; truncate or drop them"
            )

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
