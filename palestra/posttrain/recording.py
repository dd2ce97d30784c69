"""The rollouts of every step, with their advantages, in rollouts.jsonl of the session."""

from collections.abc import Sequence

from palestra.lm.batch import Batch
from palestra.rollout.records import FILE, Record, write
from palestra.rollout.types import Group
from palestra.runs.session import Session
from palestra.track.sinks import JsonlSink


class Recording:
    """Opened after `session.restore()`: it goes on where the restored checkpoint left the file."""

    def __init__(self, session: Session):
        self._sink = JsonlSink(session.path / FILE, append=True)
        session.follow(FILE, self._sink.flush)

    def step(self, step: int, taken: Sequence[Group], filtered: Sequence[Group], batch: Batch) -> None:
        """Write the groups that a step was trained on, and those that filters took out."""
        values = batch.per_token["advantages"].cpu().split(batch.lengths)
        rows = iter(tuple(row.tolist()) for row in values)
        for group in taken:
            advantages = tuple(next(rows) for _ in group.trajectories)
            write(self._sink, Record(group, "trained", step, advantages=advantages))
        for group in filtered:
            write(self._sink, Record(group, "filtered", step, reason="filter"))

    def close(self) -> None:
        """Close the file."""
        self._sink.close()
