"""Exact and fuzzy deduplication: hash each shard, compare all hashes, keep the first of each duplicate.

Duplicates are found by hashes of normalized texts: shards are hashed, each once and in parallel; then all hashes are
compared; then shards are written in parallel, each without what came before. The order is that of the source, so the
result depends neither on how it is cut into shards nor on the workers. Texts are read twice (thrice where near
duplicates are verified) and never kept: memory grows with the number of documents, by some 60 bytes each. What lies
between the phases is in the ledger under `out`, so that a kill costs at most the shard at work.
"""

import hashlib
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from palestra.data import duplicates
from palestra.data.duplicates import Hashes, MinHash, Shingles, Unit, normalized
from palestra.data.mixture import Indices, Keys
from palestra.data.readers import Row
from palestra.data.steps.shards import (
    DOCS,
    LEDGER,
    NOT_UNICODE,
    NOTES,
    Compression,
    Drop,
    ShardSource,
    Where,
    batches,
    each_shard,
    forget,
    map_documents,
    same_recipe,
    sources,
    texts,
    writable,
)
from palestra.errors import PalestraError, UsageError
from palestra.runs.store import read_json, write_json, written
from palestra.spec.model import Execution

Of = Literal["documents", "paragraphs", "lines"]
HashTexts = Callable[[Iterator[str]], Iterator[np.ndarray]]

HASHES, SETS, DECIDED = "hashes", "sets", "decided"  # phases before the documents'
SEPARATORS: dict[str, str] = {"paragraphs": "\n\n", "lines": "\n"}
BATCH_ROWS, BATCH_CHARACTERS = 1024, 1 << 16
DIGEST_BYTES, KEY_BYTES = 16, 8


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

    def decide(hashed: HashedShards, first: Indices) -> dict[str, Any]:
        duplicates.first_of_equal(lambda: (chunk.view("<u8") for chunk in hashed.chunks()), len(first), first)
        return {of: len(first), "unique": int(np.count_nonzero(first == np.arange(len(first))))}

    reading = {"text_key": text_key, "split": split, "compression": compression}
    keep, hash_texts = partial(_keep, of, "duplicate"), partial(_digests, of)
    _dedup("dedup_exact", out, source, {"of": of}, reading, workers, hash_texts, DIGEST_BYTES, decide, keep)


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
    must reach it too. Documents that are connected through others are one group, of which the first stays.
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise UsageError(f"dedup_fuzzy: threshold is {threshold}; give a similarity above 0, at most 1, or null")
    shingles, minhash = Shingles(shingle, unit, seed), MinHash(bands, rows, seed)

    def decide(hashed: HashedShards, first: Indices) -> dict[str, Any]:
        keys = _keys_by_band(hashed, bands)
        similarity = None if threshold is None else _similarity(hashed, shingles, duplicates.candidates(keys))
        roots, compared = duplicates.first_of_similar(keys, similarity, threshold or 0.0)
        first[:] = roots
        alone = roots == np.arange(len(roots))
        counts = {"documents": len(roots), "unique": int(alone.sum()), "groups": len(np.unique(roots[~alone]))}
        return counts if threshold is None else {**counts, "compared": compared}

    recipe = {"bands": bands, "rows": rows, "shingle": shingle, "unit": unit, "threshold": threshold, "seed": seed}
    reading = {"text_key": text_key, "split": split, "compression": compression}
    hash_texts, keep = partial(_band_keys, shingles, minhash), partial(_keep, "documents", "near duplicate")
    _dedup("dedup_fuzzy", out, source, recipe, reading, workers, hash_texts, KEY_BYTES * bands, decide, keep)


