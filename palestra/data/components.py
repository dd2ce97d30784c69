"""Connected components of a graph by union-find, many edges at once."""

import numpy as np

from palestra.data.shuffle import Indices


class Components:
    """Which of `count` things hang together; the smallest of a component is its root."""

    def __init__(self, count: int) -> None:
        self.roots: Indices = np.arange(count, dtype=np.int64)
        """The root of each thing."""

    def join(self, left: Indices, right: Indices) -> None:
        """Edges from each of `left` to the one of `right` that stands at the same place."""
        while True:
            one, other = self.roots[left], self.roots[right]
            apart = one != other
            if not apart.any():
                return
            left, right, one, other = left[apart], right[apart], one[apart], other[apart]
            # Each larger root goes under the smallest of its neighbours: no cycles, since that is always downwards.
            np.minimum.at(self.roots, np.maximum(one, other), np.minimum(one, other))
            self._flatten()

    def _flatten(self) -> None:
        while not np.array_equal(above := self.roots[self.roots], self.roots):
            self.roots = above
