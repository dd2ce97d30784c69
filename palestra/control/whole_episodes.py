"""Rows of finished episodes with their returns; rows of unfinished ones wait until they end."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.rl.returns import discounted_returns

Columns = dict[str, Tensor]


class WholeEpisodes:
    """Takes rollouts and gives back the rows of the episodes that ended in them, from their first step on."""

    def __init__(self, num_envs: int, gamma: float):
        self.gamma = gamma
        self.waiting: list[Columns | None] = [None] * num_envs  # of each environment's running episode

    def add(self, columns: Mapping[str, Tensor | None], ended: Tensor, valid: Tensor | None = None) -> Columns | None:
        """The rows `(R, ...)` of all episodes that `ended` (T, N) says are over, or None where none is.

        `columns` are (T, N, ...), with `rewards` among them; columns that are None are left out. To what comes back
        `returns` are added: the discounted sums of the rewards to the episode's end.
        """
        given = {name: column for name, column in columns.items() if column is not None}
        finished = []
        for env, waited in enumerate(self.waiting):
            ends, rows = ended[:, env], {name: column[:, env] for name, column in given.items()}
            if valid is not None:
                ends, rows = ends[valid[:, env]], {name: column[valid[:, env]] for name, column in rows.items()}
            last = int(ends.nonzero()[-1]) + 1 if ends.any() else 0
            # Cloned: a rollout's arrays are written again by the next one.
            done = {name: column[:last] for name, column in rows.items()}
            rest = {name: column[last:].clone() for name, column in rows.items()}
            if last == 0:
                self.waiting[env] = _joined(waited, rest)
                continue
            self.waiting[env] = rest
            done = _joined(waited, done)
            over = torch.cat((ends.new_zeros(len(done["rewards"]) - last), ends[:last]))
            done["returns"] = _returns(done["rewards"], over, self.gamma)
            finished.append(done)
        if not finished:
            return None
        return {name: torch.cat([rows[name] for rows in finished]) for name in finished[0]}

    def cut(self, rows: np.ndarray) -> None:
        """The environments of these rows, bool (N,), began new episodes outside of a step: what waits is dropped."""
        self.waiting = [None if gone else waited for gone, waited in zip(rows, self.waiting, strict=True)]

    def state(self) -> list[Any]:
        """What waits, copied."""
        copied = [w and {name: column.to("cpu", copy=True) for name, column in w.items()} for w in self.waiting]
        return list(copied)

    def load_state(self, state: list[Any], device: torch.device) -> None:
        """Continue from `state()`."""
        self.waiting = [w and {name: column.to(device, copy=True) for name, column in w.items()} for w in state]


def _joined(first: Columns | None, then: Columns) -> Columns:
    return then if first is None else {name: torch.cat((first[name], column)) for name, column in then.items()}


def _returns(rewards: Tensor, over: Tensor, gamma: float) -> Tensor:
    over = over.unsqueeze(1)
    never = torch.zeros_like(over)
    return discounted_returns(rewards.unsqueeze(1), terminated=over, truncated=never, gamma=gamma).squeeze(1)
