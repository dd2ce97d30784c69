"""Sequences of a replay memory for recurrent networks (Kapturowski et al. 2019), with the states that acted there."""

from typing import Any

import torch

from palestra.control.memory.replay import DUMMY, Replay, ReplayBatch
from palestra.spec.off_policy import SequenceSpec


class SequenceReplay(Replay):
    """Gives consecutive steps of one environment, also over ends of episodes, where the recurrent state is cleared.

    Its further columns: where an episode `began`, and the recurrent `states` that were acted with.
    """

    def __init__(self, *shapes: Any, sequence: SequenceSpec, width: int, **options: Any):
        super().__init__(*shapes, **options)
        self.length = sequence.rows
        self.columns |= {"began": self._column((), torch.bool), "states": self._column((width,), torch.float32)}

    def sample(self, size: int, generator: torch.Generator, beta: float | None = None, batches: int = 1) -> ReplayBatch:
        """`batches` batches of `size` sequences, (batches · size, length, ...)."""
        n, count = self.num_envs, batches * size
        starts = torch.randint((self._size - self.length + 1) * n, (count,), generator=generator)
        places = (starts[:, None] + torch.arange(self.length) * n).to(self.device)
        batch = self._batch(places.flatten(), None)
        shaped = [None if column is None else column.unflatten(0, (count, self.length)) for column in batch]
        flat = self._flat(places)
        began, flags = (self.columns[name].tensor.flatten(0, 1)[flat] for name in ("began", "flags"))
        states = self.columns["states"].take(flat[:, 0])
        return ReplayBatch._make(shaped)._replace(began=began, states=states, valid=(flags & DUMMY) == 0)
