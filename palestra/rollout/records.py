"""Rollouts on disk, bit for bit: JSON lines to read, checkpoints of groups, and replay of another run."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress, groupby, islice
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from palestra.data.media import data_url, placed
from palestra.errors import PalestraError, UsageError
from palestra.rollout.types import Group, Trajectory
from palestra.runs.checkpoint import metas
from palestra.runs.run import open_run
from palestra.runs.session import Session
from palestra.tasks.task import Problem, Status, Verdict
from palestra.track.sinks import JsonlSink, json_line, long_line

if TYPE_CHECKING:
    from palestra.lm.batch import Batch


FILE = "rollouts.jsonl"
"""In the session's folder. A line is a group."""
DIGITS = 5  # of numbers that people look at
BLOCK = 1 << 22  # bytes that `newest` reads at a time
SCORES = ("entropy", "trained_logprobs")
"""By the weights that a step begins with, with `rollout.record: tokens`."""
VERDICT = ("score", "status", "parts", "seconds", "sandbox", "note")
"""The order of a verdict's fields in checkpoints."""


@dataclass(frozen=True)
class RolloutRecord:
    """A group and its fate."""

    group: Group
    fate: str
    """trained, filtered, or recorded by a gateway that does not train."""
    step: int
    """The step that trained on it, or before which it was filtered."""
    advantages: tuple[tuple[float, ...], ...] = ()
    """One number per token of each trajectory, 0 where the loss is masked; empty for a filtered group."""
    scores: tuple[dict[str, list[float]], ...] = ()
    """By trajectory the `SCORES` of each token, where they were computed; written for people, not read back."""


class Recording:
    """Writes the rollouts of a session when used, in a thread while the next ones are sampled.

    Open it after `session.restore()`, which truncates the file.
    """

    def __init__(self, session: Session):
        # Without a checkpoint to resume from the run starts over, and its rollouts with it.
        self._sink = JsonlSink(session.path / FILE, append=bool(metas(session.path)), line=long_line)
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._last: Future[None] | None = None
        session.follow(FILE, self._flush)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self._settle()
        finally:
            self._thread.shutdown()
            self._sink.close()

    def write(self, step: int, groups: Sequence[Group], filtered: Sequence[Group], batch: "Batch") -> None:
        """The groups that a step trained on, in order, after those filtered before it; `batch` starts with `groups`.

        Raises what went wrong with those of the step before.
        """
        self._settle()
        self._last = self._thread.submit(self._write, step, groups, filtered, batch)

    def _settle(self) -> None:
        if self._last is not None:
            last, self._last = self._last, None
            last.result()

    def _flush(self) -> None:
        self._settle()
        self._sink.flush()

    def _write(self, step: int, groups: Sequence[Group], filtered: Sequence[Group], batch: "Batch") -> None:
        records = [RolloutRecord(group, "filtered", step) for group in filtered]
        values, start, lengths = batch.per_token["advantages"].tolist(), 0, iter(batch.lengths)
        computed = {name: batch.per_token[name] for name in SCORES if name in batch.per_token}
        columns = {name: column.double().round(decimals=DIGITS).tolist() for name, column in computed.items()}
        for group in groups:
            advantages, scores = [], []
            for length in islice(lengths, len(group.trajectories)):
                place = slice(start, start + length)
                advantages.append(tuple(values[place]))
                scores.append({name: column[place] for name, column in columns.items()})
                start += length
            records.append(RolloutRecord(group, "trained", step, tuple(advantages), tuple(scores)))
        write(self._sink, *records)


def write(sink: JsonlSink, *records: RolloutRecord) -> None:
    """Append records to a file of JSON lines."""
    try:
        sink.write(*map(_row, records))
    except (AttributeError, TypeError, ValueError):
        for record in records:  # name the problem whose rollouts JSON cannot hold
            try:
                json_line(_row(record))
            except (AttributeError, TypeError, ValueError) as error:
                raise PalestraError(
                    f"the rollouts of {record.group.problem.id} cannot be written as JSON: {error}. Its row and the "
                    "parts of its verdicts may hold strings, numbers, true, false, null, lists and records"
                ) from error
        raise


