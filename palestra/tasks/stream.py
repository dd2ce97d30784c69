"""The stream of prompts of a run: tasks mixed by weight or in sequence, shuffled passes, order files."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.mixture import Indices, fold, permute, stream_key
from palestra.data.remote import open_filesystem
from palestra.errors import PalestraError, UsageError
from palestra.spec.tasks import PoolSpec, TasksSpec, TrainTask
from palestra.tasks.curriculum import Floats, Lessons, PromptPool, pass_rate
from palestra.tasks.sets.synthetic import Enumerated
from palestra.tasks.task import Problem, Task

log = logging.getLogger("palestra.tasks")

SHOWN = 5  # ids in an error message
BLOCK = 256  # prompts that are looked up together


def read_order(where: str) -> list[str]:
    """The ids of an order file, one a line; none may be there twice."""
    try:
        files, path = open_filesystem(where) if "://" in where else (None, where)
        content: Any = Path(path).expanduser().read_bytes() if files is None else files.cat_file(path)
        ids = [line.strip() for line in content.decode().split("\n") if line.strip()]
    except UsageError:
        raise
    except Exception as error:  # each backend has errors of its own for no credentials, no network, no such bucket
        raise UsageError(f"the order file {where} cannot be read ({type(error).__name__}: {error})") from error
    if not ids:
        raise UsageError(f"the order file {where} has no prompt ids")
    if twice := [id for id, count in Counter(ids).items() if count > 1]:
        raise UsageError(f"the order file {where} has {_some(twice)} more than once; list each prompt once")
    return ids


def _some(ids: list[str]) -> str:
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ", ".join(ids[:SHOWN]) + more


class Walk:
    """Passes over the prompts of one use of a task. Its state is the pass, the place in it, and the pool's rates."""

    def __init__(self, use: TrainTask, problems: Sequence[Problem], seed: int, pool: PoolSpec | None = None):
        if len(problems) == 0:
            raise UsageError(f"the split '{use.split}' of {use.label} has no problems")
        self.use, self.problems = use, problems
        self._indices: dict[str, int] | None = None
        self._order = None if use.order is None else self._read(use.order)
        total = len(problems) if self._order is None else len(self._order)
        self.length = total if use.count is None else min(use.count, total)
        self.pool = None if pool is None else PromptPool(pool, self.length, use.label)
        self._pass_key, self._pool_key = stream_key(seed, "pass"), stream_key(seed, "pool")
        self._block = lru_cache(maxsize=2)(self._draw_block)
        self._ahead: dict[int, Problem] = {}
        self.passes = self._place = 0

    @property
    def left(self) -> bool:
        """Whether there is a prompt to sample: false once a pool has dropped them all."""
        return self.pool is None or self.pool.left

    @property
    def progress(self) -> float:
        """Passes done, with the fraction of the current one."""
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
        if index not in self._ahead:  # made together with those that follow
            block, start = divmod(self._place - 1, BLOCK)
            indices = self._block(self.passes, block)[0][start:]
            self._ahead = dict(zip(indices.tolist(), self.problems.at(indices), strict=True))
        return self._ahead[index]

    def index(self, id: str) -> int:
        """The index of a problem by its id."""
        if (index := self.locate(id)) is None:
            raise PalestraError(f"there is no problem {id}; those of {self.use.label} look like {self.problems[0].id}")
        return index

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

    def state(self) -> dict[str, Any]:
        pool = None if self.pool is None else self.pool.state()
        return {"length": self.length, "passes": self.passes, "place": self._place, "pool": pool}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state["length"] != self.length:
            raise PalestraError(
                f"{self.use.label} has {self.length} prompts and had {state['length']} at the checkpoint: "
                "resume with the same data and args"
            )
        self.passes, self._place = state["passes"], state["place"]
        if self.pool is not None:
            self.pool.load_state(state["pool"])

    def _draw_block(self, passes: int, block: int) -> tuple[Indices, Floats]:
        """The prompts of a block of a pass, in order, and for each a number of [0, 1) that a pool decides by."""
        places = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.length))
        bits = fold(self._pool_key, passes * self.length + places) >> np.uint64(11)
        numbers = bits.astype(np.float64) * 2.0**-53
        if self._order is not None:
            return self._order[places], numbers
        return permute(places, self.length, fold(self._pass_key, np.array([passes]))), numbers

    def _read(self, where: str) -> Indices:
        """The prompts of an order file. Its ids may begin with the name of the task or with the label of this use."""
        prefix, own = f"{self.use.label}/", f"{self.use.task.rpartition(':')[2]}/"
        ids = read_order(where)
        indices = [self.locate(prefix + id.removeprefix(own) if id.startswith(own) else id) for id in ids]
        if unknown := [id for id, index in zip(ids, indices, strict=True) if index is None]:
            raise UsageError(
                f"the order file {where} lists {len(unknown)} of {len(ids)} ids that the split '{self.use.split}' of "
                f"{self.use.label} does not have: {_some(unknown)}. Its ids look like {self.problems[0].id}"
            )
        return np.array(indices, np.int64)


class NothingLeft(PalestraError):
    """Pools leave no prompt a weight: nothing is left to train on."""


