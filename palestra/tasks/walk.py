"""One task's prompts, pass after pass: each prompt once in a pass, in an order of its own or in that of its file."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from palestra.data.shuffle import Indices, fold, permute, stream_key
from palestra.errors import PalestraError, UsageError
from palestra.spec.tasks import PoolSpec, TrainTask
from palestra.tasks.enumerated import Enumerated
from palestra.tasks.orders import read_order, some
from palestra.tasks.pools import Floats, Pool
from palestra.tasks.types import Problem

BLOCK = 256
"""Prompts that are looked up at once."""


class Walk:
    """The prompts of one use of a task. What it remembers is the pass, the place in it and what the pool has seen."""

    def __init__(self, use: TrainTask, problems: Sequence[Problem], seed: int, pool: PoolSpec | None = None):
        if len(problems) == 0:
            raise UsageError(f"the split '{use.split}' of {use.label} has no problems")
        self.use, self.problems = use, problems
        self._indices: dict[str, int] | None = None
        self._order = None if use.order is None else self._read(use.order)
        total = len(problems) if self._order is None else len(self._order)
        self.length = total if use.count is None else min(use.count, total)
        self.pool = None if pool is None else Pool(pool, self.length, use.label)
        self._pass_key, self._pool_key = stream_key(seed, "pass"), stream_key(seed, "pool")
        self._block = lru_cache(maxsize=2)(self._draw_block)
        self._ahead: dict[int, Problem] = {}
        self.passes = self._place = 0

    @property
    def left(self) -> bool:
        """Whether there is a prompt to draw: there is, unless a pool has dropped them all."""
        return self.pool is None or self.pool.left

    @property
    def progress(self) -> float:
        """How many passes are done, with the part of this one."""
        return self.passes + self._place / self.length

    def next(self) -> int | None:
        """The index of the next prompt; None, once, where a pass ends."""
        while self._place < self.length:
            block, start = divmod(self._place, BLOCK)
            indices, numbers = self._block(self.passes, block)
            indices, numbers = indices[start:], numbers[start:]
            taken = np.array([0]) if self.pool is None else np.flatnonzero(numbers < self.pool.chances(indices))
            if len(taken):
                self._place += int(taken[0]) + 1
                return int(indices[taken[0]])
            self._place += len(indices)
        self.passes, self._place = self.passes + 1, 0
        return None

    def problem(self, index: int) -> Problem:
        """The problem of the index that `next` gave last."""
        if not isinstance(self.problems, Enumerated):
            return self.problems[index]
        if index not in self._ahead:  # those that follow are made along with it
            block, start = divmod(self._place - 1, BLOCK)
            indices = self._block(self.passes, block)[0][start:]
            self._ahead = dict(zip(indices.tolist(), self.problems.at(indices), strict=True))
        return self._ahead[index]

    def locate(self, id: str) -> int | None:
        """The index of a problem by its id; None where there is none."""
        if isinstance(self.problems, Enumerated):
            prefix = f"{self.use.label}/{self.use.split}/"
            return self.problems.locate(id.removeprefix(prefix)) if id.startswith(prefix) else None
        if self._indices is None:
            self._indices = {problem.id: index for index, problem in enumerate(self.problems)}
            if len(self._indices) < len(self.problems):
                raise PalestraError(f"the task {self.use.label} has problems with the same id; ids must differ")
        return self._indices.get(id)

    def observe(self, id: str, rate: float) -> None:
        """Note how often a prompt was solved."""
        if self.pool is None:
            return
        index = self.locate(id)
        if index is None:
            raise PalestraError(f"{id} is no problem of {self.use.label}")
        self.pool.observe(index, rate)

    def state(self) -> dict[str, Any]:
        """Where it is, and what the pool has seen."""
        pool = None if self.pool is None else self.pool.state()
        return {"length": self.length, "passes": self.passes, "place": self._place, "pool": pool}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        if state["length"] != self.length:
            raise PalestraError(
                f"{self.use.label} has {self.length} prompts and had {state['length']} at the checkpoint: "
                "resume with the data and the args that the run began with"
            )
        self.passes, self._place = state["passes"], state["place"]
        if self.pool is not None:
            self.pool.load_state(state["pool"])

    def _draw_block(self, passes: int, block: int) -> tuple[Indices, Floats]:
        """The prompts of a block of a pass, in order, and a number of [0, 1) for each that a pool decides by."""
        places = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.length))
        bits = fold(self._pool_key, passes * self.length + places) >> np.uint64(11)
        numbers = bits.astype(np.float64) * 2.0**-53
        if self._order is not None:
            return self._order[places], numbers
        return permute(places, self.length, fold(self._pass_key, np.array([passes]))), numbers

    def _read(self, where: str) -> Indices:
        """The prompts of an order file. Its ids may begin with the name of the task or with that of this use."""
        prefix, own = f"{self.use.label}/", f"{self.use.task.rpartition(':')[2]}/"
        ids = read_order(where)
        found = [self.locate(prefix + id.removeprefix(own) if id.startswith(own) else id) for id in ids]
        if unknown := [id for id, index in zip(ids, found, strict=True) if index is None]:
            raise UsageError(
                f"the order file {where} lists {len(unknown)} of {len(ids)} ids that the split '{self.use.split}' of "
                f"{self.use.label} does not have: {some(unknown)}. Its ids look like {self.problems[0].id}"
            )
        return np.array(found, np.int64)
