"""Which prompt is number n of a run: tasks mixed by weight, one after the other, or as lessons."""

import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from palestra.data.shuffle import stream_key
from palestra.errors import PalestraError, UsageError
from palestra.spec.tasks import TasksSpec
from palestra.tasks.lessons import Lessons
from palestra.tasks.pools import pass_rate
from palestra.tasks.task import Task
from palestra.tasks.types import Problem
from palestra.tasks.walk import Walk

log = logging.getLogger("palestra.tasks")


class NothingLeft(PalestraError):
    """Every prompt is solved as often as the pool asks: there is nothing more to learn here."""


class Prompts:
    """The prompts of a run, in order. The same seed and observations give the same prompts."""

    def __init__(self, spec: TasksSpec, tasks: Mapping[str, Task], seed: int):
        self._walks: dict[str, Walk] = {}
        for use in spec.train:
            if use.label in self._walks:
                raise UsageError(f"two tasks to train on are called '{use.label}': give one another `name`")
            problems = tasks[use.label].problems(use.split)
            self._walks[use.label] = Walk(use, problems, stream_key(seed, "prompts", use.label), spec.pool)
        self._mix: Shares | Turns | Lessons
        if spec.mix == "lessons":
            self._mix = Lessons({use.label: use.after for use in spec.train}, stream_key(seed, "lessons"))
        elif spec.mix == "sequential":
            self._mix = Turns(list(self._walks))
        else:
            self._mix = Shares({use.label: use.weight for use in spec.train})
        self._drawn = dict.fromkeys(self._walks, 0)
        self._ended: set[str] = set()

    def draw(self, number: int) -> Problem:
        """Prompt `number`: 0, 1, 2 and so on, each once."""
        if number != sum(self._drawn.values()):
            raise PalestraError(f"expected prompt {sum(self._drawn.values())} to be drawn next, not {number}")
        left = self._left()
        label = self._mix.choose(number, left)
        while (index := self._walks[label].next()) is None:
            label = self._mix.after_pass(label, left)
        self._drawn[label] += 1
        return self._walks[label].problem(index)

    def observe(self, problem: Problem, scores: Sequence[float]) -> None:
        """Note the scores of a prompt's answers; in the order of the prompts' numbers, when they are trained on."""
        if not scores:
            return
        walk, rate = self._walk(problem.id), pass_rate(scores)
        walk.observe(problem.id, rate)
        if isinstance(self._mix, Lessons):
            self._mix.observe(walk.use.label, rate)

    def find(self, id: str) -> Problem:
        """A problem by its id."""
        walk = self._walk(id)
        index = walk.locate(id)
        if index is None:
            raise PalestraError(f"there is no problem {id}; those of {walk.use.label} look like {walk.problems[0].id}")
        return walk.problems[index]

    def metrics(self) -> dict[str, float]:
        """How often each task was gone through, its share, and what pools and lessons have learned."""
        found, total = {}, sum(self._drawn.values())
        for label, walk in self._walks.items():
            found[f"prompts/{label}/passes"] = walk.progress
            found[f"prompts/{label}/share"] = self._drawn[label] / max(total, 1)
            if walk.pool is not None:
                found |= {f"pool/{label}/{name}": value for name, value in walk.pool.metrics().items()}
        if isinstance(self._mix, Lessons):
            found |= self._mix.metrics([label for label, walk in self._walks.items() if walk.left])
        return found

    def state(self) -> dict[str, Any]:
        """All that the next prompts depend on, as plain data."""
        walks = {label: walk.state() for label, walk in self._walks.items()}
        return {"drawn": dict(self._drawn), "walks": walks, "mix": self._mix.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        if state["drawn"].keys() != self._drawn.keys():
            raise PalestraError(
                f"the tasks are {', '.join(self._drawn)} and were {', '.join(state['drawn'])} when the checkpoint was "
                "written; resume with the tasks that the run began with"
            )
        for label, walk in self._walks.items():
            walk.load_state(state["walks"][label])
        self._mix.load_state(state["mix"])
        self._drawn = {label: state["drawn"][label] for label in self._walks}

    def _left(self) -> list[str]:
        """The tasks that have prompts to draw; where a pool has dropped all of one, that is said once."""
        left = [label for label, walk in self._walks.items() if walk.left]
        if not left:
            raise NothingLeft(
                "every prompt of every task is solved as often as tasks.pool.drop asks, and none is left to train on: "
                "the run is done, unless you add harder tasks or set tasks.pool.drop to null"
            )
        for label in self._walks.keys() - set(left) - self._ended:
            log.warning("all prompts of %s are solved and dropped: its share goes to the other tasks", label)
            self._ended.add(label)
        return left

    def _walk(self, id: str) -> Walk:
        label = id.split("/", 1)[0]
        if label not in self._walks:
            raise PalestraError(f"{id} is of none of the tasks {', '.join(self._walks)}")
        return self._walks[label]


class Shares:
    """By weight: after any number of draws each task has had its share of them, give or take less than one.

    Tijdeman's solution of the chairman assignment problem (1980), in fractions, so that nothing depends on rounding.
    When tasks drop out, counting begins again with those that are left.
    """

    def __init__(self, weights: Mapping[str, float]):
        self._weights = {label: Fraction(weight) for label, weight in weights.items()}
        self._counts = dict.fromkeys(weights, 0)

    def choose(self, number: int, left: Sequence[str]) -> str:
        """The task of prompt `number`."""
        if self._counts.keys() != set(left):
            self._counts = dict.fromkeys(left, 0)
        if len(left) == 1:
            return left[0]
        total, step = sum(self._weights[label] for label in left), sum(self._counts.values()) + 1
        shares = {label: self._weights[label] / total for label in left}
        slack = Fraction(1, 2 * len(left) - 2)
        # Of those whose turn it may be, the one whose turn ends first.
        ready = [label for label in left if shares[label] * step - self._counts[label] >= slack]
        label = min(ready, key=lambda label: (self._counts[label] + 1 - slack) / shares[label])
        self._counts[label] += 1
        return label

    def after_pass(self, label: str, left: Sequence[str]) -> str:
        """What comes where a pass over a task's prompts has ended: its next pass, so that weights stay as they are."""
        return label

    def state(self) -> dict[str, Any]:
        """The draws of each task."""
        return {"counts": dict(self._counts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._counts = dict(state["counts"])


class Turns:
    """One task after the other, each for a pass over its prompts, then again from the first."""

    def __init__(self, labels: Sequence[str]):
        self._labels, self._current = tuple(labels), labels[0]

    def choose(self, number: int, left: Sequence[str]) -> str:
        """The task of prompt `number`."""
        return self._current if self._current in left else self.after_pass(self._current, left)

    def after_pass(self, label: str, left: Sequence[str]) -> str:
        """What comes where a pass over a task's prompts has ended: the next task that has prompts left."""
        at = self._labels.index(label) + 1
        self._current = next(other for other in self._labels[at:] + self._labels[:at] if other in left)
        return self._current

    def state(self) -> dict[str, Any]:
        """Whose turn it is."""
        return {"current": self._current}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._current = state["current"]
