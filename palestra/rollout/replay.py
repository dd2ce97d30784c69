"""The rollouts of another run as batches: what an executor gives, without generating."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError, UsageError
from palestra.rollout.records import FILE, newest, replay
from palestra.rollout.types import Group
from palestra.runs.run import open_run


class Replay:
    """The executor's interface over rollouts that are there: step for step what was trained on, in its order."""

    def __init__(self, path: Path, vocab: int):
        """`vocab` is how many tokens the model knows."""
        self.path, self.vocab = path, vocab
        self._steps = self._trained = self.settled = 0
        self._batches: Iterator[tuple[int, list[Group]]] = replay(path)

    def take(self, work: Callable[[float], bool]) -> tuple[list[Group], list[Group]]:
        """The groups of the next step; those that were filtered then are not read again."""
        found = next(self._batches, None)
        if found is None:
            raise PalestraError(
                f"{self.path} has rollouts of {self._steps} steps: lower train.steps, or replay a longer run"
            )
        _, groups = found
        for group in groups:
            if max(max(one.tokens, default=0) for one in group.trajectories) >= self.vocab:
                raise PalestraError(
                    f"{self.path}: the rollouts of {group.problem.id} hold tokens that this model does not have; it "
                    f"knows {self.vocab}. Replay the rollouts of a run with the same tokenizer"
                )
        self._steps, self._trained = self._steps + 1, self._trained + len(groups)
        return groups, []

    def admit(self) -> None:
        """There is nothing to start."""

    def collect(self) -> None:
        """There is nothing to wait for."""

    def publish(self, version: int) -> None:
        """New weights change nothing here."""

    def metrics(self) -> dict[str, float]:
        """How many groups were trained on so far."""
        return {"fate/trained": float(self._trained)}

    def describe(self) -> str:
        """Where it is."""
        return f"{self._steps} steps of {self.path} are replayed"

    def state(self) -> dict[str, Any]:
        """How far it is."""
        return {"steps": self._steps, "trained": self._trained}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self._steps, self._trained = state["steps"], state["trained"]
        self._batches = islice(replay(self.path), self._steps, None)


def find_rollouts(ref: str, root: Path, seed: int, steps: int) -> Path:
    """The file of rollouts that is meant: itself, or that of a run, of the same seed where it has several.

    It must hold as many steps as are to be trained.
    """
    path = Path(ref).expanduser()
    if not path.is_file():
        sessions = {one.seed: one.path for one in open_run(ref, root).sessions}
        if seed not in sessions and len(sessions) != 1:
            raise UsageError(
                f"rollout.replay: {ref} has the seeds {', '.join(map(str, sorted(sessions)))} and not {seed}: name one "
                f"of their files {FILE}"
            )
        path = sessions.get(seed, next(iter(sessions.values()), path)) / FILE
        if not path.exists():
            raise UsageError(f"rollout.replay: {ref} has no rollouts: there is no {path}")
    found = next((record.step for record in newest(path) if record.fate == "trained"), 0)
    if found < steps:
        raise UsageError(
            f"rollout.replay: {path} has rollouts of {found} steps, and train.steps is {steps}: lower it, or replay a "
            "longer run"
        )
    return path.absolute()
