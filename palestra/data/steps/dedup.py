"""Exact and fuzzy deduplication: hash each shard, compare all hashes, keep the first of each duplicate.

The first and the last are done by shard, in parallel. What lies between them is in the ledger under `out`, so that a
kill costs at most the shard at work.

What is the same is decided on hashes of normalized texts: shards are hashed, each once and in parallel; then all hashes
are compared; then shards are written, each without what came before. The order is that of the source, so the result
depends neither on how it is cut into shards nor on the workers. Texts are read twice (thrice where near duplicates are
verified) and never kept: memory grows with the number of documents, by some 60 bytes each.
"""

import functools
import hashlib
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from palestra.data.duplicates import (
    Hashes,
    MinHash,
    Shingles,
    Unit,
    candidates,
    first_of_equal,
    first_of_similar,
    jaccard,
    normalized,
)
from palestra.data.mixture import Indices, Keys
from palestra.data.readers import Row
from palestra.data.steps.shards import (
    DOCS,
    LEDGER,
    NOT_UNICODE,
    NOTES,
    ByShard,
    Compression,
    Drop,
    ShardSource,
    Where,
    documents,
    each_shard,
    forget,
    map_documents,
    same_recipe,
    sources,
)
from palestra.errors import PalestraError, UsageError
from palestra.runs.store import read_json, write_json, written
from palestra.spec.model import Execution

Hashed = Callable[[Iterator[str]], Iterator[np.ndarray]]  # texts to the arrays that are written of them

HASHES, SETS, DECIDED = "hashes", "sets", "decided"  # phases before the documents'
READ_BYTES = 1 << 24
NOTHING_NEW = "nothing new"


@dataclass
class DedupJob:
    """What both have in common: the phases, and what lies between them in the ledger."""

    step: str
    out: Path
    source: Where
    about: Mapping[str, Any]
    text_key: str
    split: str | None
    compression: Compression
    workers: int
    given: list[ShardSource] = field(init=False)

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


def _hash_shard(folder: Path, text_key: str, hashed: Hashed, source: ShardSource) -> dict[str, Any]:
    """The hashes of a shard's texts; runs in a worker."""
    with written(hash_file(folder, source.number)) as file:
        for array in hashed(texts(source, text_key)):
            file.write(array.tobytes())
    return {}


def hash_file(folder: Path, number: int) -> Path:
    """Where the hashes of a shard are."""
    return folder / f"{number:05}.bin"


def texts(source: ShardSource, text_key: str) -> Iterator[str]:
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


Of = Literal["documents", "paragraphs", "lines"]

SEPARATORS: dict[str, str] = {"paragraphs": "\n\n", "lines": "\n"}
BATCH_ROWS, BATCH_CHARACTERS = 1024, 1 << 16
DIGEST_BYTES, KEY_BYTES = 16, 8
DUPLICATE, NEAR = "duplicate", "near duplicate"