def _row(record: RolloutRecord) -> dict[str, Any]:
    group = record.group
    advantages = record.advantages or (None,) * len(group.trajectories)
    scores = record.scores or ({},) * len(group.trajectories)
    return {
        "number": group.number,
        "step": record.step,
        "fate": record.fate,
        "problem": vars(group.problem),
        "version": group.version,
        "asked": group.asked,
        "seconds": group.seconds,
        **_media_state(group),
        "trajectories": [
            {
                **_without_media(trajectory),
                "verdict": vars(trajectory.verdict),
                "loss_mask": list(map(int, trajectory.loss_mask)),
                "advantages": _short(trajectory, values),
                **extra,
            }
            for trajectory, values, extra in zip(group.trajectories, advantages, scores, strict=True)
        ],
    }


def scan(path: Path) -> Iterator[RolloutRecord]:
    """The records of a file from the first on; an incomplete last line is skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _record(line, f"{path}:{number}")


def newest(path: Path) -> Iterator[RolloutRecord]:
    """The records of a file from the last on, read as they are needed."""
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
                whole = True  # after the last line break there is nothing, or a line being written
        if whole:
            yield _record(rest, f"{path}:1")


def read(path: Path) -> list[Group]:
    """All groups of a file, in the order in which they were written."""
    return [record.group for record in scan(path)]


def replay(path: Path) -> Iterator[tuple[int, list[Group]]]:
    """The batches that were trained on: each step with its groups, in order."""
    trained = (record for record in scan(path) if record.fate != "filtered")
    for step, records in groupby(trained, key=lambda record: record.step):
        yield step, [record.group for record in records]


def _short(trajectory: Trajectory, advantages: Sequence[float] | None) -> float | list[float] | None:
    """One number where all sampled tokens have the same advantage: with most algorithms they do."""
    if advantages is None:
        return None
    sampled = list(compress(advantages, trajectory.loss_mask))
    first = sampled[0] if sampled else 0.0
    alike = sampled.count(first) == len(sampled) and not any(compress(advantages, map(not_, trajectory.loss_mask)))
    return first if alike else list(advantages)


def _long(advantages: float | list[float], loss_mask: Sequence[bool]) -> tuple[float, ...]:
    if isinstance(advantages, list):
        return tuple(advantages)
    return tuple(advantages if sampled else 0.0 for sampled in loss_mask)


def _record(line: bytes, where: str) -> RolloutRecord:
    try:
        row = json.loads(line)
        rows, problem = row["trajectories"], row["problem"]
        prompt = problem["prompt"] if isinstance(problem["prompt"], str) else tuple(problem["prompt"])
        group = _group(row, Problem(problem["id"], prompt, problem["row"]))
        advantages = [_long(one["advantages"], one["loss_mask"]) for one in rows if one["advantages"] is not None]
        return RolloutRecord(group, row["fate"], row["step"], tuple(advantages))
    except (ValueError, KeyError, TypeError) as error:
        raise PalestraError(f"{where} is not a line of rollouts ({type(error).__name__}: {error})") from error


class RolloutReplay:
    """The executor's interface over recorded rollouts: the batch of each step, in its order."""

    def __init__(self, path: Path, vocab: int):
        """`vocab` is the size of the model's vocabulary."""
        self.path, self.vocab = path, vocab
        self._steps = self._trained = self.settled = 0
        self._batches: Iterator[tuple[int, list[Group]]] = replay(path)

    def take(self, work: Callable[[float], bool]) -> tuple[list[Group], list[Group]]:
        """The groups of the next step; filtered ones are not replayed."""
        _, groups = next(self._batches, (0, None))
        if groups is None:
            raise PalestraError(
                f"{self.path} has rollouts of {self._steps} steps: lower train.steps, or replay a longer run"
            )
        for group in groups:
            if max(max(trajectory.tokens, default=0) for trajectory in group.trajectories) >= self.vocab:
                raise PalestraError(
                    f"{self.path}: the rollouts of {group.problem.id} have tokens that this model does not have; its "
                    f"vocabulary has {self.vocab}. Replay the rollouts of a run with the same tokenizer"
                )
        self._steps, self._trained = self._steps + 1, self._trained + len(groups)
        return groups, []

    def admit(self) -> None:
        """There is nothing to start."""

    def collect(self) -> None:
        """There is nothing to wait for."""

    def publish(self, version: int) -> None:
        """New weights change nothing."""

    def metrics(self) -> dict[str, float]:
        return {"fate/trained": float(self._trained)}

    def describe(self) -> str:
        return f"{self._steps} steps of {self.path} are replayed"

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "trained": self._trained}

    def load_state(self, state: dict[str, Any]) -> None:
        self._steps, self._trained = state["steps"], state["trained"]
        self._batches = islice(replay(self.path), self._steps, None)


