"""Work over shards: done once each, in parallel, with a ledger in the output folder so that a kill costs one shard.

A shard is one file of the source, or several small ones together, in the order of their paths. `each_shard` runs a
function on each; when it returns, what it said is noted in `.shards/PHASE/00007.json`, and that shard is not done
again. So what a step makes depends on its source and arguments alone, neither on the number of workers nor on when it
was killed.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from palestra.data.readers import COUNTS, STEP_FOLDERS, Row, Shard, numbered_rows, shards
from palestra.errors import PalestraError, UsageError
from palestra.runs.redact import redact, redacted
from palestra.runs.store import read_json, write_json
from palestra.work.pool import Pool, TaskFailed, WorkerDied, as_completed

Where = str | Path | Sequence[str | Path]
"""A file, a folder, a pattern, a URL, the output of a data step, or several of these."""

LEDGER = ".shards"
DOCS, FILES = STEP_FOLDERS  # where steps leave documents, and files that were downloaded
GROUPED_BYTES, FEWEST_GROUPS = 64 << 20, 64


@dataclass(frozen=True)
class Source:
    """A shard of a step's source."""

    number: int
    files: tuple[Shard, ...]
    labels: tuple[str, ...]
    """What each file is called in the ids of its rows: as much of the end of its path as tells it from the others."""

    @property
    def size(self) -> int:
        """Bytes, as stored."""
        return sum(file.size for file in self.files)

    def stamp(self) -> list[list[Any]]:
        """What changes with the content, wherever the files lie."""
        return [[label, file.size, file.stamp, file.split] for label, file in zip(self.labels, self.files, strict=True)]

    def rows(self, text_key: str = "text") -> Iterator[tuple[str, str, Row]]:
        """Its rows, each with an id made of file and number, and with the place where a person finds it."""
        for label, file in zip(self.labels, self.files, strict=True):
            for number, row in numbered_rows(file, text_key=text_key):
                yield f"{label}:{number}", file.place(number), row


def sources(where: Where, *, split: str | None = None) -> list[Source]:
    """The shards of files, folders, patterns, URLs or the outputs of steps; small files are taken together.

    At most 64 MB and a 64th of all bytes are taken together, so that enough shards are left to share out.
    """
    files = shards(where, split=split)
    labels = _labels([file.path for file in files])
    most = min(GROUPED_BYTES, sum(file.size for file in files) // FEWEST_GROUPS)
    groups: list[list[int]] = []
    room = 0
    for index, file in enumerate(files):
        if not groups or file.size > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= file.size
    return [
        Source(number, tuple(files[i] for i in group), tuple(labels[i] for i in group))
        for number, group in enumerate(groups)
    ]


def each_shard(
    out: Path,
    phase: str,
    given: Sequence[Source],
    function: Callable[[Source], Mapping[str, Any]],
    *,
    workers: int,
    env: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """What `function` says of each shard, in order; those that an earlier attempt did are not done again.

    The function is sent to worker processes (with one worker it is called here). It writes files atomically and
    returns plain data last. A shard whose files have changed since is done again.
    """
    if workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}")
    ledger = out / LEDGER / phase
    ledger.mkdir(parents=True, exist_ok=True)
    done = {source.number: _noted(ledger, source) for source in given}
    missing = [source for source in given if done[source.number] is None]
    for source, said in _carried_out(missing, function, workers, phase, env):
        done[source.number] = dict(said)
        write_json(_note(ledger, source.number), {"source": source.stamp(), "said": dict(said)})
    return [done[source.number] or {} for source in given]


def same_recipe(out: Path, recipe: Mapping[str, Any]) -> None:
    """Refuse to go on in a folder where the same was begun with other arguments; paths of sources are no part."""
    path = out / LEDGER / "recipe.json"
    wanted = redacted(json.loads(json.dumps(dict(recipe), default=str)))
    if not path.exists():
        write_json(path, wanted)
        return
    there = read_json(path)
    for key in sorted({*there, *wanted}):
        if there.get(key) != wanted.get(key):
            raise UsageError(
                f"{out} was begun with {key} = {there.get(key)!r}, and {wanted.get(key)!r} is asked for; "
                "give another folder, or remove this one"
            )


def forget(out: Path, phase: str) -> None:
    """Remove what a phase noted and left, once what follows it is written."""
    shutil.rmtree(out / LEDGER / phase, ignore_errors=True)


def write_counts(
    out: Path,
    step: str,
    said: Sequence[Mapping[str, Any]],
    **more: Any,
) -> dict[str, Any]:
    """`counts.json`: the sums over shards of rows in and out, drop reasons and seconds, and what else there is to say.

    Seconds are those of work on shards, all workers and attempts together.
    """
    dropped: dict[str, int] = {}
    for one in said:
        for reason, count in one.get("dropped", {}).items():
            dropped[reason] = dropped.get(reason, 0) + count
    counts = {
        "step": step,
        "rows_in": sum(one.get("rows_in", 0) for one in said),
        "rows_out": sum(one.get("rows_out", 0) for one in said),
        "dropped": dict(sorted(dropped.items())),
        "shards": len(said),
        "seconds": round(sum(one.get("seconds", 0.0) for one in said), 3),
        **more,
    }
    write_json(out / COUNTS, redacted(counts))
    return counts


def _labels(paths: Sequence[str]) -> list[str]:
    parts = [PurePosixPath(path.partition("://")[2] or path).parts for path in paths]
    depth = 1
    while len({one[-depth:] for one in parts}) < len(parts):
        depth += 1
    return [redact("/".join(one[-depth:]).lstrip("/")) for one in parts]


def _note(ledger: Path, number: int) -> Path:
    return ledger / f"{number:05}.json"


def _noted(ledger: Path, source: Source) -> dict[str, Any] | None:
    path = _note(ledger, source.number)
    if not path.exists():
        return None
    note = read_json(path)
    return note["said"] if note["source"] == json.loads(json.dumps(source.stamp())) else None


def _carried_out(
    missing: Sequence[Source],
    function: Callable[[Source], Mapping[str, Any]],
    workers: int,
    name: str,
    env: dict[str, str] | None,
) -> Iterator[tuple[Source, Mapping[str, Any]]]:
    """Each shard with what was said of it, as they end."""
    if workers == 1 or len(missing) <= 1:
        for source in missing:
            yield source, function(source)
        return
    with Pool(min(workers, len(missing)), name=name, env=env) as pool:
        tasks: dict[Future[Mapping[str, Any]], Source] = {pool.submit(function, source): source for source in missing}
        for task in as_completed(tasks):
            source = tasks[task]
            try:
                yield source, task.result()
            except TaskFailed as failed:
                if isinstance(failed.__cause__, PalestraError):  # a bad row: the worker's traceback tells no more
                    raise failed.__cause__ from None
                raise
            except WorkerDied as died:
                raise PalestraError(f"{died} It was at work on {source.files[0].path}.") from died
