"""What was answered and how it was judged: one record a problem and way of decoding, a line of answers.jsonl each."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from palestra.errors import PalestraError
from palestra.rollout.types import Trajectory
from palestra.runs.store import written
from palestra.tasks.types import Status, Verdict

Mode = Literal["greedy", "samples"]
"""The most likely answer, or several that are drawn."""


@dataclass(frozen=True)
class Judged:
    """One answer with its verdict."""

    text: str
    tokens: int
    """How many the model wrote."""
    stop_reason: str
    """eos, stop or length."""
    verdict: Verdict

    @classmethod
    def of(cls, trajectory: Trajectory) -> "Judged":
        """What a workflow gave."""
        return cls(trajectory.completion, trajectory.drawn, trajectory.stop_reason, trajectory.verdict)

    @property
    def correct(self) -> bool:
        """By the status, not by a score above 0: a part of the points is no right answer."""
        return self.verdict.status == Status.CORRECT

    @property
    def truncated(self) -> bool:
        """Whether the limit on new tokens, or the context, ended it."""
        return self.stop_reason == "length"


@dataclass(frozen=True)
class Record:
    """A problem and all answers of one mode to it."""

    id: str
    """Of the problem."""
    task: str
    """Its name in this run."""
    mode: Mode
    prompt: str
    """As the model read it, special tokens included."""
    prompt_tokens: int
    answers: tuple[Judged, ...]
    """None where the prompt leaves no room for an answer, which counts as wrong."""

    @property
    def key(self) -> tuple[str, Mode]:
        """No two records of an evaluation share it."""
        return self.id, self.mode

    @property
    def right(self) -> int:
        """How many of the answers are right."""
        return sum(answer.correct for answer in self.answers)

    @property
    def failed(self) -> bool:
        """Whether a judge failed on an answer, so that nothing is known of it."""
        return any(answer.verdict.status == Status.ERROR for answer in self.answers)


def line(record: Record) -> str:
    """The record as a line of JSON."""
    return json.dumps({**vars(record), "answers": [_plain(answer) for answer in record.answers]}) + "\n"


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a file of records atomically."""
    with written(path) as file:
        for record in records:
            file.write(line(record).encode())


def read_records(path: Path) -> list[Record]:
    """The records of a file; what a kill has left of a last line is passed over."""
    return [_record(row) for row in json_lines(path)]


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that only grows; none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                yield json.loads(text)
            except ValueError as error:
                raise PalestraError(f"{path}:{number} is not a line of JSON ({error}); remove the line") from error


def _plain(answer: Judged) -> dict[str, Any]:
    verdict = {**vars(answer.verdict), "status": str(answer.verdict.status), "parts": dict(answer.verdict.parts)}
    return {"text": answer.text, "tokens": answer.tokens, "stop_reason": answer.stop_reason, **verdict}


def _record(row: dict[str, Any]) -> Record:
    answers = tuple(_judged(answer) for answer in row.pop("answers"))
    return Record(**row, answers=answers)


def _judged(row: dict[str, Any]) -> Judged:
    said = {name: row.pop(name) for name in ("text", "tokens", "stop_reason")}
    return Judged(**said, verdict=Verdict(status=Status(row.pop("status")), **row))
