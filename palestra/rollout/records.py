"""Rollouts on disk, bit for bit: JSON lines to read, checkpoints of groups, and replay of another run."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby, islice
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from palestra.errors import PalestraError, UsageError
from palestra.rollout.types import Group, Trajectory
from palestra.runs.checkpoint import metas
from palestra.runs.run import open_run
from palestra.runs.session import Session
from palestra.tasks.task import Problem, Status, Verdict
from palestra.track.sinks import JsonlSink, json_line

if TYPE_CHECKING:
    from palestra.lm.batch import Batch


FILE = "rollouts.jsonl"
"""In the session's folder. A line is a group."""
BLOCK = 1 << 22


@dataclass(frozen=True)
class RolloutRecord:
    """A group and what became of it."""

    group: Group
    fate: str
    """trained or filtered."""
    step: int
    """The step that trained on it, or before which it was left out."""
    advantages: tuple[tuple[float, ...], ...] = ()
    """For each trajectory one number a token, 0 where nothing is trained; none where it was left out."""


class Recording:
    """Writes the rollouts of a session as they are used; opened after `session.restore()`, which cuts them back."""

    def __init__(self, session: Session):
        # Without a checkpoint to go on from the run begins anew, and its rollouts with it.
        self._sink = JsonlSink(session.path / FILE, append=bool(metas(session.path)))
        session.follow(FILE, self._sink.flush)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._sink.close()

    def write(self, step: int, groups: Sequence[Group], filtered: Sequence[Group], batch: "Batch") -> None:
        """What a step trained on, in its order, after what was left out before; `batch` begins with `groups` packed."""
        records = [RolloutRecord(group, "filtered", step) for group in filtered]
        values, start, places = batch.per_token["advantages"].tolist(), 0, iter(batch.lengths)
        for group in groups:
            advantages = []
            for length in (next(places) for _ in group.trajectories):
                advantages.append(tuple(values[start : start + length]))
                start += length
            records.append(RolloutRecord(group, "trained", step, advantages=tuple(advantages)))
        write(self._sink, *records)


def write(sink: JsonlSink, *records: RolloutRecord) -> None:
    """Append records to a file of JSON lines."""
    try:
        sink.write(*map(_row, records))
    except (AttributeError, TypeError, ValueError):
        for record in records:
            _check(record)
        raise


def _row(record: RolloutRecord) -> dict[str, Any]:
    group = record.group
    advantages = record.advantages or (None,) * len(group.trajectories)
    return {
        "number": group.number,
        "step": record.step,
        "fate": record.fate,
        "problem": vars(group.problem),
        "version": group.version,
        "asked": group.asked,
        "seconds": group.seconds,
        "trajectories": [
            {
                **vars(one),
                "verdict": vars(one.verdict),
                "loss_mask": list(map(int, one.loss_mask)),
                "advantages": _short(one, values),
            }
            for one, values in zip(group.trajectories, advantages, strict=True)
        ],
    }


def _check(record: RolloutRecord) -> None:
    """Name the problem whose rollouts JSON cannot hold."""
    try:
        json_line(_row(record))
    except (AttributeError, TypeError, ValueError) as error:
        raise PalestraError(
            f"the rollouts of {record.group.problem.id} cannot be written as JSON: {error}. Its row and the parts of "
            "its verdicts may hold what JSON has: strings, numbers, true, false, null, lists and records"
        ) from error