@dataclass(frozen=True)
class HashedShards:
    """A file of hashes for each shard of the source, `width` bytes for each text (or paragraph, or line)."""

    out: Path
    shards: Sequence[ShardSource]
    text_key: str
    workers: int
    width: int

    def folder(self, phase: str) -> Path:
        """Where a phase leaves what the next ones need."""
        return self.out / LEDGER / phase

    def counts(self) -> list[int]:
        """Texts of each shard."""
        return [_file(self.folder(HASHES), shard.number).stat().st_size // self.width for shard in self.shards]

    def chunks(self) -> Iterator[np.ndarray]:
        """The hashes of each shard, (texts, width) bytes, mapped."""
        for shard, count in zip(self.shards, self.counts(), strict=True):
            if count:  # an empty file cannot be mapped
                yield np.memmap(_file(self.folder(HASHES), shard.number), np.uint8, "r", shape=(count, self.width))


def _dedup(
    step: str,
    out: Path,
    source: Where,
    recipe: Mapping[str, Any],
    reading: dict[str, Any],
    workers: int,
    hash_texts: HashTexts,
    width: int,
    decide: Callable[[HashedShards, Indices], dict[str, Any]],
    keep: Callable[..., Iterator[Row | Drop]],
) -> None:
    """Hash the texts, let `decide` write for each the number of the text that stays, and write those that stay."""
    shards, text_key = sources(source, split=reading["split"]), reading["text_key"]
    same_recipe(out, {"step": step, **recipe, **reading})
    hashed = HashedShards(out, shards, text_key, workers, width)
    decided, stamps = hashed.folder(DECIDED), [shard.stamp() for shard in shards]
    if (decided / "sources.json").exists() and read_json(decided / "sources.json") != stamps:
        # One shard that has changed may change what stays of all others.
        for phase in (HASHES, SETS, DECIDED, DOCS):
            forget(out, phase)
        shutil.rmtree(out / NOTES, ignore_errors=True)
    write_json(decided / "sources.json", stamps)
    if not (decided / "decision.json").exists():
        hash_shard = partial(_hash_shard, hashed.folder(HASHES), text_key, hash_texts)
        each_shard(out, HASHES, shards, hash_shard, workers=workers)
        ends = np.cumsum(hashed.counts()).tolist()
        (decided / "first.npy").unlink(missing_ok=True)
        # Mapped, so that only parts of it are in memory; a file has at least one entry.
        first = np.lib.format.open_memmap(decided / "first.npy", "w+", np.int64, (max(1, ends[-1]),))
        counts = decide(hashed, first[: ends[-1]])
        first.flush()
        write_json(decided / "decision.json", {"said": counts, "ends": ends})
    decision = read_json(decided / "decision.json")
    work = partial(keep, decided / "first.npy", decision["ends"])
    map_documents(out, source, work, step, recipe, workers, counts=decision["said"], **reading)
    for phase in (HASHES, SETS):
        forget(out, phase)


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.bin"


def _hash_shard(folder: Path, text_key: str, hash_texts: HashTexts, source: ShardSource) -> dict[str, Any]:
    """Runs in a worker."""
    with written(_file(folder, source.number)) as file:
        for array in hash_texts(texts(source, text_key)):
            file.write(array.tobytes())
    return {}


def _parts(of: Of, text: str) -> list[tuple[str, bool]]:
    """What of a text is compared, each with whether it can be a duplicate: a blank paragraph or line cannot."""
    if of == "documents":
        return [(text, True)]
    return [(part, bool(part.strip())) for part in text.split(SEPARATORS[of])]


def _keep(
    of: Of, reason: str, path: Path, ends: Sequence[int], number: int, rows: Iterator[Row]
) -> Iterator[Row | Drop]:
    """The documents of a shard with those of their parts that stay; `ends` are the numbers at which shards end.

    One that loses all is dropped, a whole document with a note of which one stays instead.
    """
    begin, index = ends[number - 1] if number else 0, 0
    first: Indices = np.load(path, mmap_mode="r")[begin : ends[number]]
    for row in rows:
        if not writable(row["text"]):
            yield Drop(NOT_UNICODE)
            continue
        parts, stay, new = _parts(of, row["text"]), [], False
        for part, compared in parts:
            if not compared or first[index] == begin + index:
                stay.append(part)
                new = new or compared
            index += compared
        if len(stay) == len(parts):
            yield row
        elif new:
            yield {**row, "text": SEPARATORS[of].join(stay)}
        elif of == "documents":
            original = int(first[index - 1])
            shard = bisect_right(ends, original)
            place = {"shard": shard, "document": original - [0, *ends][shard] + 1}
            yield Drop(reason, {"id": row["id"], "duplicate_of": place})
        else:
            yield Drop("nothing new")
    if index != len(first):
        raise PalestraError(f"a shard had {len(first)} texts and now has {index}: the source has changed")


def _digests(of: Of, texts: Iterator[str]) -> Iterator[np.ndarray]:
    for text in texts:
        parts = (normalized(part).encode() for part, compared in _parts(of, text) if compared)
        digests = [hashlib.blake2b(part, digest_size=DIGEST_BYTES).digest() for part in parts]
        yield np.frombuffer(b"".join(digests), np.uint8)


def _band_keys(shingles: Shingles, minhash: MinHash, texts: Iterator[str]) -> Iterator[np.ndarray]:
    """The keys of the bands of each text, (texts, bands), for batches of texts."""
    for batch in batches(texts, len, BATCH_ROWS, BATCH_CHARACTERS):
        of_text = [shingles.pieces(normalized(text)) for text in batch]
        counts = np.array([len(pieces) for pieces in of_text])
        signatures = minhash.signatures(*shingles(list(chain.from_iterable(of_text))))
        yield minhash.keys(np.minimum.reduceat(signatures, np.cumsum(counts) - counts, axis=0)).astype("<u8")


def _keys_by_band(hashed: HashedShards, bands: int) -> Keys:
    """The keys of all documents, (bands, documents), in a file."""
    count, at = sum(hashed.counts()), 0
    path = hashed.folder(HASHES) / "keys.npy"
    path.unlink(missing_ok=True)
    keys = np.lib.format.open_memmap(path, "w+", np.uint64, (bands, max(1, count)))[:, :count]
    for chunk in hashed.chunks():
        keys[:, at : at + len(chunk)] = chunk.view("<u8").T
        at += len(chunk)
    return keys


def _similarity(hashed: HashedShards, shingles: Shingles, chosen: np.ndarray) -> Callable[[int, int], float]:
    """The Jaccard similarity of two of the chosen documents, whose shingles are written to files first."""
    counts, folder = hashed.counts(), hashed.folder(SETS)
    with written(folder / "chosen.npy") as file:
        np.save(file, chosen)
    begins = (np.cumsum(counts) - counts).tolist()
    write_sets = partial(_write_sets, folder, hashed.text_key, shingles, begins)
    results = each_shard(hashed.out, SETS, hashed.shards, write_sets, workers=hashed.workers)
    lengths = [np.array(result["lengths"], np.int64) for result in results]
    starts = np.concatenate([np.cumsum(each) - each for each in lengths])
    shard, length = np.repeat(np.arange(len(lengths)), [len(each) for each in lengths]), np.concatenate(lengths)
    numbers = np.flatnonzero(chosen)

    @lru_cache(maxsize=1024)
    def shingles_of(number: int) -> Hashes:
        rank = int(np.searchsorted(numbers, number))
        return np.fromfile(_file(folder, shard[rank]), "<u4", length[rank], offset=4 * starts[rank])

    return lambda left, right: duplicates.jaccard(shingles_of(left), shingles_of(right))


def _write_sets(
    folder: Path, text_key: str, shingles: Shingles, begins: list[int], source: ShardSource
) -> dict[str, Any]:
    """The shingles of the chosen texts of a shard; runs in a worker."""
    chosen = np.load(folder / "chosen.npy", mmap_mode="r")[begins[source.number] :]
    lengths = []
    with written(_file(folder, source.number)) as file:
        for index, text in enumerate(texts(source, text_key)):
            if chosen[index]:
                hashes = shingles.set(normalized(text)).astype("<u4")
                file.write(hashes.tobytes())
                lengths.append(len(hashes))
    return {"lengths": lengths}
