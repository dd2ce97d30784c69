"""A tree of sums over an array of weights: draws in proportion to them and changes them, many at a time."""

from typing import Any

import numpy as np

WIDTH = 32  # children of a node: a level costs a few NumPy calls whatever its width, so few levels are best


class SumTree:
    """Weights of `size` items, 0 at first. A node is always summed anew from its children, so that nothing drifts."""

    def __init__(self, size: int):
        self.size = size
        self.levels: list[np.ndarray] = []  # from the items to the root, each (nodes of the next level, WIDTH)
        while not self.levels or len(self.levels[-1]) > 1:
            size = -(-size // WIDTH)
            self.levels.append(np.zeros((size, WIDTH)))

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.levels[-1].sum())

    def weights(self, items: np.ndarray) -> np.ndarray:
        """The weights of some items."""
        return self.levels[0].reshape(-1)[items]

    def set(self, items: np.ndarray, weights: np.ndarray | float) -> None:
        """Give items new weights; of an item named twice the last one stays."""
        self.levels[0].reshape(-1)[items] = weights
        for below, level in zip(self.levels[:-1], self.levels[1:], strict=True):
            items = items // WIDTH
            if len(items) > WIDTH:
                items = np.unique(items)
            level.reshape(-1)[items] = below[items].sum(axis=1)

    def find(self, at: np.ndarray) -> np.ndarray:
        """The items at which the running sum of weights passes `at`, each in [0, total); never one of weight 0."""
        node = np.zeros(len(at), np.int64)
        rows = np.arange(len(at))
        left = at
        for level in reversed(self.levels):
            children = level[node]  # (B, WIDTH)
            sums = children.cumsum(axis=1)
            # Rounding may leave a little more than the children hold: then it is the last one that holds anything.
            last = WIDTH - 1 - (children[:, ::-1] > 0).argmax(axis=1)
            child = np.minimum((sums <= left[:, None]).sum(axis=1), last)
            left = left - (sums[rows, child] - children[rows, child])
            node = node * WIDTH + child
        return node

    def state(self) -> list[np.ndarray]:
        """All sums, copied."""
        return [level.copy() for level in self.levels]

    def load_state(self, state: list[Any]) -> None:
        """Continue from `state()`."""
        self.levels = [level.copy() for level in state]