def scan(path: Path) -> Iterator[RolloutRecord]:
    """The records of a file from the first on, one at a time; a last line that is not whole is passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _record(line, f"{path}:{number}")


def newest(path: Path) -> Iterator[RolloutRecord]:
    """The same from the last on: only as much of the file is read as is asked for."""
    with path.open("rb") as file:
        position, rest, whole = file.seek(0, os.SEEK_END), b"", False
        while position:
            start = max(0, position - BLOCK)
            file.seek(start)
            rest, *lines = (file.read(position - start) + rest).split(b"\n")
            position = start
            for line in reversed(lines):
                if whole:
                    yield _record(line, f"{path}, before byte {position + BLOCK}")
                whole = True  # what follows the last line break is nothing, or a line being written
        if whole:
            yield _record(rest, f"{path}:1")


def read(path: Path) -> list[Group]:
    """All groups of a file, in the order in which they were written."""
    return [record.group for record in scan(path)]


def replay(path: Path) -> Iterator[tuple[int, list[Group]]]:
    """The batches that were trained on: each step with its groups, in their order."""
    trained = (record for record in scan(path) if record.fate == "trained")
    for step, records in groupby(trained, key=lambda record: record.step):
        yield step, [record.group for record in records]


def _short(one: Trajectory, advantages: Sequence[float] | None) -> float | list[float] | None:
    """One number where all drawn tokens have the same: with most algorithms they do."""
    if advantages is None:
        return None
    drawn = list(compress(advantages, one.loss_mask))
    first = drawn[0] if drawn else 0.0
    alike = drawn.count(first) == len(drawn) and not any(compress(advantages, map(not_, one.loss_mask)))
    return first if alike else list(advantages)


def _spread(value: float, loss_mask: Sequence[bool]) -> tuple[float, ...]:
    return tuple(value if used else 0.0 for used in loss_mask)


def _record(line: bytes, where: str) -> RolloutRecord:
    try:
        row = json.loads(line)
        trajectories = tuple(_trajectory(one) for one in row["trajectories"])
        advantages = [
            _spread(one["advantages"], one["loss_mask"])
            if isinstance(one["advantages"], (int, float))
            else tuple(one["advantages"])
            for one in row["trajectories"]
            if one["advantages"] is not None
        ]
        problem, prompt = row["problem"], row["problem"]["prompt"]
        prompt = prompt if isinstance(prompt, str) else tuple(prompt)
        group = Group(
            row["number"],
            Problem(problem["id"], prompt, problem["row"]),
            row["version"],
            trajectories,
            row["asked"],
            row["seconds"],
        )
        return RolloutRecord(group, row["fate"], row["step"], tuple(advantages))
    except (ValueError, KeyError, TypeError) as error:
        raise PalestraError(f"{where} is not a line of rollouts ({type(error).__name__}: {error})") from error


def _trajectory(row: dict[str, Any]) -> Trajectory:
    said = row["verdict"]
    return Trajectory(
        tokens=tuple(row["tokens"]),
        loss_mask=tuple(map(bool, row["loss_mask"])),
        logprobs=tuple(row["logprobs"]),
        versions=tuple(row["versions"]),
        reward=row["reward"],
        verdict=Verdict(
            said["score"], Status(said["status"]), said["parts"], said["seconds"], said["sandbox"], said["note"]
        ),
        stop_reason=row["stop_reason"],
        completion=row["completion"],
        turns=tuple((begin, end) for begin, end in row["turns"]),
    )


class RolloutReplay:
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


def group_state(group: Group) -> dict[str, Any]:
    """A group as plain data."""
    return {
        "number": group.number,
        "problem": group.problem.id,
        "version": group.version,
        "asked": group.asked,
        "seconds": group.seconds,
        "trajectories": [_trajectory_state(one) for one in group.trajectories],
    }


def load_group(state: dict[str, Any], find: Callable[[str], Problem]) -> Group:
    """The group again, given what finds problems by their ids."""
    return Group(
        number=state["number"],
        problem=find(state["problem"]),
        version=state["version"],
        trajectories=tuple(_load_trajectory(one) for one in state["trajectories"]),
        asked=state["asked"],
        seconds=state["seconds"],
    )


def _trajectory_state(one: Trajectory) -> dict[str, Any]:
    verdict = one.verdict
    return {
        "tokens": np.asarray(one.tokens, np.int32),
        "loss_mask": np.asarray(one.loss_mask, np.bool_),
        "logprobs": np.asarray(one.logprobs, np.float64),
        "versions": np.asarray(one.versions, np.int64),
        "reward": one.reward,
        "verdict": [
            verdict.score, str(verdict.status), dict(verdict.parts), verdict.seconds, verdict.sandbox, verdict.note
        ],
        "stop_reason": one.stop_reason,
        "completion": one.completion,
        "turns": [list(turn) for turn in one.turns],
    }  # fmt: skip


def _load_trajectory(state: dict[str, Any]) -> Trajectory:
    score, status, parts, seconds, sandbox, note = state["verdict"]
    return Trajectory(
        tokens=tuple(np.asarray(state["tokens"]).tolist()),
        loss_mask=tuple(np.asarray(state["loss_mask"]).tolist()),
        logprobs=tuple(np.asarray(state["logprobs"]).tolist()),
        versions=tuple(np.asarray(state["versions"]).tolist()),
        reward=state["reward"],
        verdict=Verdict(score, Status(status), parts, seconds, sandbox, note),
        stop_reason=state["stop_reason"],
        completion=state["completion"],
        turns=tuple((begin, end) for begin, end in state["turns"]),
    )