def find_rollouts(ref: str, root: Path, seed: int, steps: int) -> Path:
    """The file of rollouts: `ref` itself, or that of a run, of the same seed where it has several.

    It must hold at least `steps` steps.
    """
    path = Path(ref).expanduser()
    if not path.is_file():
        sessions = {session.seed: session.path for session in open_run(ref, root).sessions}
        if seed not in sessions and len(sessions) != 1:
            raise UsageError(
                f"rollout.replay: {ref} has the seeds {', '.join(map(str, sorted(sessions)))}, not {seed}: name one "
                f"of their files {FILE}"
            )
        path = sessions.get(seed, next(iter(sessions.values()), path)) / FILE
        if not path.exists():
            raise UsageError(f"rollout.replay: {ref} has no rollouts: there is no {path}")
    last = next((record.step for record in newest(path) if record.fate != "filtered"), 0)
    if last < steps:
        raise UsageError(
            f"rollout.replay: {path} has rollouts of {last} steps, and train.steps is {steps}: lower it, or replay a "
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
        **_media_state(group),
        "trajectories": [_trajectory_state(trajectory) for trajectory in group.trajectories],
    }


def load_group(state: dict[str, Any], find: Callable[[str], Problem]) -> Group:
    """The group of a state; `find` returns a problem by its id."""
    return _group(state, find(state["problem"]))


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    verdict = {**vars(trajectory.verdict), "status": str(trajectory.verdict.status)}
    return {
        **_without_media(trajectory),
        "tokens": np.asarray(trajectory.tokens, np.int32),
        "loss_mask": np.asarray(trajectory.loss_mask, np.bool_),
        "logprobs": np.asarray(trajectory.logprobs, np.float64),
        "versions": np.asarray(trajectory.versions, np.int64),
        "verdict": [verdict[name] for name in VERDICT],
        "turns": [list(turn) for turn in trajectory.turns],
        "turn_rewards": list(trajectory.turn_rewards),
    }


def _group(state: dict[str, Any], problem: Problem) -> Group:
    """The group of a line of rollouts or of a checkpoint."""
    urls = state.get("media", {})
    trajectories = tuple(_trajectory(row, urls) for row in state["trajectories"])
    return Group(state["number"], problem, state["version"], trajectories, state["asked"], state["seconds"])


def _media_state(group: Group) -> dict[str, Any]:
    """The images of a group by their digests, each once; nothing where there are none."""
    images = {image.digest.hex(): image for trajectory in group.trajectories for image in trajectory.media}
    return {"media": {name: data_url(image.pixels) for name, image in images.items()}} if images else {}


def _without_media(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory's fields, with its images as digests and places, where it has any."""
    fields = {name: value for name, value in vars(trajectory).items() if name != "media"}
    places = [[image.digest.hex(), image.start] for image in trajectory.media]
    return fields | ({"media": places} if places else {})


def _trajectory(state: dict[str, Any], urls: Mapping[str, str]) -> Trajectory:
    verdict: dict[str, Any] = state["verdict"]
    if not isinstance(verdict, dict):  # that of a checkpoint
        verdict = dict(zip(VERDICT, verdict, strict=True))
    verdict = {**verdict, "status": Status(verdict["status"])}
    return Trajectory(
        tokens=_tuple(state["tokens"]),
        loss_mask=tuple(map(bool, _tuple(state["loss_mask"]))),
        logprobs=_tuple(state["logprobs"]),
        versions=_tuple(state["versions"]),
        reward=state["reward"],
        verdict=Verdict(**verdict),
        stop_reason=state["stop_reason"],
        completion=state["completion"],
        turns=tuple((begin, end) for begin, end in state["turns"]),
        turn_rewards=tuple(state.get("turn_rewards", ())),  # earlier versions did not have them
        media=tuple(placed(urls[digest], start) for digest, start in state.get("media", ())),
        row=state.get("row", 0),  # earlier versions had one row an episode
    )


def _tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values if isinstance(values, list) else np.asarray(values).tolist())