class Prompts:
    """The prompts of a run, in order. They are a function of the seed and the observations."""

    def __init__(self, spec: TasksSpec, tasks: Mapping[str, Task], seed: int):
        self._walks: dict[str, Walk] = {}
        for use in spec.train:
            if use.label in self._walks:
                raise UsageError(f"two tasks to train on are called '{use.label}': give one of them another `name`")
            problems = tasks[use.label].part(use.split)
            self._walks[use.label] = Walk(use, problems, stream_key(seed, "prompts", use.label), spec.pool)
        self._mix: Shares | Turns | Lessons
        if spec.mix == "lessons":
            self._mix = Lessons({use.label: use.after for use in spec.train}, stream_key(seed, "lessons"))
        elif spec.mix == "sequential":
            self._mix = Turns(list(self._walks))
        else:
            self._mix = Shares({use.label: use.weight for use in spec.train})
        self._sampled = dict.fromkeys(self._walks, 0)
        self._ended: set[str] = set()

    def sample(self, number: int) -> Problem:
        """Prompt `number`: 0, 1, 2 and so on, each once."""
        if number != sum(self._sampled.values()):
            raise PalestraError(f"expected prompt {sum(self._sampled.values())} to be sampled next, not {number}")
        left = self._left()
        label = self._mix.choose(number, left)
        while (index := self._walks[label].next()) is None:
            if isinstance(self._mix, Turns):  # the others continue with the next pass
                label = self._mix.advance(left)
        self._sampled[label] += 1
        return self._walks[label].problem(index)

    def observe(self, problem: Problem, scores: Sequence[float]) -> None:
        """Note the scores of a prompt's completions, in the order of the prompts' numbers."""
        if not scores:
            return
        walk, rate = self._walk(problem.id), pass_rate(scores)
        if walk.pool is not None:
            walk.pool.observe(walk.index(problem.id), rate)
        if isinstance(self._mix, Lessons):
            self._mix.observe(walk.use.label, rate)

    def find(self, id: str) -> Problem:
        """A problem by its id."""
        walk = self._walk(id)
        return walk.problems[walk.index(id)]

    def metrics(self) -> dict[str, float]:
        metrics, total = {}, sum(self._sampled.values())
        for label, walk in self._walks.items():
            metrics[f"prompts/{label}/passes"] = walk.progress
            metrics[f"prompts/{label}/share"] = self._sampled[label] / max(total, 1)
            if walk.pool is not None:
                metrics |= {f"pool/{label}/{name}": value for name, value in walk.pool.metrics().items()}
        if isinstance(self._mix, Lessons):
            metrics |= self._mix.metrics([label for label, walk in self._walks.items() if walk.left])
        return metrics

    def state(self) -> dict[str, Any]:
        walks = {label: walk.state() for label, walk in self._walks.items()}
        return {"drawn": dict(self._sampled), "walks": walks, "mix": self._mix.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state["drawn"].keys() != self._sampled.keys():
            raise PalestraError(
                f"the tasks are {', '.join(self._sampled)} and were {', '.join(state['drawn'])} at the checkpoint: "
                "resume with the same tasks"
            )
        for label, walk in self._walks.items():
            walk.load_state(state["walks"][label])
        self._mix.load_state(state["mix"])
        self._sampled = {label: state["drawn"][label] for label in self._walks}

    def _left(self) -> list[str]:
        """The tasks that have prompts to sample; a task that a pool has dropped is logged once."""
        left = [label for label, walk in self._walks.items() if walk.left]
        if not left:
            raise NothingLeft(
                "every prompt of every task has reached the pass rate tasks.pool.drop, or is too easy or too hard "
                "where tasks.pool.outside is 0, and none is left to train on: the run is done, unless you add "
                "harder tasks or set tasks.pool.drop to null, or raise tasks.pool.outside"
            )
        for label in self._walks.keys() - set(left) - self._ended:
            log.warning("all prompts of %s are dropped or have no weight: its share goes to the other tasks", label)
            self._ended.add(label)
        return left

    def _walk(self, id: str) -> Walk:
        label = id.split("/", 1)[0]
        if label not in self._walks:
            raise PalestraError(f"{id} is of none of the tasks {', '.join(self._walks)}")
        return self._walks[label]


class Shares:
    """By weight: after any number of prompts each task has had its share of them, give or take less than one.

    Tijdeman's solution of the chairman assignment problem (1980), in fractions, so that nothing depends on rounding.
    When tasks drop out, counting restarts with those that are left.
    """

    def __init__(self, weights: Mapping[str, float]):
        self._weights = {label: Fraction(weight) for label, weight in weights.items()}
        self._counts = dict.fromkeys(weights, 0)

    def choose(self, number: int, left: Sequence[str]) -> str:
        if self._counts.keys() != set(left):
            self._counts = dict.fromkeys(left, 0)
        if len(left) == 1:
            return left[0]
        total, step = sum(self._weights[label] for label in left), sum(self._counts.values()) + 1
        shares = {label: self._weights[label] / total for label in left}
        slack = Fraction(1, 2 * len(left) - 2)
        # Of the tasks that are due, the one with the earliest deadline.
        ready = [label for label in left if shares[label] * step - self._counts[label] >= slack]
        label = min(ready, key=lambda label: (self._counts[label] + 1 - slack) / shares[label])
        self._counts[label] += 1
        return label

    def state(self) -> dict[str, Any]:
        return {"counts": dict(self._counts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._counts = dict(state["counts"])


class Turns:
    """One task after the other, each for a pass over its prompts, then from the first again."""

    def __init__(self, labels: Sequence[str]):
        self._labels, self._current = tuple(labels), labels[0]

    def choose(self, number: int, left: Sequence[str]) -> str:
        return self._current if self._current in left else self.advance(left)

    def advance(self, left: Sequence[str]) -> str:
        """Go to the next task that has prompts left, where a pass has ended."""
        at = self._labels.index(self._current) + 1
        self._current = next(other for other in self._labels[at:] + self._labels[:at] if other in left)
        return self._current

    def state(self) -> dict[str, Any]:
        return {"current": self._current}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._current = state["current"]
