"""The phases of deduplication: hash each shard, compare all hashes, write of each shard what stays.

The first and the last are done by shard, in parallel. What lies between them is in the ledger under `out`, so that a
kill costs at most the shard at work.
"""

import functools
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from palestra.data.readers import Row
from palestra.data.shuffle import Indices
from palestra.data.steps.documents import NOT_UNICODE, NOTES, ByShard, Compression, Drop, documents, map_documents
from palestra.data.steps.shards import DOCS, LEDGER, Source, Where, each_shard, forget, same_recipe, sources
from palestra.errors import PalestraError
from palestra.runs.store import read_json, write_json, written

Hashed = Callable[[Iterator[str]], Iterator[np.ndarray]]  # texts to the arrays that are written of them

HASHES, SETS, DECIDED = "hashes", "sets", "decided"  # phases before the documents'
READ_BYTES = 1 << 24
NOTHING_NEW = "nothing new"


@dataclass
class Job:
    """What both have in common: the phases, and what lies between them in the ledger."""

    step: str
    out: Path
    source: Where
    about: Mapping[str, Any]
    text_key: str
    split: str | None
    compression: Compression
    workers: int
    given: list[Source] = field(init=False)

    def __post_init__(self) -> None:
        self.given = sources(self.source, split=self.split)
        same_recipe(self.out, {"step": self.step, **self.about, **self._reading()})
        # One shard that has changed may change what stays of all others.
        path, stamps = self.folder(DECIDED) / "sources.json", [source.stamp() for source in self.given]
        if path.exists() and read_json(path) != stamps:
            for phase in (HASHES, SETS, DECIDED, DOCS):
                forget(self.out, phase)
            shutil.rmtree(self.out / NOTES, ignore_errors=True)
        write_json(path, stamps)

    def folder(self, phase: str) -> Path:
        """Where a phase leaves what the next ones need."""
        return self.out / LEDGER / phase

    def hash_shards(self, hashed: Hashed) -> None:
        """The first phase: a file of hashes of each shard."""
        if not self._decision.exists():
            do = functools.partial(_hash_shard, self.folder(HASHES), self.text_key, hashed)
            each_shard(self.out, HASHES, self.given, do, workers=self.workers)

    def counts(self, bytes_each: int) -> list[int]:
        """How many things each shard has."""
        return [hash_file(self.folder(HASHES), one.number).stat().st_size // bytes_each for one in self.given]

    def hashes(self, bytes_each: int) -> Iterator[np.ndarray]:
        """The hashes of all shards, some rows of bytes at a time."""
        for one in self.given:
            with hash_file(self.folder(HASHES), one.number).open("rb") as file:
                while data := file.read(READ_BYTES // bytes_each * bytes_each):
                    yield np.frombuffer(data, np.uint8).reshape(-1, bytes_each)

    @contextmanager
    def deciding(self, count: int) -> Iterator[Indices]:
        """For each thing, the number of the one that stays in its place: a file, of which only parts are in memory."""
        path = self.folder(DECIDED) / "first.npy"
        path.unlink(missing_ok=True)
        first = np.lib.format.open_memmap(path, "w+", np.int64, (max(1, count),))
        yield first[:count]
        first.flush()

    def decide(self, decide: Callable[[], dict[str, Any]], bytes_each: int) -> None:
        """The second phase: compare all hashes."""
        if not self._decision.exists():
            said = decide()
            write_json(self._decision, {"said": said, "ends": np.cumsum(self.counts(bytes_each)).tolist()})

    def write(self, kept: "Kept") -> None:
        """The last phase: the documents of each shard that stay."""
        decision = read_json(self._decision)
        work = ByShard(functools.partial(_of_shard, kept, self.folder(DECIDED) / "first.npy", decision["ends"]))
        map_documents(
            self.out,
            self.source,
            work,
            step=self.step,
            recipe=self.about,
            workers=self.workers,
            **self._reading(),
            **decision["said"],
        )
        for phase in (HASHES, SETS):
            forget(self.out, phase)

    @property
    def _decision(self) -> Path:
        return self.folder(DECIDED) / "decision.json"

    def _reading(self) -> dict[str, Any]:
        return {"text_key": self.text_key, "split": self.split, "compression": self.compression}


@dataclass(frozen=True)
class Numbers:
    """The things of one shard: their place among all, and what stays instead of each."""

    begin: int
    instead: Indices
    ends: Sequence[int]
    """Where each shard ends."""

    def stays(self, index: int) -> bool:
        """Whether nothing before it is the same."""
        return int(self.instead[index]) == self.begin + index

    def place(self, index: int) -> dict[str, int]:
        """Where the one is that stays: its shard of the source, and its number there, from 1 on."""
        number = int(self.instead[index])
        shard = bisect_right(self.ends, number)
        return {"shard": shard, "document": number - ([0, *self.ends][shard]) + 1}

    def all_seen(self, count: int) -> None:
        """Check that there were as many as when they were hashed."""
        if count != len(self.instead):
            raise PalestraError(f"a shard had {len(self.instead)} texts and now has {count}: the source has changed")


Kept = Callable[[Numbers, Iterator[Row]], Iterator[Row | Drop]]


def _of_shard(kept: Kept, path: Path, ends: Sequence[int], number: int) -> Callable[[Iterator[Row]], Iterator[Any]]:
    begin = ends[number - 1] if number else 0
    return functools.partial(kept, Numbers(begin, np.load(path, mmap_mode="r")[begin : ends[number]], ends))


def kept_documents(reason: str, numbers: Numbers, rows: Iterator[Row]) -> Iterator[Row | Drop]:
    """The documents that stay; the others are dropped for the reason, with a note of what stays instead."""
    index = 0
    for row in rows:
        if not _writable(row["text"]):
            yield Drop(NOT_UNICODE)
            continue
        note = {"id": row["id"], "duplicate_of": numbers.place(index)}
        yield row if numbers.stays(index) else Drop(reason, note)
        index += 1
    numbers.all_seen(index)


def kept_parts(separator: str, numbers: Numbers, rows: Iterator[Row]) -> Iterator[Row | Drop]:
    """The documents with those of their parts that stay; one that loses all is dropped."""
    index = 0
    for row in rows:
        if not _writable(row["text"]):
            yield Drop(NOT_UNICODE)
            continue
        parts = row["text"].split(separator)
        stay = []
        for part in parts:
            blank = not part.strip()
            if blank or numbers.stays(index):
                stay.append(part)
            index += not blank
        if len(stay) == len(parts):
            yield row
        elif any(part.strip() for part in stay):
            yield {**row, "text": separator.join(stay)}
        else:
            yield Drop(NOTHING_NEW)
    numbers.all_seen(index)


def _hash_shard(folder: Path, text_key: str, hashed: Hashed, source: Source) -> dict[str, Any]:
    """The hashes of a shard's texts; runs in a worker."""
    with written(hash_file(folder, source.number)) as file:
        for array in hashed(texts(source, text_key)):
            file.write(array.tobytes())
    return {}


def hash_file(folder: Path, number: int) -> Path:
    """Where the hashes of a shard are."""
    return folder / f"{number:05}.bin"


def texts(source: Source, text_key: str) -> Iterator[str]:
    """The texts of a shard that can be written again; the phases number these."""
    for row in documents(source, text_key):
        if not isinstance(row, Drop) and _writable(row["text"]):
            yield row["text"]


def _writable(text: str) -> bool:
    """Whether it is Unicode; JSON can hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