def dedup_exact(
    out: Path,
    *,
    source: Where,
    of: Of = "documents",
    text_key: str = "text",
    split: str | None = None,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Leave out every document whose normalized text an earlier one has; or paragraphs or lines, of all documents.

    Normalized are case, white space and Unicode composition. Paragraphs are separated by an empty line. A blank one is
    never a duplicate; a document of which nothing else is left is dropped.
    """
    if of not in get_args(Of):
        raise UsageError(f"dedup_exact: of is {of!r}; it can be {', '.join(get_args(Of))}")
    job = DedupJob("dedup_exact", out, source, {"of": of}, text_key, split, compression, workers)

    def decide() -> dict[str, Any]:
        count = sum(job.counts(DIGEST_BYTES))
        with job.deciding(count) as first:
            first_of_equal(lambda: (chunk.view("<u8") for chunk in job.hashes(DIGEST_BYTES)), count, first)
            unique = int(np.count_nonzero(first == np.arange(count)))
        return {of: count, "unique": unique}

    job.hash_shards(functools.partial(_digests, of))
    job.decide(decide, DIGEST_BYTES)
    job.write(
        functools.partial(kept_documents, DUPLICATE)
        if of == "documents"
        else functools.partial(kept_parts, SEPARATORS[of])
    )


def dedup_fuzzy(
    out: Path,
    *,
    source: Where,
    bands: int = 26,
    rows: int = 11,
    shingle: int = 5,
    unit: Unit = "characters",
    threshold: float | None = 0.7,
    seed: int = 42,
    text_key: str = "text",
    split: str | None = None,
    compression: Compression = "none",
    workers: Execution[int] = 2,
) -> None:
    """Leave out documents that have most of their shingles in common with an earlier one, found by MinHash.

    Candidates agree in all `rows` permutations of one of the `bands`; with a threshold their true Jaccard similarity
    must reach it too. Documents that hang together over others are one group, of which the first stays.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise UsageError(f"dedup_fuzzy: threshold is {threshold}; give a similarity above 0, at most 1, or null")
    shingles, minhash = Shingles(shingle, unit, seed), MinHash(bands, rows, seed)
    about = {"bands": bands, "rows": rows, "shingle": shingle, "unit": unit, "threshold": threshold, "seed": seed}
    job = DedupJob("dedup_fuzzy", out, source, about, text_key, split, compression, workers)
    bytes_each = KEY_BYTES * bands

    def decide() -> dict[str, Any]:
        count, keys = sum(job.counts(bytes_each)), _keys_by_band(job, bands)
        similarity = None if threshold is None else _similarity(job, shingles, candidates(keys), bands)
        roots, compared = first_of_similar(keys, similarity, threshold or 0.0)
        with job.deciding(count) as first:
            first[:] = roots
        alone = roots == np.arange(count)
        said = {"documents": count, "unique": int(np.count_nonzero(alone)), "groups": len(np.unique(roots[~alone]))}
        return said if threshold is None else {**said, "compared": compared}

    job.hash_shards(functools.partial(_band_keys, shingles, minhash))
    job.decide(decide, bytes_each)
    job.write(functools.partial(kept_documents, NEAR))


def _digests(of: Of, texts: Iterator[str]) -> Iterator[np.ndarray]:
    for text in texts:
        parts = [text] if of == "documents" else [part for part in text.split(SEPARATORS[of]) if part.strip()]
        digests = [hashlib.blake2b(normalized(part).encode(), digest_size=DIGEST_BYTES).digest() for part in parts]
        yield np.frombuffer(b"".join(digests), np.uint8)


def _band_keys(shingles: Shingles, minhash: MinHash, texts: Iterator[str]) -> Iterator[np.ndarray]:
    """The keys of the bands of each text, (texts, bands)."""

    def of(pieces: list[str], begins: list[int]) -> Keys:
        signatures = np.minimum.reduceat(minhash.signatures(*shingles(pieces)), begins, axis=0)
        return minhash.keys(signatures).astype("<u8")

    pieces: list[str] = []
    begins: list[int] = []
    characters = 0
    for text in texts:
        begins.append(len(pieces))
        pieces += shingles.pieces(normalized(text))
        characters += len(text)
        if len(begins) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield of(pieces, begins)
            pieces, begins, characters = [], [], 0
    if begins:
        yield of(pieces, begins)


def _keys_by_band(job: DedupJob, bands: int) -> Keys:
    """The keys of all documents, (bands, documents), in a file."""
    count = sum(job.counts(KEY_BYTES * bands))
    path = job.folder(HASHES) / "keys.npy"
    path.unlink(missing_ok=True)
    keys = np.lib.format.open_memmap(path, "w+", np.uint64, (bands, max(1, count)))[:, :count]
    at = 0
    for chunk in job.hashes(KEY_BYTES * bands):
        some = chunk.view("<u8")
        keys[:, at : at + len(some)] = some.T
        at += len(some)
    return keys


def _similarity(job: DedupJob, shingles: Shingles, chosen: np.ndarray, bands: int) -> Callable[[int, int], float]:
    """The Jaccard similarity of two of the chosen documents, whose shingles are written to files first."""
    counts, path = job.counts(KEY_BYTES * bands), job.folder(SETS) / "chosen.npy"
    with written(path) as file:
        np.save(file, chosen)
    begins = (np.cumsum(counts) - counts).tolist()
    do = functools.partial(_write_sets, job.folder(SETS), job.text_key, shingles, begins)
    each_shard(job.out, SETS, job.given, do, workers=job.workers)
    lengths = [np.fromfile(job.folder(SETS) / f"{one.number:05}.lengths", "<i8") for one in job.given]
    starts = np.concatenate([np.cumsum(each) - each for each in lengths])
    shard, length = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths]), np.concatenate(lengths)
    numbers = np.flatnonzero(chosen)

    @functools.lru_cache(maxsize=1024)
    def shingles_of(number: int) -> Hashes:
        rank = int(np.searchsorted(numbers, number))
        return np.fromfile(hash_file(job.folder(SETS), shard[rank]), "<u4", length[rank], offset=4 * starts[rank])

    return lambda left, right: jaccard(shingles_of(left), shingles_of(right))


def _write_sets(
    folder: Path, text_key: str, shingles: Shingles, begins: list[int], source: ShardSource
) -> dict[str, Any]:
    """The shingles of those texts of a shard that are chosen; runs in a worker."""
    chosen = np.load(folder / "chosen.npy", mmap_mode="r")[begins[source.number] :]
    lengths = []
    with written(hash_file(folder, source.number)) as file:
        for index, text in enumerate(texts(source, text_key)):
            if chosen[index]:
                ours = shingles.set(normalized(text)).astype("<u4")
                file.write(ours.tobytes())
                lengths.append(len(ours))
    with written(folder / f"{source.number:05}.lengths") as file:
        file.write(np.array(lengths, "<i8").tobytes())
    return {}
