"""Rows that only some transitions need (final observations, first stacks of frames): slots that are used again."""

import numpy as np
import torch
from torch import Tensor


class Sparse:
    """A growing array of slots. Slot numbers begin with 1, so that a column of zeros says that there is none."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.data = torch.zeros((64, *shape), dtype=dtype, device=device)
        self.used = 0  # slots ever given out
        self.free = np.zeros(0, np.int32)

    def put(self, rows: Tensor) -> np.ndarray:
        """Store rows; the numbers of their slots."""
        again = min(len(rows), len(self.free))
        fresh = len(rows) - again
        if self.used + fresh > len(self.data):
            more = max(len(self.data), fresh)
            self.data = torch.cat([self.data, self.data.new_zeros(more, *self.data.shape[1:])])
        slots = np.concatenate(
            [self.free[len(self.free) - again :], np.arange(self.used + 1, self.used + fresh + 1, dtype=np.int32)]
        )
        self.free = self.free[: len(self.free) - again]
        self.used += fresh
        self.data[torch.from_numpy(slots - 1).long().to(self.data.device)] = rows.to(self.data)
        return slots

    def get(self, slots: Tensor) -> Tensor:
        """The rows in slots."""
        return self.data[slots.long() - 1]

    def drop(self, slots: np.ndarray) -> None:
        """Slots whose rows are not needed any more."""
        self.free = np.concatenate([self.free, slots])
