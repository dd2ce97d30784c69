"""Rollouts as JSON lines, bit for bit: to be looked at, and to be trained on again without generating."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from palestra.errors import PalestraError
from palestra.rollout.types import Group, Trajectory
from palestra.runs.checkpoint import metas
from palestra.runs.session import Session
from palestra.tasks.types import Problem, Status, Verdict
from palestra.track.sinks import JsonlSink, json_line

if TYPE_CHECKING:
    from palestra.lm.batch import Batch

FILE = "rollouts.jsonl"
"""In the session's folder. A line is a group."""
BLOCK = 1 << 22


@dataclass(frozen=True)
class Record:
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
        records = [Record(group, "filtered", step) for group in filtered]
        values, start, places = batch.per_token["advantages"].tolist(), 0, iter(batch.lengths)
        for group in groups:
            advantages = []
            for length in (next(places) for _ in group.trajectories):
                advantages.append(tuple(values[start : start + length]))
                start += length
            records.append(Record(group, "trained", step, advantages=tuple(advantages)))
        write(self._sink, *records)


def write(sink: JsonlSink, *records: Record) -> None:
    """Append records to a file of JSON lines."""
    try:
        sink.write(*map(_row, records))
    except (AttributeError, TypeError, ValueError):
        for record in records:
            _check(record)
        raise


def _row(record: Record) -> dict[str, Any]:
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


def _check(record: Record) -> None:
    """Name the problem whose rollouts JSON cannot hold."""
    try:
        json_line(_row(record))
    except (AttributeError, TypeError, ValueError) as error:
        raise PalestraError(
            f"the rollouts of {record.group.problem.id} cannot be written as JSON: {error}. Its row and the parts of "
            "its verdicts may hold what JSON has: strings, numbers, true, false, null, lists and records"
        ) from error


def scan(path: Path) -> Iterator[Record]:
    """The records of a file from the first on, one at a time; a last line that is not whole is passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _record(line, f"{path}:{number}")


def newest(path: Path) -> Iterator[Record]:
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


def _record(line: bytes, where: str) -> Record:
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
        return Record(group, row["fate"], row["step"], tuple(advantages))
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
